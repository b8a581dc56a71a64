"""Learn from the run itself what a channel moves while it is busy.

A *channel* is one direction of one tier. A probe sees a short burst into an empty cache; a run sees what lasts.
"""

from __future__ import annotations

__all__ = ["BAND", "MIN_SAMPLE_BYTES", "RateEstimate", "first_guess", "leaves_band"]

BAND = 0.15
"""Relative width within which a measurement confirms what was expected."""

MIN_SAMPLE_BYTES = 8 << 20
"""Fewer bytes than this are pooled with those that follow: start-up costs and borders would outweigh them."""

_RISE = 0.2
"""How far the estimate goes up towards two samples above it."""


def leaves_band(value: float, reference: float) -> bool:
    """Whether ``value`` is further from ``reference`` than the band is wide."""
    return abs(value - reference) > BAND * reference


def first_guess(probed: float, expected: float) -> float:
    """Return what to begin with for all directories together, in bytes per second.

    A short probe sees the caches of the drives; a data sheet sees neither this machine nor who else works there. Both
    are upper bounds, so that the lower one counts.

    Args:
        probed: 0: they do not work.
        expected: for this process; 0: the user has not told.
    """
    return min(expected, probed) if expected else probed


class RateEstimate:
    """The rate of one channel, in bytes per second of busy time.

    The estimate is drawn to the median of three: itself and the last two samples. Above it that means the lower of two
    samples that both are faster, below it the better of two that both are slower, else nothing moves. So

    - one odd sample, up or down, changes nothing. Those do occur: bytes count when a transfer ends, so that a large
      one across the border of two steps makes one of them look slow and the other one fast;
    - downwards it goes all the way at once. A drive whose cache is full or that throttles is believed after two
      samples, because a plan made with too high a rate stalls in every step;
    - upwards it goes a fifth of the way per sample. Too low a rate only keeps more in memory than needed, and a burst
      into a cache that emptied while nothing was written is over before a new plan could use it.

    A moving average, in contrast, needs several steps of stalls to notice a drop, and follows every burst.

    Args:
        probed: bytes per second that a probe measured; 0: unknown. Two samples may overrule it like any estimate.
    """

    def __init__(self, probed: float = 0.0) -> None:
        self._estimate = probed
        self._last = 0.0
        self._pooled_bytes, self._pooled_s = 0, 0.0

    @property
    def value(self) -> float:
        """Bytes per second while busy; 0 while nothing is known. Without a probe, a single sample already counts."""
        return self._estimate or self._last

    def sample(self, nbytes: int, busy_s: float) -> None:
        """Take in what the channel did since the last call, for example in one step.

        Args:
            nbytes: bytes that it moved.
            busy_s: seconds in which at least one transfer was under way.
        """
        self._pooled_bytes += nbytes
        self._pooled_s += busy_s
        if self._pooled_bytes < MIN_SAMPLE_BYTES or self._pooled_s <= 0:
            return
        previous, self._last = self._last, self._pooled_bytes / self._pooled_s
        self._pooled_bytes, self._pooled_s = 0, 0.0
        if previous > 0:
            self._move(min(previous, self._last), max(previous, self._last))

    def _move(self, low: float, high: float) -> None:
        if self._estimate <= 0:
            self._estimate = low
        elif high < self._estimate:
            self._estimate = high
        elif low > self._estimate:
            self._estimate += _RISE * (low - self._estimate)
