"""Times of passes beside which others are held, and what is typical of a few of them. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import mean, median

__all__ = ["WINDOW", "PairedTimes", "offs", "scatter", "typical"]

WINDOW = 16
"""So many passes of one sort count, at most."""
_NUM_BLOCKS = 4
_MIN_SCATTER = 0.01


class PairedTimes:
    """When passes of one sort ran, and how long they took. In between, their time is thought to change evenly."""

    def __init__(self) -> None:
        # Of passes one after the other; and the middle of each block with its typical seconds, asked for in every pass.
        self._blocks: deque[list[tuple[int, float]]] = deque(maxlen=_NUM_BLOCKS)
        self._points: deque[tuple[float, float]] = deque(maxlen=_NUM_BLOCKS)

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def add(self, number: int, step_s: float) -> None:
        """The pass of this number was one of them."""
        if self._blocks and self._blocks[-1][-1][0] == number - 1:
            self._blocks[-1].append((number, step_s))
            del self._blocks[-1][:-WINDOW]
        else:
            self._blocks.append([(number, step_s)])
            self._points.append((number, step_s))
        numbers, times = zip(*self._blocks[-1], strict=True)
        self._points[-1] = (mean(numbers), typical(times))

    def clear(self) -> None:
        """Forget all."""
        self._blocks.clear()
        self._points.clear()

    def at(self, number: int) -> float:
        """Seconds that one of them would have taken in place of the pass of this number."""
        for (left, left_s), (right, right_s) in pairwise(self._points):
            if number < right:
                share = min(max((number - left) / (right - left), 0.0), 1.0)
                return left_s + share * (right_s - left_s)
        return self._points[-1][1]

    def last(self, num: int) -> list[float]:
        """Of the latest block, the latest passes; at most so many."""
        return [step_s for _, step_s in self._blocks[-1][-num:]] if self._blocks else []

    @property
    def middle(self) -> float:
        """Median of the latest block; 0: there is none."""
        return median([step_s for _, step_s in self._blocks[-1]]) if self._blocks else 0.0

    @property
    def num_recent(self) -> int:
        """Passes in the two latest blocks."""
        return sum(len(block) for block in list(self._blocks)[-2:])

    @property
    def offs(self) -> list[float]:
        """Of each pass from those beside it, relative."""
        return [off for block in self._blocks for off in offs([s for _, s in block])]


def offs(times: Sequence[float]) -> list[float]:
    """How far each is from the middle of all, relative to it."""
    if len(times) < 2:
        return []
    middle = median(times)
    return [abs(one / middle - 1) for one in times]


def typical(times: Sequence[float]) -> float:
    """The lower third: whatever disturbs a pass makes it longer."""
    return sorted(times)[(len(times) - 1) // 3]


def scatter(seen: Sequence[float]) -> float:
    """Standard deviation of one pass, relative to it, from how far passes were off (:func:`offs`)."""
    return max(_MIN_SCATTER, 1.48 * median(seen) if seen else 0.0)
