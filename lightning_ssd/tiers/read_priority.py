"""Let writes give way to urgent reads."""

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
    """Counts urgent reads, and lets writes wait until there is none.

    A read counts from the moment the training thread waits for it until it ends. The gate only delays: a write that has
    waited long enough goes on, so that nothing depends on a read ending.
    """

    def __init__(self) -> None:
        self._urgent: set[object] = set()
        # Guards who leaves and who waits; workers alone take it. A leaf lock.
        self._changed = threading.Condition(threading.Lock())

    @property
    def num_urgent(self) -> int:
        """Urgent reads that wait or are under way."""
        return len(self._urgent)

    def enter(self, read: object) -> None:
        """A read has become urgent. One step, which neither another thread nor an interrupt divides."""
        self._urgent.add(read)

    def leave(self, read: object) -> None:
        """A read has ended, however. Called by workers."""
        with self._changed:
            self._urgent.discard(read)
            if not self._urgent:
                self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Block while a read is urgent, but no longer than this. Called by workers, which hold no lock."""
        with self._changed:
            self._changed.wait_for(lambda: not self._urgent, timeout_s)
