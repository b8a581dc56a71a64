"""Wait in a thread where Ctrl-C may come at any moment.

Python handles signals when a function is entered, when a call into C returns, and while one blocks. ``threading``'s
``Condition`` and ``Event`` are Python code that takes a lock and releases it: a ``KeyboardInterrupt`` in between leaves
the lock taken for ever. The classes here block in C alone. So do ``with`` blocks of a ``Lock``: Python handles no
signal between the end of their ``__enter__`` and the block.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

__all__ = ["Changes", "Latch", "is_free_within"]

T = TypeVar("T")
_LOOK_S = 0.001


def is_free_within(timeout_s: float, lock: threading.Lock) -> bool:
    """Wait up to ``timeout_s`` until the lock is free; return whether it is. Do not take it.

    For methods that signal handlers call: if the handler has interrupted the holder of the lock, it would wait for
    ever. ``acquire(timeout=)`` would not do, because an interrupt right after it leaves the lock taken.
    """
    until_s = time.monotonic() + timeout_s
    while lock.locked():
        if time.monotonic() > until_s:
            return False
        time.sleep(_LOOK_S)
    return True


class Latch:
    """A gate that is closed at first. Threads wait until it opens; it never closes again."""

    __slots__ = ("_lock", "is_open")

    def __init__(self) -> None:
        self.is_open = False
        # A leaf lock: taken until it opens, and then by each waiter for a moment.
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        """Release all waiting threads. Idempotent; not for two threads at once."""
        if not self.is_open:
            self.is_open = True
            self._lock.release()

    def wait(self) -> None:
        """Block until it is open."""
        if not self.is_open:  # or an interrupt in wait_for() might have left the lock taken
            with self._lock:
                pass

    def wait_for(self, timeout_s: float) -> bool:
        """Block up to ``timeout_s`` until it is open; return whether it is. For one thread at a time."""
        if not self.is_open and self._lock.acquire(timeout=timeout_s):
            self._lock.release()
        return self.is_open


class Changes:
    """A lock, and a way to wait for changes of the state that it guards.

    Args:
        lock: a lock that other objects share. A thread that holds it waits for nothing else.
    """

    def __init__(self, lock: threading.Lock | None = None) -> None:
        # Its order is its owner's; latches are opened under it.
        self.lock = threading.Lock() if lock is None else lock
        self._waiting: deque[Latch] = deque()

    def next(self) -> Latch:
        """Return a latch that opens with the next change. The caller holds the lock, and waits without it."""
        latch = Latch()
        self._waiting.append(latch)
        return latch

    def tell(self) -> None:
        """Wake the waiting threads after a change. The caller holds the lock."""
        while self._waiting:
            self._waiting[0].open()  # before it goes from the list, or an interrupt could leave it closed
            self._waiting.popleft()

    def until(self, attempt: Callable[[], T | None]) -> T:
        """Call ``attempt`` under the lock, now and after each change, until it returns another value than ``None``."""
        while True:
            with self.lock:
                result = attempt()
                if result is not None:
                    return result
                latch = self.next()
            latch.wait()
