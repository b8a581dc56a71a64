"""From the samples of ``recipes.benchmarks.optimizer`` to its tables and verdicts. Pure arithmetic."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from recipes.benchmarks.harness.tables import MIB, Sample
from recipes.benchmarks.harness.targets import Verdict
from recipes.benchmarks.workers.optimizer_job import BASELINE, cache_share

__all__ = ["judge", "show", "summarise"]

MAX_RESIDENT_SHARE = 0.10
MAX_LIMIT_RATIO = 1.15
MIN_PATHS_GAIN = 1.25
CACHE_TOLERANCE = 0.05
"""Of the states: subgroups are kept or moved as a whole."""
MAX_CHECKPOINT_SUBGROUPS = 2
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
        "step_ratio": _paired(mode, BASELINE, samples),
        "two_paths_gain": _paired("one_path", mode, samples) if mode == "two_paths" else None,
        "limit_ratio": _own_ratio(mine, "limit_s"),
        "turned_limit_ratio": _own_ratio(mine, "turned_limit_s"),
        "resident_share": resident / states if resident is not None and states else None,
        "process_peak_bytes": max(peaks),
        "equal": _is_equal("weights", mode, samples),
        "states_equal": _is_equal("states", mode, samples),
    }


def _paired(mode: str, other: str, samples: Sequence[Sample]) -> float | None:
    """Median over turns of the time of ``mode`` / that of ``other``."""
    times = [
        {(s.round, s.step): s.values["step_s"] for s in samples if s.mode == name and s.timed} for name in (mode, other)
    ]
    ratios = [seconds / times[1][key] for key, seconds in times[0].items() if times[1].get(key)]
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


# -- verdicts --------------------------------------------------------------------------------------------------------


def judge(tables: Tables, refused: Mapping[str, Sequence[str]], *, is_toy: bool = False) -> list[Verdict]:
    """All verdicts.

    Args:
        tables: rows per part, as :func:`summarise` gives them; only "main" is judged for more than its bits.
        refused: modes per part that failed.
        is_toy: sizes of a test: what fits into a single subgroup keeps no promise on memory.
    """
    rows = {row["mode"]: row for row in tables.get("main", ())}
    return [
        *_memory(rows, is_promise=not is_toy),
        *_speed(rows),
        *_cache(rows, is_promise=not is_toy),
        *_bits(tables),
        *(
            Verdict(what=f"{part}: {mode}", target="runs", measured="failed", is_reached=False, is_promise=True)
            for part, modes in refused.items()
            for mode in modes
        ),
    ]


def _memory(rows: Mapping[str, Row], *, is_promise: bool) -> Iterator[Verdict]:
    row = rows.get("ssd")
    if row is None:
        return
    share = row["resident_share"]
    yield Verdict(
        what="states resident at their worst moment, ssd",
        target=f"<= {100 * MAX_RESIDENT_SHARE:.0f} % of all",
        measured="unknown" if share is None else f"{100 * share:.1f} %",
        is_reached=share is not None and share <= MAX_RESIDENT_SHARE,
        is_promise=is_promise,
    )
    extra, subgroup = row["checkpoint_extra_bytes"], row["subgroup_bytes"]
    is_known = extra is not None and bool(subgroup)
    yield Verdict(
        what="anonymous memory that a checkpoint takes besides, ssd",
        target=f"<= {MAX_CHECKPOINT_SUBGROUPS} subgroups",
        measured=f"{_mib(extra)} MiB; a subgroup has {_mib(subgroup)} MiB" if is_known else "unknown",
        is_reached=is_known and extra <= MAX_CHECKPOINT_SUBGROUPS * subgroup,
        is_promise=is_promise,
    )


def _speed(rows: Mapping[str, Row]) -> Iterator[Verdict]:
    if "ssd" in rows:
        ratio, turned = rows["ssd"]["limit_ratio"], rows["ssd"]["turned_limit_ratio"]
        yield Verdict(
            what="update time / the drive's limit with both directions in flight, ssd",
            target=f"<= {MAX_LIMIT_RATIO}",
            measured=f"{_number(ratio, 2) or 'unknown'}; one direction after the other: {_number(turned, 2)}",
            is_reached=ratio is not None and ratio <= MAX_LIMIT_RATIO,
        )
    if "two_paths" in rows:
        gain = rows["two_paths"]["two_paths_gain"]
        yield Verdict(
            what="speed of two paths at 3 : 1 against the faster alone",
            target=f">= {MIN_PATHS_GAIN}",
            measured=_number(gain, 2) or "not compared",
            is_reached=gain is not None and gain >= MIN_PATHS_GAIN,
        )


def _cache(rows: Mapping[str, Row], *, is_promise: bool) -> Iterator[Verdict]:
    alone = rows.get("ssd", {})
    for mode, row in rows.items():
        share = cache_share(mode)
        if not share or not alone:
            continue
        moved, all_moved = (_moved(found) for found in (row, alone))
        left = moved / all_moved if moved is not None and all_moved else None
        yield Verdict(
            what=f"bytes moved by {mode} / by ssd",
            target=f"<= {1 - share + CACHE_TOLERANCE:.2f}",
            measured=_number(left, 2) or "unknown",
            is_reached=left is not None and left <= 1 - share + CACHE_TOLERANCE,
            is_promise=is_promise,
        )


def _moved(row: Row) -> float | None:
    written, read = row["written_bytes"], row["read_bytes"]
    return None if written is None or read is None else written + read


def _bits(tables: Tables) -> Iterator[Verdict]:
    rows = [(part, row) for part, found in tables.items() for row in found if row["mode"] != BASELINE]
    different = [f"{part}: {r['mode']}" for part, r in rows if r["equal"] is not True or r["states_equal"] is False]
    if rows and not any(row["mode"] == BASELINE for found in tables.values() for row in found):
        yield Verdict(
            what="weights after every step, and states in checkpoints, against PyTorch's",
            target="bitwise equal in every mode",
            measured=f"not compared: {BASELINE} did not run",
            is_reached=False,
            is_promise=False,
        )
    elif rows:
        num_steps = sum(row["num_compared"] for _, row in rows)
        yield Verdict(
            what="weights after every step, and states in checkpoints, against PyTorch's",
            target="bitwise equal in every mode",
            measured=f"different: {', '.join(different)}" if different else f"equal in all {num_steps} steps",
            is_reached=not different,
            is_promise=True,
        )


# -- tables ----------------------------------------------------------------------------------------------------------


def show(rows: Sequence[Row]) -> None:
    """In Markdown: what it costs and frees, then where the time goes and what a checkpoint takes."""
    columns: Sequence[tuple[str, Callable[[Row], str]]] = (
        ("mode", lambda row: str(row["mode"])),
        ("update s", lambda row: _number(row["step_s"], 3)),
        ("/ torch", lambda row: _number(row["step_ratio"], 2)),
        ("/ limit", lambda row: _number(row["limit_ratio"], 2)),
        ("/ limit in turns", lambda row: _number(row["turned_limit_ratio"], 2)),
        ("written MiB", lambda row: _mib(row["written_bytes"])),
        ("read MiB", lambda row: _mib(row["read_bytes"])),
        ("states MiB", lambda row: _mib(row["state_bytes"])),
        ("resident peak MiB", lambda row: _mib(row["resident_peak_bytes"])),
        ("/ states", lambda row: _number(row["resident_share"], 3)),
        ("peak above weights and gradients MiB", lambda row: _mib(row["peak_above_base_bytes"])),
        ("process peak MiB", lambda row: _mib(row["process_peak_bytes"])),
        ("bits", _bits_cell),
    )
    _show(rows, columns)
    details: Sequence[tuple[str, Callable[[Row], str]]] = (
        ("mode", lambda row: str(row["mode"])),
        ("subgroups", lambda row: _number(row["num_subgroups"], 0)),
        ("each MiB", lambda row: _mib(row["subgroup_bytes"])),
        ("kept MiB", lambda row: _mib(row["kept_bytes"])),
        ("computing s", lambda row: _number(row["update_s"], 3)),
        ("fetching s", lambda row: _number(row["fetch_busy_s"], 3)),
        ("flushing s", lambda row: _number(row["flush_busy_s"], 3)),
        ("until written s", lambda row: _number(row["settled_s"], 3)),
        ("stall s", lambda row: _number(row["stall_s"], 3)),
        ("checkpoint s", lambda row: _number(row["checkpoint_s"], 2)),
        ("MiB", lambda row: _mib(row["checkpoint_bytes"])),
        ("extra memory MiB", lambda row: _mib(row["checkpoint_extra_bytes"])),
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


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _mib(value: float | None) -> str:
    return "" if value is None else f"{value / MIB:,.0f}"
