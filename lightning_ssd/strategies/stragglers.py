"""Finds out whether one process waits for its drives while the others wait for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["StragglerMonitor"]

_EVERY = 64
_MIN_SHARE = 0.1
_MIN_STALL_S = 1.0


class StragglerMonitor:
    """Where processes meet in every backward, all are as slow as the one that waits longest, and none of them can see
    why. So they tell each other, after the 1st, 2nd, 4th ... 64th backward and from then on after each 64th.

    Args:
        from_all: gives every process' numbers, in the order of ranks. Called by all processes at the same backwards.
    """

    def __init__(self, from_all: Callable[[Sequence[float]], Sequence[Sequence[float]]]) -> None:
        self._from_all = from_all
        self._num_backwards = 0
        self._last: tuple[float, float] | None = None
        self._warned = False
        self.stalls_s: tuple[float, ...] = ()
        """Of each process, between the last two comparisons; empty before the first."""

    def is_due(self) -> bool:
        """Another backward is over; whether to compare now."""
        self._num_backwards += 1
        number = self._num_backwards
        return number % _EVERY == 0 or (number < _EVERY and number & (number - 1) == 0)

    def compare(self, stall_s: float, now_s: float) -> str | None:
        """Tell the others, and hear of them.

        Args:
            stall_s: for how long this process has waited since it began.
            now_s: a clock that only goes forward.

        Returns:
            What the user should know, once: stalls that differ by more than a second and a tenth of the time.
        """
        last_stall_s, last_s = self._last or (stall_s, now_s)
        self._last = stall_s, now_s
        # The shortest time of all, so that all come to the same answer.
        told = self._from_all([stall_s - last_stall_s, now_s - last_s])
        self.stalls_s = tuple(stall for stall, _ in told)
        passed_s = min(passed for _, passed in told)
        worst, least = max(self.stalls_s), min(self.stalls_s)
        if self._warned or worst - least <= max(_MIN_STALL_S, _MIN_SHARE * passed_s):
            return None
        self._warned = True
        rank = self.stalls_s.index(worst)
        return (
            f"process {rank} waited {worst:.1f} s for its drives within {passed_s:.1f} s, the luckiest one {least:.1f} "
            "s: in every collective all wait for the slowest. Give that process a faster or less busy directory "
            "(HardwareProfile.paths), or let it keep more in memory (OffloadPolicy)"
        )
