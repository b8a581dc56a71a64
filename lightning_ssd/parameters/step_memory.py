"""How much memory a step takes at its worst moment, as seen while it runs."""

from __future__ import annotations

import time
from collections import deque

from lightning_ssd.memory.gauge import Gauge

__all__ = ["StepMemory"]

_LOOK_S = 0.002
"""Asking takes about 10 us; in this time little is allocated."""
_REST_S = 0.25
"""Steps that begin sooner after the last one that was watched are not: asking for free memory takes 0.5 ms."""
_NUM_STEPS = 8
"""Number of the latest watched steps of which the worst counts: batches differ."""


class StepMemory:
    """Memory that counts as held, from the beginning of a forward to the end of its backward.

    What happens in between is seen where saved tensors come and go. Temporaries of single operations are seen where an
    allocator keeps its peak, and they exceed all that was before.
    """

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._rises: deque[int] = deque(maxlen=_NUM_STEPS)
        self._begin_bytes: int | None = None
        self._highest_bytes = 0
        self._known_peak_bytes = 0
        self._begun_s = self._next_look_s = 0.0

    def begin(self) -> int | None:
        """A forward begins, and nothing else is under way.

        Returns:
            What is likely to be held at the worst moment of this step; ``None``: nothing has shown it, or it has been
            asked a moment ago.
        """
        now_s, self._begin_bytes = time.perf_counter(), None
        if now_s - self._begun_s < _REST_S:
            return None
        self._begun_s, self._next_look_s = now_s, 0.0
        self._known_peak_bytes = self._gauge.peak_bytes()
        self._begin_bytes = self._highest_bytes = self._gauge.needed_bytes()
        return self._begin_bytes + max(self._rises) if self._rises else None

    def look(self) -> None:
        """Saved tensors have come or gone. Called often, by workers, too."""
        now_s = time.perf_counter()
        if self._begin_bytes is not None and now_s >= self._next_look_s:
            self._next_look_s = now_s + _LOOK_S
            self._highest_bytes = max(self._highest_bytes, self._gauge.held_bytes())

    def skip(self) -> None:
        """Weights have moved since the step began, which its rise would count: it tells nothing."""
        self._begin_bytes = None

    def end(self, *, is_seen: bool) -> None:
        """A backward is over."""
        begin_bytes, self._begin_bytes = self._begin_bytes, None
        if begin_bytes is None:
            return
        highest_bytes, peak_bytes = self._highest_bytes, self._gauge.peak_bytes()
        has_risen = peak_bytes > self._known_peak_bytes  # else it may be of any time before
        if has_risen:
            highest_bytes = max(highest_bytes, peak_bytes - self._gauge.window_bytes())
        if is_seen or has_risen:
            self._rises.append(max(highest_bytes, self._gauge.held_bytes()) - begin_bytes)
