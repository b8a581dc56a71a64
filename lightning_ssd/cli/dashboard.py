"""``lightning-ssd dashboard``: W&B workspace for the metrics and pictures of the monitor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from lightning_ssd.cli.output import CommandError, console, reported_errors
from lightning_ssd.reports.dashboard import has_key, make_workspace, save, to_json

__all__ = ["dashboard"]


def dashboard(
    project: Annotated[str, typer.Option(help="W&B project of the runs.")] = "lightning_ssd",
    entity: Annotated[str, typer.Option(help="W&B user or team; default: that of the key.")] = "",
    name: Annotated[str, typer.Option(help="Of the workspace.")] = "lightning_ssd",
    json: Annotated[Path, typer.Option(metavar="FILE", help="Where it is written to.")] = Path("dashboard.json"),
    offline: Annotated[bool, typer.Option("--offline", help="Send nothing, even where there is a key.")] = False,
) -> None:
    """Write the dashboard for runs with OffloadMonitor, and save it to W&B where a key is found.

    A workspace, which follows the project. Sections for memory, cost, drives, plans and wear; runs are grouped by mode:
    their job type, and what their policy does with activations.
    """
    with reported_errors():
        try:
            workspace = make_workspace(entity=entity, project=project, name=name)
            json.write_text(to_json(workspace), encoding="utf-8")
        except ImportError as error:
            raise CommandError(
                "wandb-workspaces", str(error), "pip install '.[report]' in the checkout of lightning_ssd"
            ) from None
        except OSError as error:
            raise CommandError(f"to write {json}", str(error), "name another file in --json") from None
        console().print(escape(str(json)), soft_wrap=True)
        if offline or not has_key():
            console().print("Not sent to W&B: " + ("--offline" if offline else "no key was found (wandb login)") + ".")
        else:
            console().print(escape(save(workspace)), soft_wrap=True)
