"""The end of what nobody has closed: it was dropped, or it is open when the interpreter goes."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from contextlib import ExitStack
from typing import Any, Protocol

__all__ = ["Closable", "close_in_any_case"]


class Closable(Protocol):
    """Has threads and files while it is open."""

    def abort(self) -> None:
        """Drop queued work."""

    def close(self) -> None:
        """Idempotent."""


_OPEN: weakref.WeakSet[Closable] = weakref.WeakSet()


def close_in_any_case(owner: Closable, resources: ExitStack) -> weakref.finalize[Any, Any]:
    """Close ``resources`` when their owner is dropped, and the owner when the interpreter goes.

    Returns:
        To be detached by an owner that closes itself.
    """
    finalizer = weakref.finalize(owner, _close_elsewhere, resources, os.getpid())
    finalizer.atexit = False  # no thread can be started then; see _close_all
    _OPEN.add(owner)
    return finalizer


def _close_elsewhere(resources: ExitStack, pid: int) -> None:
    """For an owner that was dropped.

    This runs wherever the garbage collector does: perhaps under a lock that a worker waits for, perhaps in a worker. So
    nothing is joined here.
    """
    if os.getpid() == pid:
        threading.Thread(target=resources.close, name="lightning_ssd-close").start()


@atexit.register
def _close_all() -> None:
    """Before the interpreter goes, so that no daemon thread touches a dying torch.

    Each is closed, whatever becomes of the others; the first error is raised then, with a note of every other one.
    """
    first: BaseException | None = None
    for owner in list(_OPEN):
        for end in (owner.abort, owner.close):
            try:
                end()
            except BaseException as error:
                if first is None:
                    first = error
                else:
                    first.add_note(f"Closing failed again: {type(error).__name__}: {error}")
    if first is not None:
        raise first
