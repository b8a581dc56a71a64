"""Verdicts: which target was reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Verdict", "show_verdicts"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One line of evidence."""

    what: str
    target: str
    measured: str
    is_reached: bool
    is_promise: bool = False
    """True for what no busy machine excuses: bits and budgets."""


def show_verdicts(verdicts: Sequence[Verdict]) -> None:
    """As a table in Markdown."""
    print("\n## Verdicts\n\n| what | target | measured | reached |\n|---|---|---|---|")
    for verdict in verdicts:
        print(
            f"| {verdict.what} | {verdict.target} | {verdict.measured} | {'yes' if verdict.is_reached else '**no**'} |"
        )
