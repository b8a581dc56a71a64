"""Copies of optimizer states that were let go of, until somebody has the time to give their room back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from lightning_ssd.state_home import Copy

__all__ = ["ReturnedCopies"]


class ReturnedCopies:
    """Whoever holds a copy may die in the garbage collector, under any lock: so noting it takes none.

    Copies are counted in :meth:`give_back` and :meth:`give_back_extents` alone, under their owner's lock.
    """

    def __init__(self) -> None:
        # Deques: appending and popping are one step each, which neither another thread nor the collector can divide.
        self._on_drives: deque[Copy] = deque()
        self._in_host_memory: deque[Copy] = deque()

    def note(self, copies: Iterable[Copy]) -> None:
        """One holder of each is gone. Takes no lock."""
        for copy in copies:
            (self._in_host_memory if copy.is_cached else self._on_drives).append(copy)

    def give_back_extents(self) -> None:
        """What lies in files, which take an extent back without a lock."""
        _release(self._on_drives)

    def give_back(self) -> None:
        """All. Takes the locks of host memory."""
        self.give_back_extents()
        _release(self._in_host_memory)


def _release(copies: deque[Copy]) -> None:
    # Between a look at the deque and its next element, a collected holder in this very thread may empty it.
    while True:
        try:
            copy = copies.popleft()
        except IndexError:
            return
        copy.release()
