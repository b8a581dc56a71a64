"""Whether moving is worth it at all, by measuring: a plan predicts transfers, but not what they cost in other ways.

On a CPU freed memory has to be mapped anew, and workers share cores with the model; on small models that costs more
than any wait. No trace of an offloaded pass shows it, because there it is part of the compute time.
"""

from __future__ import annotations

from collections import deque

__all__ = ["NUM_KEPT", "Worth"]

NUM_KEPT = 3
"""Passes that run with everything kept before the first plan comes into force; the first of them warms up."""
_NUM_PLANNED = 3
_WINDOW = 5
_SCATTER = 0.05
"""The fastest of a few passes differ by so much with nothing changed."""
_FIRST_PAUSE = 64
"""So long that the passes which find out again cost less than the 2 % that are asked for."""
_MAX_PAUSE = 4096


class Worth:
    """Compares the passes of one kind that followed plans with those that kept everything. Only without a budget.

    Of the last few of each the fastest count: whatever disturbs a pass makes it longer, never shorter.

    While planned passes take longer than asked, and by more than measurements scatter, the kind keeps everything for a
    number of passes, which measures keeping anew; then plans get another chance. The number doubles each time.

    Args:
        max_slowdown: that was asked for.
    """

    def __init__(self, max_slowdown: float) -> None:
        self._limit = max_slowdown + _SCATTER
        self._kept_s: deque[float] = deque(maxlen=_WINDOW)
        self._planned_s: deque[float] = deque(maxlen=_WINDOW)
        self._num_kept = 0
        self._pause = _FIRST_PAUSE
        self._num_to_keep = NUM_KEPT

    @property
    def keeps(self) -> bool:
        """Whether the next pass keeps everything."""
        return self._num_to_keep > 0

    @property
    def has_warmed_up(self) -> bool:
        """Whether the next pass is the first one that may be expected to take as long as all later ones that keep."""
        return self._num_kept == NUM_KEPT - 1

    def kept(self, step_s: float | None) -> None:
        """A pass that kept everything has ended, after so many seconds; ``None``: they are not known."""
        self._num_kept += 1
        if self._num_kept == 2:
            self._kept_s.clear()  # the first one had the allocators to warm
        if step_s is not None:
            self._kept_s.append(step_s)
        self._num_to_keep = max(self._num_to_keep - 1, 0)

    def planned(self, step_s: float) -> float | None:
        """A pass that followed a plan has ended. Returns how many times as long it takes, where that is too much."""
        self._planned_s.append(step_s)
        if len(self._planned_s) < _NUM_PLANNED or not self._kept_s:
            return None
        slowdown = min(self._planned_s) / max(min(self._kept_s), 1e-9)
        if slowdown <= self._limit:
            return None
        self._planned_s.clear()
        self._kept_s.clear()
        self._num_to_keep, self._pause = self._pause, min(2 * self._pause, _MAX_PAUSE)
        return slowdown
