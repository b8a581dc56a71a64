"""The end of what nobody has closed: it was dropped, or it is open when the interpreter goes."""

from __future__ import annotations

import _thread
import atexit
import operator
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Protocol

__all__ = ["Closable", "Unclosed", "close_at_exit"]


class Closable(Protocol):
    """Has threads and files while it is open."""

    def abort(self) -> None:
        """Drop queued work."""

    def close(self) -> None:
        """Idempotent."""


class Unclosed(weakref.ref[Closable]):
    """Watches an open owner. When it is dropped, C code alone runs there and starts a thread: a ``KeyboardInterrupt``
    in Python code that runs when something dies would be lost.
    """

    __slots__ = ("start",)

    start: Callable[[], object]

    def detach(self) -> None:
        """The owner has closed itself."""
        self.start = bool  # does nothing
        _OPEN.pop(id(self), None)


_OPEN: dict[int, Unclosed] = {}
_start = operator.methodcaller("start")


def close_at_exit(owner: Closable, resources: ExitStack) -> Unclosed:
    """Close ``resources`` when their owner is dropped, and the owner when the interpreter goes.

    Returns:
        To be detached by an owner that closes itself.
    """
    watch = Unclosed(owner, _start)
    watch.start = partial(_thread.start_new_thread, _close_elsewhere, (resources, os.getpid(), id(watch)))
    _OPEN[id(watch)] = watch
    return watch


def _close_elsewhere(resources: ExitStack, pid: int, number: int) -> None:
    """For an owner that was dropped, perhaps by the garbage collector under a lock that a worker waits for, perhaps in
    a worker: so nothing is joined there.
    """
    _OPEN.pop(number, None)
    if os.getpid() == pid:
        # Said, since else the new thread asks this one, which C has started, and makes an object for it that stays.
        threading.Thread(target=resources.close, name="lightning_ssd-close", daemon=False).start()


@atexit.register
def _close_all() -> None:
    """Close each before the interpreter goes, so that no daemon thread touches a dying torch."""
    _close_each([owner for watch in list(_OPEN.values()) if (owner := watch()) is not None])


def _close_each(owners: list[Closable]) -> None:
    """Close each, whatever another one raises. The last error is raised, with those before it as its context."""
    if owners:
        try:
            owners[0].abort()
        finally:
            try:
                owners[0].close()
            finally:
                _close_each(owners[1:])
