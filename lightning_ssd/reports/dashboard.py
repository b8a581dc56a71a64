"""The W&B dashboard as code: which panels there are, the workspace made of them, and how it is sent on request."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lightning_ssd.errors import ConfigError
from lightning_ssd.telemetry.metrics import NUM_DRIVES

if TYPE_CHECKING:
    from typing import Any

    from wandb_workspaces.workspaces import Workspace

__all__ = ["DASHBOARD", "Panel", "Section", "has_key", "make_workspace", "save", "to_json"]

_AXIS = "trainer/global_step"
_MODE = ("JobType", "lightning_ssd.policy.activations")
"""Runs of one mode are shown together: first by their job type, which the recipes set to the way of offloading, then by
what the monitor leaves in a run's configuration."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel."""

    title: str
    keys: tuple[str, ...]
    """Keys of the metrics' table, or of pictures."""
    kind: Literal["line", "media", "scalar", "bar"] = "line"
    """A scalar and a bar for each run have the last value."""


@dataclass(frozen=True, slots=True)
class Section:
    """A row of panels."""

    name: str
    panels: tuple[Panel, ...]


def _each_drive(metric: str) -> tuple[str, ...]:
    return tuple(f"io/drive{n}_{metric}" for n in range(NUM_DRIVES))


DASHBOARD = (
    Section(
        "Which run saves most?",
        (
            Panel("Saved %", ("offload/saved_pct",), "scalar"),
            Panel("Saved %, by mode", ("offload/saved_pct",), "bar"),
            Panel("One step, by mode (s)", ("time/step_s",), "bar"),
        ),
    ),
    Section(
        "Does it fit?",
        (
            Panel("Saved activations: in memory, and with all of them kept (GiB)", (
                "memory/activations_resident_peak_gib", "memory/activations_saved_peak_gib")),
            Panel("When most activations are saved, they are (GiB)", tuple(
                f"memory/activations_{place}_at_peak_gib" for place in ("kept", "host", "ssd", "recomputed"))),
            Panel("Peak of all memory (GiB)", ("memory/device_peak_gib", "memory/host_peak_gib")),
            Panel("Held in host memory in place of drives (GiB)", (
                "memory/host_tier_gib", "memory/states_resident_gib")),
            Panel("Weights that wait on drives, and in memory of them (GiB)", (
                "memory/weights_offloaded_gib", "memory/weights_resident_peak_gib")),
            Panel("Memory over one step", ("offload/memory_over_step",), "media"),
        ),
    ),
    Section(
        "What does it cost?",
        (
            Panel("One step (s)", ("time/step_s",)),
            Panel("Waiting, share of the step", ("io/stall_ratio",)),
            Panel("Waiting in forward, backward and update (s)", (
                "io/stall_forward_s", "io/stall_backward_s", "io/stall_update_s")),
            Panel("Overhead / pass", ("plan/predicted_overhead_ratio", "plan/overhead_ratio")),
            Panel("Computed again in backward (GiB)", ("plan/recomputed_gib",)),
        ),
    ),
    Section(
        "What do the drives do?",
        (
            Panel("Moved per step (GiB)", ("io/write_gib", "io/read_gib", "io/host_gib", "io/forwarded_gib")),
            Panel("Rates (GiB/s)", ("io/write_gib_per_s", "io/read_gib_per_s")),
            Panel("Written by each drive (GiB/s)", _each_drive("write_gib_per_s")),
            Panel("Read by each drive (GiB/s)", _each_drive("read_gib_per_s")),
            Panel("Written by each drive, per step (GiB)", _each_drive("write_gib")),
            Panel("Read by each drive, per step (GiB)", _each_drive("read_gib")),
            Panel("Share of the busiest drive", ("io/busiest_drive_ratio",)),
            Panel("Hidden behind compute", ("io/overlap_ratio",)),
            Panel("Transfers of one step", ("offload/transfers",), "media"),
        ),
    ),
    Section(
        "Is the plan right?",
        (
            Panel("One pass (s): predicted, measured", ("plan/predicted_step_s", "plan/measured_step_s")),
            Panel("Peak (GiB): predicted, measured", ("plan/predicted_peak_gib", "plan/measured_peak_gib")),
            Panel("Lives of the largest saved tensors", ("offload/lifetimes",), "media"),
        ),
    ),
    Section(
        "How long do the drives live?",
        (
            Panel("Written since the start (TB)", ("wear/written_tb",)),
            Panel("Days until drive_endurance is written", ("wear/drive_life_days",)),
        ),
    ),
)  # fmt: skip


def make_workspace(*, entity: str, project: str, name: str) -> Workspace:
    """Build the workspace; nothing is sent anywhere.

    Raises:
        ImportError: wandb-workspaces is not installed.
    """
    from wandb_workspaces import expr
    from wandb_workspaces.workspaces import RunsetSettings, Workspace
    from wandb_workspaces.workspaces import Section as Row

    job_type, policy = _MODE
    return Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[Row(name=section.name, panels=_drawn(section), is_open=True) for section in DASHBOARD],
        runset_settings=RunsetSettings(groupby=[expr.Metric(job_type), expr.Config(policy)]),
        auto_generate_panels=False,
    )


def _drawn(section: Section) -> list[Any]:
    from wandb_workspaces.reports.v2 import interface as parts

    kinds: dict[str, Callable[..., Any]] = {
        "line": lambda title, keys: parts.LinePlot(title=title, x=_AXIS, y=keys),
        "media": lambda title, keys: parts.MediaBrowser(title=title, media_keys=keys),
        "scalar": lambda title, keys: parts.ScalarChart(title=title, metric=keys[0]),
        "bar": lambda title, keys: parts.BarPlot(title=title, metrics=keys),
    }
    return [kinds[panel.kind](panel.title, list(panel.keys)) for panel in section.panels]


def to_json(workspace: Workspace) -> str:
    """Return the workspace in the form that W&B stores.

    Leans on ``_to_model`` of wandb-workspaces, which has no public way to write it without sending it.
    """
    model = workspace._to_model()
    return json.dumps(json.loads(model.model_dump_json(by_alias=True, exclude_none=True)), indent=1)


def has_key() -> bool:
    """Whether W&B knows who we are: a key in the environment or in its own file. Asks no server."""
    import wandb

    if "prompt" in inspect.signature(wandb.login).parameters:
        return wandb.login(prompt=False, verify=False)
    return bool(wandb.api.api_key)  # the way of older ones


def save(workspace: Any) -> str:
    """Send a workspace of wandb-workspaces, and return where it is.

    Raises:
        ConfigError: W&B does not take it.
    """
    import wandb

    try:
        if not workspace.entity:
            workspace.entity = wandb.Api().default_entity
        return str(workspace.save_as_new_view().url)
    except Exception as error:  # of many kinds: network, key, project, and what the server says
        raise ConfigError(
            f"expected W&B to take the workspace for {workspace.entity}/{workspace.project}, and got: {error}; name "
            "--entity and an existing --project, or give --offline"
        ) from error
