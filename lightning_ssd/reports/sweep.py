"""All jobs of a Hydra sweep side by side: what each was told, what it held and what it took."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_ssd.errors import ConfigError
from lightning_ssd.reports.charts import Chart, trade_off
from lightning_ssd.reports.run_report import JSON_NAME, RunReport, load_report

__all__ = ["Job", "read_sweep", "sweep_chart", "sweep_csv"]

_GIB = 1 << 30
_SUMMARY = "summary.json"
_OVERRIDES = Path(".hydra", "overrides.yaml")
_MODE = re.compile(r"[+]*([\w./]*[./])?(offload|activations)=")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run. ``None``: it does not tell."""

    name: str
    """Path of its directory below that of the sweep."""
    overrides: tuple[str, ...]
    """Overrides on its command line that not all jobs have."""
    step_s: float | None = None
    peak_bytes: int | None = None
    """Peak of all memory above what the run holds at rest."""
    settled_peak_bytes: int | None = None
    """Saved activations in memory, as in the verdict."""
    saved_peak_bytes: int | None = None
    """Bytes that keeping all of them would have held."""
    written_bytes: int | None = None
    """To drives, per step."""
    stall_s: float | None = None
    """Per step."""


def read_sweep(directory: Path) -> list[Job]:
    """Read every job below a directory that has left a ``report.json`` or a ``summary.json``, in the order of names.

    Raises:
        ConfigError: there is none, or one cannot be read.
    """
    found = sorted({_home(file) for name in (JSON_NAME, _SUMMARY) for file in directory.rglob(name)}, key=_in_order)
    jobs = [_read(home, directory) for home in found]
    if not jobs:
        raise ConfigError(
            f"expected jobs of a sweep in {directory}, and found no {JSON_NAME} and no {_SUMMARY} below it; a job "
            'leaves one with OffloadMonitor(report_dir="..."), and python -m recipes.train in any case'
        )
    common = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()
    return [
        replace(job, overrides=tuple(override for override in job.overrides if override not in common)) for job in jobs
    ]


def sweep_csv(jobs: Sequence[Job]) -> str:
    """A line for each job; bytes and seconds as numbers."""
    names = [name for name in Job.__dataclass_fields__ if name != "overrides"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*names, "overrides"])
    for job in jobs:
        writer.writerow([*(getattr(job, name) for name in names), " ".join(job.overrides)])
    return text.getvalue()


def sweep_chart(jobs: Sequence[Job]) -> Chart:
    """Return time over peak; jobs that tell only one of both are left out.

    The way of offloading is the mode, known by the override that sets it; all other overrides together are the model.
    """
    points = []
    for job in jobs:
        if job.peak_bytes is not None and job.step_s is not None:
            modes = [override for override in job.overrides if _MODE.match(override)]
            model = ", ".join(override for override in job.overrides if override not in modes)
            mode = ", ".join(modes) or (model and "as configured") or job.name
            points.append((model, mode, job.peak_bytes / _GIB, job.step_s))
    return trade_off(points)


def _home(file: Path) -> Path:
    """The job's own directory: the one with Hydra's files, if the report lies below it."""
    return next((folder for folder in file.parents if (folder / _OVERRIDES).is_file()), file.parent)


def _in_order(folder: Path) -> tuple[tuple[int, str], ...]:
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in folder.parts)


def _read(home: Path, directory: Path) -> Job:
    common: dict[str, Any] = {"name": str(home.relative_to(directory)), "overrides": tuple(_overrides(home))}
    file = home / _SUMMARY
    if not file.is_file():
        return Job(**common, **_of_report(load_report(min(home.rglob(JSON_NAME)))))
    try:
        return Job(**common, **_of_summary(json.loads(file.read_text(encoding="utf-8"))))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"expected the summary of a run in {file}, and cannot read it ({error!r})") from None


def _of_report(report: RunReport) -> dict[str, Any]:
    metrics = report.metrics
    written = metrics.get("io/write_gib")
    # Of one recorded step: the peak of the process has that of earlier jobs in it, where a launcher runs all in one.
    levels = [] if report.record is None else [level.nbytes for level in report.record.levels]
    return {
        "step_s": report.step_s,
        "peak_bytes": max(levels) - min(levels) if levels else None,
        "settled_peak_bytes": round(report.settled_bytes) if report.stats else None,
        "saved_peak_bytes": report.stats.get("saved_peak_bytes"),
        "written_bytes": None if written is None else round(written * _GIB),
        "stall_s": metrics.get("io/stall_s"),
    }


def _of_summary(summary: Mapping[str, Any]) -> dict[str, Any]:
    told = {"step_s": summary["step_s"], "peak_bytes": summary["peak_above_rest_bytes"]}
    if not summary["counted"]:
        return told
    return {
        **told,
        "settled_peak_bytes": summary["settled_peak_bytes"],
        "saved_peak_bytes": summary["saved_peak_bytes"],
        "written_bytes": summary["written_bytes_per_step"],
        "stall_s": summary["stall_s_per_step"],
    }


def _overrides(home: Path) -> Iterator[str]:
    """Hydra writes a YAML list of plain strings."""
    file = home / _OVERRIDES
    if file.is_file():
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith("- "):
                yield line[2:].strip("'\"")
