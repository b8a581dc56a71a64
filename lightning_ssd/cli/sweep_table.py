"""``lightning-ssd sweep-table``: all jobs of a Hydra sweep in one table, a CSV file and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from lightning_ssd.cli.output import CommandError, columns_table, console, reported_errors
from lightning_ssd.common.formatting import format_sizes
from lightning_ssd.reports.drawing import save_png
from lightning_ssd.reports.sweep import Job, read_sweep, sweep_chart, sweep_csv

__all__ = ["sweep_table"]


def sweep_table(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Of the sweep (hydra.sweep.dir).")],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where files go; default: into DIR.")] = None,
) -> None:
    """Compare the jobs of a sweep: memory, time, bytes.

    Prints a table, and writes sweep.csv and sweep.png (time over peak). Jobs are known by the overrides that Hydra
    gave them.
    """
    with reported_errors():
        jobs = read_sweep(directory)
        console().print(_table(jobs))
        folder = out or directory
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "sweep.csv").write_text(sweep_csv(jobs), encoding="utf-8")
            files = [folder / "sweep.csv", *_picture(jobs, folder / "sweep.png")]
        except OSError as error:
            raise CommandError(f"to write to {folder}", str(error), "name a directory with room in --out") from None
        for file in files:
            console().print(escape(str(file)), soft_wrap=True)


def _picture(jobs: list[Job], file: Path) -> list[Path]:
    chart = sweep_chart(jobs)
    if not chart.series:
        return []
    try:
        save_png(chart, file)
    except ImportError as error:
        console(errors=True).print(f"no picture was drawn ({error}); pip install '.\\[report]' in the checkout")
        return []
    return [file]


def _table(jobs: list[Job]) -> Table:
    activations = _in_one_unit([*(job.settled_peak_bytes for job in jobs), *(job.saved_peak_bytes for job in jobs)])
    return columns_table(
        {
            "job": ["\n".join(job.overrides) or job.name for job in jobs],
            "s/step": [_number(job.step_s) for job in jobs],
            "peak": _in_one_unit([job.peak_bytes for job in jobs]),
            "activations": activations[: len(jobs)],
            "of": activations[len(jobs) :],
            "written/step": _in_one_unit([job.written_bytes for job in jobs]),
            "stall s": [_number(job.stall_s) for job in jobs],
        }
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _in_one_unit(sizes: Sequence[int | None]) -> list[str]:
    """So that a column can be compared at a glance."""
    told = iter(format_sizes(*known) if (known := [nbytes for nbytes in sizes if nbytes is not None]) else ())
    return ["" if nbytes is None else next(told) for nbytes in sizes]
