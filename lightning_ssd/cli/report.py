"""``lightning-ssd report``: the page of a run, made from its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from lightning_ssd.cli.output import CommandError, console, reported_errors
from lightning_ssd.reports.adviser import advise
from lightning_ssd.reports.files import write_report
from lightning_ssd.reports.run_report import load_report

__all__ = ["report"]


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a report, or its report.json.")],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to write; default: where it lies.")] = None,
) -> None:
    """Write the page and the pictures of a run, and say what to change.

    A run leaves its numbers where OffloadMonitor(report_dir=...) names a directory. The page needs no network.
    """
    with reported_errors():
        found = load_report(run)
        folder = out or (run if run.is_dir() else run.parent)
        try:
            written = write_report(found, folder)
        except OSError as error:
            raise CommandError(f"to write to {folder}", str(error), "name a directory with room in --out") from None
        shown = console()
        shown.print(escape(found.summary))
        more = [sentence for sentence in advise(found) if sentence not in found.summary]
        if more:
            shown.print("\n[bold]What to change[/bold]")
        for sentence in more:
            shown.print(f"- {escape(sentence)}")
        shown.print()
        for file in written:
            shown.print(escape(str(file)), soft_wrap=True)
