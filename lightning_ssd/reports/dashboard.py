"""The W&B dashboard as code: which panels there are, and the workspace made of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from typing import Any

    from wandb_workspaces.workspaces import Workspace

__all__ = ["DASHBOARD", "Panel", "Section", "make_workspace", "workspace_json"]

_AXIS = "trainer/global_step"
_MODE = "lightning_ssd.policy.activations"
"""Where the monitor leaves it in a run's configuration; runs of one mode are shown together."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel."""

    title: str
    keys: tuple[str, ...]
    """Of the metrics' table, or of pictures."""
    kind: Literal["line", "media"] = "line"


@dataclass(frozen=True, slots=True)
class Section:
    """A row of panels."""

    name: str
    panels: tuple[Panel, ...]


DASHBOARD = (
    Section(
        "Does it fit?",
        (
            Panel("Saved activations: in memory, and with all of them kept (GiB)", (
                "memory/activations_resident_peak_gib", "memory/activations_saved_peak_gib")),
            Panel("Peak of all memory (GiB)", ("memory/device_peak_gib", "memory/host_peak_gib")),
            Panel("Memory over one step", ("offload/memory_over_step",), "media"),
        ),
    ),
    Section(
        "What does it cost?",
        (
            Panel("One step (s)", ("time/step_s",)),
            Panel("Samples and tokens per second", ("time/samples_per_s", "time/tokens_per_s")),
            Panel("Waiting, share of the step", ("io/stall_ratio",)),
            Panel("Moved steps / kept steps", ("plan/slowdown_ratio",)),
        ),
    ),
    Section(
        "What do the drives do?",
        (
            Panel("Moved per step (GiB)", ("io/write_gib", "io/read_gib", "io/host_gib", "io/forwarded_gib")),
            Panel("Rates (GiB/s)", ("io/write_gib_per_s", "io/read_gib_per_s")),
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
            Panel("Days until the rating is reached", ("wear/drive_life_days",)),
        ),
    ),
)  # fmt: skip


def make_workspace(*, entity: str, project: str, name: str) -> Workspace:
    """Build the workspace; nothing is sent anywhere.

    Raises:
        ImportError: wandb-workspaces is not installed.
    """
    from wandb_workspaces import expr
    from wandb_workspaces.reports.v2 import interface as panels
    from wandb_workspaces.workspaces import RunsetSettings, Workspace
    from wandb_workspaces.workspaces import Section as Row

    def drawn(panel: Panel) -> Any:
        if panel.kind == "media":
            return panels.MediaBrowser(title=panel.title, media_keys=list(panel.keys))
        return panels.LinePlot(title=panel.title, x=_AXIS, y=list(panel.keys))

    return Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[
            Row(name=section.name, panels=[drawn(panel) for panel in section.panels], is_open=True)
            for section in DASHBOARD
        ],
        runset_settings=RunsetSettings(groupby=[expr.Config(_MODE)]),
        auto_generate_panels=False,
    )


def workspace_json(workspace: Workspace) -> str:
    """Return the workspace in the form that W&B stores.

    Leans on ``_to_model`` of wandb-workspaces, which has no public way to write a workspace without sending it.
    """
    model = workspace._to_model()
    return json.dumps(json.loads(model.model_dump_json(by_alias=True, exclude_none=True)), indent=1)
