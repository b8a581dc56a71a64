"""What both searches hold passes to: what trying may cost, what counts as slower, when all is looked at again. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = [
    "FIRST_RECHECK",
    "MAX_RECHECK",
    "NUM_ERRORS",
    "NUM_SLOWER",
    "OUT_OF_HAND",
    "SLOWER",
    "are_slower",
    "num_owed",
]

NUM_ERRORS = 1.3
"""A difference of so many standard errors is evidence."""
OUT_OF_HAND = 0.5
"""The first pass that follows another plan maps memory, and counts only where it is slower by this much."""
NUM_SLOWER, SLOWER = 3, 1.05
"""So many passes one after the other that are slower by this much show another machine."""
FIRST_RECHECK, MAX_RECHECK = 64, 512
"""Passes that follow what was settled before it is looked at again: twice as many each time."""
_SPENT, _SPENT_OVER = 0.016, 100
"""Of the time of all passes, what trying may cost; in the beginning, of this many passes."""


def num_owed(spent: float, num_passes: int) -> int:
    """Passes that have to come before trying may cost more; 0 or less: it may.

    Args:
        spent: on trying, in passes.
        num_passes: that have run.
    """
    return math.ceil(spent / _SPENT) - max(num_passes, _SPENT_OVER)


def are_slower(last: Sequence[float], slow_s: float) -> bool:
    """Whether the last passes have all taken longer than ``slow_s``, and are enough to tell."""
    return len(last) == NUM_SLOWER and min(last) > slow_s
