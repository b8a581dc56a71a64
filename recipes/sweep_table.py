"""Compare the jobs of a Hydra sweep: memory, time, bytes.

    python -m recipes.sweep_table outputs/sweep/mine

Reads the ``summary.json`` that each job of ``recipes.train`` leaves. Prints a table, and writes ``sweep.csv`` beside.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path

from recipes.summary import RunSummary

__all__ = ["main"]

_MIB = 1 << 20
_COLUMNS = {
    "step_s": "s/step",
    "peak_above_rest_bytes": "peak MiB",
    "settled_peak_bytes": "activations MiB",
    "saved_peak_bytes": "of MiB",
    "written_bytes_per_step": "written MiB/step",
    "stall_s_per_step": "stall s",
}
"""Field of a summary -> head of its column."""


def _overrides(job: Path) -> list[str]:
    """Return the overrides that Hydra gave the job: a YAML list of plain strings."""
    lines = (job / ".hydra" / "overrides.yaml").read_text(encoding="utf-8").splitlines()
    return [line[2:].strip("'\"") for line in lines if line.startswith("- ")]


def _cell(name: str, run: RunSummary) -> str:
    value = getattr(run, name)
    return f"{value / _MIB:,.1f}" if "_bytes" in name else f"{value:.3g}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point.

    Args:
        arguments: command line; default: that of ``sys.argv``.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="of the sweep (hydra.sweep.dir)")
    directory: Path = parser.parse_args(arguments).directory
    jobs = sorted((file.parent for file in directory.rglob("summary.json")), key=lambda job: (len(job.name), job.name))
    if not jobs:
        print(f"no summary.json below {directory}; each job of python -m recipes.train -m leaves one", file=sys.stderr)
        return 1
    runs, overrides = [RunSummary.read(job / "summary.json") for job in jobs], [_overrides(job) for job in jobs]
    common = set.intersection(*map(set, overrides)) if len(jobs) > 1 else set()
    names = [" ".join(one for one in each if one not in common) for each in overrides]
    with (directory / "sweep.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["overrides", *_COLUMNS])
        writer.writerows(
            [name, *(getattr(run, key) for key in _COLUMNS)] for name, run in zip(names, runs, strict=True)
        )
    width = max(len(name) for name in (*names, "job"))
    print(f"{'job':{width}}  " + "  ".join(_COLUMNS.values()))
    for name, run in zip(names, runs, strict=True):
        print(f"{name:{width}}  " + "  ".join(f"{_cell(key, run):>{len(head)}}" for key, head in _COLUMNS.items()))
    print(directory / "sweep.csv")
    return 0


if __name__ == "__main__":
    sys.exit(main())
