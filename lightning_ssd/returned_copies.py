"""Copies of optimizer states that were let go of, until somebody has the time to give their room back."""

from __future__ import annotations

import weakref
from collections import deque

from lightning_ssd.state_home import Copy, Hold

__all__ = ["ReturnedCopies"]


class ReturnedCopies:
    """Whoever holds a copy may die anywhere, also in the garbage collector, under any lock. So no code of ours runs
    then: the weak reference itself, in C, notes that the holder is gone.

    Copies are counted in :meth:`give_back` alone, under their owner's lock.
    """

    def __init__(self) -> None:
        self._watched: dict[weakref.ref[Hold], list[Copy]] = {}
        self._dead: deque[weakref.ref[Hold]] = deque()

    def watch(self, hold: Hold, copies: list[Copy]) -> None:
        """Give the copies back when their holder has died; more may come."""
        self._watched[weakref.ref(hold, self._dead.append)] = copies

    def give_back(self) -> None:
        """What dead holders held."""
        while self._dead:
            copies = self._watched.get(self._dead[0], [])
            while copies:
                copies.pop().release()
            self._watched.pop(self._dead[0], None)
            self._dead.popleft()  # last: an interrupted call is made good by the next one
