"""From the samples of ``recipes.benchmarks.optimizer`` to its tables. Pure arithmetic."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from recipes.benchmarks.harness.tables import Sample, mib, number
from recipes.benchmarks.workers.optimizer_job import BASELINE

__all__ = ["broken", "show", "summarise"]

_MEDIANS = (
    *(
        "step_s",
        "settled_s",
        "written_bytes",
        "read_bytes",
        "kept_bytes",
        "stall_s",
        "fetch_busy_s",
        "flush_busy_s",
        "update_s",
    ),
    *("peak_above_base_bytes", "limit_s", "turned_limit_s"),
)
_LEVELS = ("state_bytes", "num_subgroups", "subgroup_bytes", "resident_bytes", "resident_peak_bytes")
_CHECKPOINT = ("checkpoint_s", "checkpoint_bytes", "checkpoint_extra_bytes")

Row = dict[str, Any]
Tables = Mapping[str, Sequence[Row]]


def summarise(samples: Sequence[Sample]) -> list[Row]:
    """One row per mode, in the order in which they ran. A step is compared with one of the same group and turn."""
    return [_row(mode, samples) for mode in dict.fromkeys(sample.mode for sample in samples)]


def _row(mode: str, samples: Sequence[Sample]) -> Row:
    everything = [sample for sample in samples if sample.mode == mode]
    mine = [sample for sample in everything if sample.timed]

    def median(name: str) -> float | None:
        values = [sample.values[name] for sample in mine if name in sample.values]
        return statistics.median(values) if values else None

    def highest(name: str) -> int | None:
        return max((sample.values[name] for sample in everything if name in sample.values), default=None)

    levels = {name: highest(name) for name in _LEVELS}
    resident, states = levels["resident_peak_bytes"], levels["state_bytes"]
    peaks = [s.values["device_peak_bytes"] or s.values["host_peak_bytes"] or 0 for s in everything]
    return {
        "mode": mode,
        "num_steps": len(mine),
        "num_compared": len(everything),
        **{name: median(name) for name in _MEDIANS},
        **levels,
        **{name: highest(name) for name in _CHECKPOINT},
        "step_ratio": _paired(mode, samples),
        "limit_ratio": _own_ratio(mine, "limit_s"),
        "turned_limit_ratio": _own_ratio(mine, "turned_limit_s"),
        "resident_share": resident / states if resident is not None and states else None,
        "process_peak_bytes": max(peaks),
        "equal": _is_equal("weights", mode, samples),
        "states_equal": _is_equal("states", mode, samples),
    }


def _paired(mode: str, samples: Sequence[Sample]) -> float | None:
    """Median over turns of the time of ``mode`` / that of plain PyTorch."""
    mine, others = (
        {(s.round, s.step): s.values["step_s"] for s in samples if s.mode == name and s.timed}
        for name in (mode, BASELINE)
    )
    ratios = [seconds / others[key] for key, seconds in mine.items() if others.get(key)]
    return statistics.median(ratios) if ratios else None


def _own_ratio(samples: Sequence[Sample], limit: str) -> float | None:
    """Median over steps of the time until all is on the drive / the limit of the same turn."""
    ratios = [s.values["settled_s"] / s.values[limit] for s in samples if s.values.get(limit)]
    return statistics.median(ratios) if ratios else None


def _is_equal(name: str, mode: str, samples: Sequence[Sample]) -> bool | None:
    """Whether the hashes after each step, warm-up included, are PyTorch's; ``None``: nothing to compare with.

    Steps of other groups count, too: every process makes the same gradients.
    """
    expected = {s.step: s.values[name] for s in samples if s.mode == BASELINE and name in s.values}
    mine = [s for s in samples if s.mode == mode and name in s.values]
    if not mine or any(s.step not in expected for s in mine):
        return None
    return all(s.values[name] == expected[s.step] for s in mine)


def broken(tables: Tables, refused: Mapping[str, Sequence[str]]) -> list[str]:
    """Return what went wrong: modes that failed, and modes whose bits are not PyTorch's where that ran.

    Args:
        tables: rows per part, as :func:`summarise` gives them.
        refused: modes per part that failed.
    """
    found = [f"{part}: {mode} failed" for part, modes in refused.items() for mode in modes]
    for part, rows in tables.items():
        if any(row["mode"] == BASELINE for row in rows):
            wrong = [row for row in rows if row["equal"] is not True or row["states_equal"] is False]
            found += [f"{part}: {row['mode']} has other bits than {BASELINE}" for row in wrong]
    return found


# -- tables ----------------------------------------------------------------------------------------------------------


def show(rows: Sequence[Row]) -> None:
    """In Markdown: what it costs and frees, then where the time goes and what a checkpoint takes."""
    columns: Sequence[tuple[str, Callable[[Row], str]]] = (
        ("mode", lambda row: str(row["mode"])),
        ("update s", lambda row: number(row["step_s"], 3)),
        ("/ torch", lambda row: number(row["step_ratio"], 2)),
        ("/ limit", lambda row: number(row["limit_ratio"], 2)),
        ("/ limit in turns", lambda row: number(row["turned_limit_ratio"], 2)),
        ("written MiB", lambda row: mib(row["written_bytes"])),
        ("read MiB", lambda row: mib(row["read_bytes"])),
        ("states MiB", lambda row: mib(row["state_bytes"])),
        ("resident peak MiB", lambda row: mib(row["resident_peak_bytes"])),
        ("/ states", lambda row: number(row["resident_share"], 3)),
        ("peak above weights and gradients MiB", lambda row: mib(row["peak_above_base_bytes"])),
        ("process peak MiB", lambda row: mib(row["process_peak_bytes"])),
        ("bits", _bits_cell),
    )
    _show(rows, columns)
    details: Sequence[tuple[str, Callable[[Row], str]]] = (
        ("mode", lambda row: str(row["mode"])),
        ("subgroups", lambda row: number(row["num_subgroups"], 0)),
        ("each MiB", lambda row: mib(row["subgroup_bytes"])),
        ("kept MiB", lambda row: mib(row["kept_bytes"])),
        ("computing s", lambda row: number(row["update_s"], 3)),
        ("fetching s", lambda row: number(row["fetch_busy_s"], 3)),
        ("flushing s", lambda row: number(row["flush_busy_s"], 3)),
        ("until written s", lambda row: number(row["settled_s"], 3)),
        ("stall s", lambda row: number(row["stall_s"], 3)),
        ("checkpoint s", lambda row: number(row["checkpoint_s"], 2)),
        ("MiB", lambda row: mib(row["checkpoint_bytes"])),
        ("extra memory MiB", lambda row: mib(row["checkpoint_extra_bytes"])),
    )
    _show(rows, details)
    print(f"Medians of {rows[0]['num_steps']} steps per mode; ratios are medians of ratios within one turn.")


def _show(rows: Sequence[Row], columns: Sequence[tuple[str, Callable[[Row], str]]]) -> None:
    print("| " + " | ".join(name for name, _ in columns) + " |\n" + "|---" * len(columns) + "|")
    for row in rows:
        print("| " + " | ".join(cell(row) for _, cell in columns) + " |")
    print()


def _bits_cell(row: Row) -> str:
    if row["states_equal"] is False:
        return "DIFFERENT" if row["equal"] is False else "states DIFFERENT"
    return {True: "equal", False: "DIFFERENT", None: "not compared"}[row["equal"]]
