"""Times of passes beside which others are held, and what is typical of a few of them. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median

__all__ = ["WINDOW", "PairedTimes", "offs", "scatter", "typical"]

WINDOW = 16
"""So many passes of one sort count, at most."""
_NUM_BLOCKS = 4
_MIN_SCATTER = 0.01


@dataclass(slots=True)
class _Block:
    """Passes one after the other."""

    passes: list[tuple[int, float]]
    middle: tuple[float, float]
    """Of their numbers, with their typical seconds. Asked for in every pass."""


class PairedTimes:
    """When passes of one sort ran, and how long they took. In between, their time is thought to change evenly."""

    def __init__(self) -> None:
        self._blocks: deque[_Block] = deque(maxlen=_NUM_BLOCKS)

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def add(self, number: int, step_s: float) -> None:
        """The pass of this number was one of them."""
        if not self._blocks or self._blocks[-1].passes[-1][0] != number - 1:
            self._blocks.append(_Block([(number, step_s)], (number, step_s)))
            return
        block = self._blocks[-1]
        block.passes = [*block.passes, (number, step_s)][-WINDOW:]
        numbers, times = zip(*block.passes, strict=True)
        block.middle = mean(numbers), typical(times)

    def clear(self) -> None:
        """Forget all."""
        self._blocks.clear()

    def at(self, number: int) -> float:
        """Seconds that one of them would have taken in place of the pass of this number."""
        for (left, left_s), (right, right_s) in pairwise([block.middle for block in self._blocks]):
            if number < right:
                share = min(max((number - left) / (right - left), 0.0), 1.0)
                return left_s + share * (right_s - left_s)
        return self._blocks[-1].middle[1]

    def last(self, num: int) -> list[float]:
        """Of the latest block, the latest passes; at most so many."""
        return [step_s for _, step_s in self._blocks[-1].passes[-num:]] if self._blocks else []

    @property
    def middle(self) -> float:
        """Median of the latest block; 0: there is none."""
        return median(self.last(WINDOW)) if self._blocks else 0.0

    @property
    def num_recent(self) -> int:
        """Passes in the two latest blocks."""
        return sum(len(block.passes) for block in list(self._blocks)[-2:])

    @property
    def error(self) -> float:
        """Standard error of the latest block, relative, by its own passes; 0: they are fewer than two."""
        found = offs(self.last(WINDOW))
        return math.sqrt(sum(off * off for off in found) / (len(found) - 1) / len(found)) if found else 0.0

    @property
    def offs(self) -> list[float]:
        """Of each pass from those beside it, relative."""
        return [off for block in self._blocks for off in offs([s for _, s in block.passes])]


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
