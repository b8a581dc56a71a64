"""Writes give way to reads that somebody waits for."""

from __future__ import annotations

import threading

__all__ = ["UrgentGate", "patience_s"]

_LEAST_PATIENCE_S = 0.05
_MOST_PATIENCE_S = 0.5
_PATIENCE_CHUNKS = 4


def patience_s(chunk_s: float) -> float:
    """How long a write waits for urgent reads before its next chunk, if its last one took ``chunk_s`` seconds.

    Writes thus keep at least about a fifth of the time of a drive on which reads never cease to be urgent (more where
    chunks take less than 12 ms or more than 125 ms), so that they cannot starve and memory goes on coming back.
    """
    return min(max(_LEAST_PATIENCE_S, _PATIENCE_CHUNKS * chunk_s), _MOST_PATIENCE_S)


class UrgentGate:
    """Counts urgent reads, from the moment somebody waits for them until they end, and lets writes wait for none.

    It only delays: a write that has waited long enough goes on, so that nothing depends on a read ending.
    """

    def __init__(self) -> None:
        self._num_urgent = 0
        # Guards the count. A leaf lock: entered under the lock of the queue that reads.
        self._changed = threading.Condition(threading.Lock())

    @property
    def num_urgent(self) -> int:
        """Urgent reads that wait or are under way."""
        return self._num_urgent

    def enter(self) -> None:
        """A read has become urgent."""
        with self._changed:
            self._num_urgent += 1

    def leave(self) -> None:
        """An urgent read has ended, however."""
        with self._changed:
            self._num_urgent -= 1
            if self._num_urgent == 0:
                self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Block while a read is urgent, but no longer than this. The caller holds no lock."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_urgent == 0, timeout_s)
