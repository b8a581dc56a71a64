"""The one place that talks to W&B's server, and only where the user asks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lightning_ssd.errors import ConfigError
from lightning_ssd.reports.charts import Chart
from lightning_ssd.reports.publish import wandb_media

__all__ = ["has_key", "log_sweep", "save"]


def has_key() -> bool:
    """Whether W&B knows who we are: a key in the environment or in its own file. Asks no server."""
    import wandb

    if "prompt" in inspect.signature(wandb.login).parameters:
        return wandb.login(prompt=False, verify=False)
    return bool(wandb.api.api_key)  # the way of older ones


def save(document: Any) -> str:
    """Send a workspace or a report of wandb-workspaces, and return where it is.

    Raises:
        ConfigError: W&B does not take it.
    """
    import wandb

    kind = type(document).__name__.lower()
    try:
        if not document.entity:
            document.entity = wandb.Api().default_entity
        return str((document.save_as_new_view() if kind == "workspace" else document.save()).url)
    except Exception as error:  # of many kinds: network, key, project, and what the server says
        raise ConfigError(
            f"expected W&B to take the {kind} for {document.entity}/{document.project}, and got: {error}; name "
            "--entity and an existing --project, or give --offline"
        ) from error


def log_sweep(
    chart: Chart,
    rows: Sequence[Mapping[str, Any]],
    *,
    group: str,
    project: str,
    entity: str,
    folder: Path,
    offline: bool,
) -> str:
    """Log what the jobs of a sweep held and took into a run of its own, and return where it is.

    Args:
        chart: of all jobs.
        rows: one per job, with the same keys.
        group: that of the jobs' runs; the recipes name it by the sweep's directory.
        project: of W&B.
        entity: of W&B; empty: that of the key.
        folder: for W&B's files.
        offline: send nothing.

    Raises:
        ConfigError: W&B does not take it.
        ImportError: Matplotlib is not installed.
    """
    import wandb

    media = wandb_media([chart] if chart.series else [])
    about: dict[str, Any] = {"group": group, "name": f"{group}-sweep", "job_type": "sweep"}
    mode: Literal["offline"] | None = "offline" if offline else None
    try:
        with wandb.init(project=project, entity=entity or None, dir=folder, mode=mode, **about) as run:
            table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
            run.log({**media, "offload/sweep": table})
            return run.url or str(Path(run.dir).parent)
    except (wandb.Error, OSError) as error:
        raise ConfigError(
            f"expected W&B to take the sweep for {entity}/{project}, and got: {error}; name another --wandb-project or "
            "--wandb-entity, or give --offline"
        ) from error
