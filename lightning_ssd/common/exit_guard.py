"""Close owners of threads and files that the program has dropped, or has left open when the interpreter exits."""

from __future__ import annotations

import _thread
import atexit
import operator
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Protocol

from lightning_ssd.common.forks import OwnProcess

__all__ = ["Closable", "Unclosed", "close_at_exit"]


class Closable(Protocol):
    """An owner of threads and files."""

    def abort(self) -> None:
        """Drop queued work."""

    def close(self) -> None:
        """Release threads and files. Idempotent."""


class Unclosed(weakref.ref[Closable]):
    """Watches an open owner, and starts a thread that closes its resources when the owner is dropped.

    Only C code runs at the drop: a ``KeyboardInterrupt`` in a Python finalizer would be lost.
    """

    __slots__ = ("start",)

    start: Callable[[], object]

    def detach(self) -> None:
        """Stop watching, because the owner has closed itself."""
        self.start = bool  # does nothing
        _OPEN.pop(id(self), None)


_OPEN: dict[int, Unclosed] = {}
_start = operator.methodcaller("start")


def close_at_exit(owner: Closable, resources: ExitStack) -> Unclosed:
    """Close ``resources`` when their owner is dropped, and the owner when the interpreter exits.

    Returns:
        The watch. An owner that closes itself calls its ``detach()``.
    """
    watch = Unclosed(owner, _start)
    watch.start = partial(_thread.start_new_thread, _close_elsewhere, (resources, OwnProcess(), id(watch)))
    _OPEN[id(watch)] = watch
    return watch


def _close_elsewhere(resources: ExitStack, process: OwnProcess, number: int) -> None:
    """Start the thread that closes the resources of a dropped owner.

    The garbage collector may drop the owner under a lock that a worker waits for, or in a worker. So the dropping
    thread joins nothing.
    """
    _OPEN.pop(number, None)
    if process.is_here:
        # daemon= is given because the new thread would else ask this one for it. This one was started by C, so that
        # threading would make an object for it that stays for ever.
        threading.Thread(target=resources.close, name="lightning_ssd-close", daemon=False).start()


@atexit.register
def _close_all() -> None:
    """Close each open owner before the interpreter exits, because daemon threads would then use a dying torch."""
    _close_each([owner for watch in list(_OPEN.values()) if (owner := watch()) is not None])


def _close_each(owners: list[Closable]) -> None:
    """Close each owner even if another one raises. Raise the last error, with the earlier ones as its context."""
    if owners:
        try:
            owners[0].abort()
        finally:
            try:
                owners[0].close()
            finally:
                _close_each(owners[1:])
