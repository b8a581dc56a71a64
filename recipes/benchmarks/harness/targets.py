"""From the tables of ``recipes.benchmarks.plan`` to verdicts: which target was reached. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.benchmarks.harness.mode_names import BASELINE, parse_mode

__all__ = ["Verdict", "judge", "show_verdicts"]

SPEED_UNDER_BUDGET = 0.95
SPEED_ON_SLOW_DRIVE = 0.97
MAX_ERROR = 0.10

Row = dict[str, Any]
Tables = Mapping[str, Sequence[Row]]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One line of evidence."""

    what: str
    target: str
    measured: str
    is_reached: bool
    is_promise: bool = False
    """True for what no busy machine excuses: bits and budgets."""


def judge(tables: Tables, refused: Mapping[str, Sequence[str]]) -> list[Verdict]:
    """All verdicts for the parts that ran.

    Args:
        tables: rows per part, as ``tables.summarise`` gives them.
        refused: modes per part that failed.
    """
    return [
        *_budget(tables.get("budget", ())),
        *_throttle(tables.get("throttle", ())),
        *_violations(tables),
        *_predictions(tables),
        *_mixed(tables.get("mixed", ())),
        *_bits(tables),
        *(
            Verdict(what=f"{part}: {mode}", target="runs", measured="failed", is_reached=False, is_promise=True)
            for part, modes in refused.items()
            for mode in modes
        ),
    ]


def _speed(row: Row) -> float:
    return 1 / row["step_ratio"] if row["step_ratio"] else 0.0


def _planned(rows: Sequence[Row]) -> Iterator[Row]:
    return (row for row in rows if parse_mode(row["mode"]).is_planned)


def _saving(row: Row) -> str:
    ratio = row["resident_ratio"]
    return "saving unknown" if ratio is None else f"{100 * (1 - ratio):.0f} % of the saved activations not in memory"


def _budget(rows: Sequence[Row]) -> Iterator[Verdict]:
    for row in _planned(rows):
        yield Verdict(
            what=f"speed of {row['mode']} against keep",
            target=f">= {SPEED_UNDER_BUDGET}",
            measured=f"{_speed(row):.3f}",
            is_reached=_speed(row) >= SPEED_UNDER_BUDGET,
        )


def _throttle(rows: Sequence[Row]) -> Iterator[Verdict]:
    for row in _planned(rows):
        yield Verdict(
            what=f"speed of {row['mode']} against keep",
            target=f">= {SPEED_ON_SLOW_DRIVE}",
            measured=f"{_speed(row):.3f}; {_saving(row)}",
            is_reached=_speed(row) >= SPEED_ON_SLOW_DRIVE,
        )


def _violations(tables: Tables) -> Iterator[Verdict]:
    for part, rows in tables.items():
        for row in rows:
            if "budget_bytes" in row:
                over, steps = row["num_over_budget"], row["num_checked_steps"]
                yield Verdict(
                    what=f"{part}: steps of {row['mode']} with the resident peak above the budget",
                    target="0",
                    measured=f"{over} of {steps}",
                    is_reached=over == 0 and steps > 0,
                    is_promise=True,
                )


def _predictions(tables: Tables) -> Iterator[Verdict]:
    for part, rows in tables.items():
        for row in _planned(rows):
            for name in ("step", "peak"):
                error = row.get(f"{name}_error")
                if error is None and "plan" in row:
                    continue  # a plan that holds nothing in memory has no peak to be compared
                yield Verdict(
                    what=f"{part}: predicted / measured {name} of {row['mode']}",
                    target=f"within {100 * MAX_ERROR:.0f} %",
                    measured="no plan was followed" if error is None else f"{100 * error:+.1f} %",
                    is_reached=error is not None and abs(error) <= MAX_ERROR,
                )


def _mixed(rows: Sequence[Row]) -> Iterator[Verdict]:
    by_kind = {parse_mode(row["mode"]).kind: row for row in rows}
    mixed, recompute = by_kind.get("budget"), by_kind.get("recompute")
    if mixed is None or recompute is None:
        return
    alone = by_kind.get("ssd")
    remark = "" if alone is None else f"; moving all of it alone: {alone['step_ratio']:.3f}"
    yield Verdict(
        what=f"step time / keep's of {mixed['mode']}, against recomputing every block",
        target=f"< {recompute['step_ratio']:.3f}",
        measured=f"{mixed['step_ratio']:.3f}{remark}",
        is_reached=mixed["step_ratio"] < recompute["step_ratio"],
    )


def _bits(tables: Tables) -> Iterator[Verdict]:
    rows = [(part, row) for part, found in tables.items() for row in found if row["mode"] != BASELINE]
    different = [f"{part}: {row['mode']}" for part, row in rows if row["equal"] is not True]
    if rows:
        yield Verdict(
            what="loss, gradients and weights of every step against keep's",
            target="bitwise equal in every mode",
            measured=f"different: {', '.join(different)}" if different else f"equal in all {len(rows)} runs",
            is_reached=not different,
            is_promise=True,
        )


def show_verdicts(verdicts: Sequence[Verdict]) -> None:
    """As a table in Markdown."""
    print("\n## Verdicts\n\n| what | target | measured | reached |\n|---|---|---|---|")
    for verdict in verdicts:
        print(
            f"| {verdict.what} | {verdict.target} | {verdict.measured} | {'yes' if verdict.is_reached else '**no**'} |"
        )
