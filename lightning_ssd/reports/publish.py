"""Gives pictures and facts of a run to the loggers that can show them: W&B and TensorBoard.

Loggers are known by what they log to, so that neither library is loaded unless the user's logger has loaded it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_ssd.reports.charts import Chart
from lightning_ssd.reports.drawing import draw

__all__ = ["publish_charts", "publish_facts", "takes_charts"]


def takes_charts(experiment: object) -> bool:
    """Whether an experiment (a logger's own) can show pictures."""
    return _is_wandb(experiment) or callable(getattr(experiment, "add_figure", None))


def publish_charts(charts: Sequence[Chart], experiment: Any, step: int) -> None:
    """Log each chart under ``offload/<key>``.

    Args:
        charts: of one step.
        experiment: of a logger; one that cannot show pictures gets none.
        step: on the axis that Lightning's loggers use.

    Raises:
        ImportError: Matplotlib is not installed.
    """
    if _is_wandb(experiment):
        import wandb

        media = {f"offload/{chart.key}": wandb.Image(draw(chart)) for chart in charts}
        experiment.log({**media, "trainer/global_step": step})
    elif takes_charts(experiment):
        for chart in charts:
            experiment.add_figure(f"offload/{chart.key}", draw(chart), step)


def publish_facts(experiment: Any, *, config: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
    """Put settings into a W&B run's configuration, and what came of them into its summary. Others get nothing."""
    if not _is_wandb(experiment):
        return
    if config:
        experiment.config.update({"lightning_ssd": dict(config)}, allow_val_change=True)
    for key, value in summary.items():
        experiment.summary[key] = value
    if summary:  # where the run's workspace is, is known to the command alone
        entity = ["--entity", experiment.entity] if experiment.entity else []
        command = ["lightning-ssd", "dashboard", "--project", experiment.project, *entity]
        experiment.summary["offload/dashboard"] = shlex.join(command)


def _is_wandb(experiment: object) -> bool:
    return type(experiment).__module__.partition(".")[0] == "wandb"
