"""Which unit is used next, as far as the last time tells."""

from __future__ import annotations

import enum
from typing import NamedTuple

__all__ = ["Phase", "Use", "UseOrder"]


class Phase(enum.Enum):
    """The use of a unit."""

    FORWARD = enum.auto()
    BACKWARD = enum.auto()
    EVALUATION = enum.auto()


class Use(NamedTuple):
    """One use of one unit."""

    unit: int
    phase: Phase


class UseOrder:
    """Learns, for each use, which use came after it the last time.

    One successor per use is enough where the order hardly changes: a forward ends where its backward begins, and each
    phase has successors of its own. A guess that is wrong costs time only, and is put right when the same use comes
    again.
    """

    def __init__(self) -> None:
        self._next: dict[Use, Use] = {}
        self._last: Use | None = None

    def visit(self, use: Use) -> Use | None:
        """Note a use that begins; return the one that is likely to come after it, ``None`` if it is seen first."""
        if self._last is not None:
            self._next[self._last] = use
        self._last = use
        return self._next.get(use)

    def after(self, use: Use) -> Use | None:
        """The use that came after this one the last time, which need not have begun; ``None``: it is not known."""
        return self._next.get(use)
