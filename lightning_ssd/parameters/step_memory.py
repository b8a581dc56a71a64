"""How much memory a step takes at its worst moment, as seen while it runs."""

from __future__ import annotations

import time
from collections import deque

from lightning_ssd.memory.malloc import free_heap_bytes
from lightning_ssd.memory.readings import anonymous_bytes

__all__ = ["StepMemory"]

_LOOK_S = 0.002
"""Asking takes about 10 us; in this time little is allocated."""
_REST_S = 0.25
"""Steps that begin sooner after the last one that was watched are not: asking for free memory takes 0.5 ms."""
_NUM_STEPS = 8
"""Of the latest ones that were watched the worst counts: batches differ."""


class StepMemory:
    """Memory of this process that shows no file, from the beginning of a forward to the end of its backward.

    What happens in between is seen where saved tensors come and go: temporaries of single operations are not.
    """

    def __init__(self) -> None:
        self._rises: deque[int] = deque(maxlen=_NUM_STEPS)
        self._begin_bytes: int | None = None
        self._peak_bytes = 0
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
        # What malloc holds back is there for the tensors to come.
        self._begin_bytes = self._peak_bytes = anonymous_bytes() - free_heap_bytes()
        return self._begin_bytes + max(self._rises) if self._rises else None

    def look(self) -> None:
        """Saved tensors have come or gone. Called often, by workers, too."""
        now_s = time.perf_counter()
        if self._begin_bytes is not None and now_s >= self._next_look_s:
            self._next_look_s = now_s + _LOOK_S
            self._peak_bytes = max(self._peak_bytes, anonymous_bytes())

    def end(self, *, is_seen: bool) -> None:
        """A backward is over.

        Args:
            is_seen: whether somebody has told of saved tensors.
        """
        if self._begin_bytes is not None and is_seen:
            self._rises.append(max(self._peak_bytes, anonymous_bytes()) - self._begin_bytes)
        self._begin_bytes = None
