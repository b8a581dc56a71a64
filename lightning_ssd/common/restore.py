"""What is as it once was for a moment, and becomes again what it was: Ctrl-C or not.

An interrupt may come at the entry of any function, so also where things are about to be put back. So they are put back
once more then, before the interrupt is raised; and what comes to its end in no way is noted, and put back when the
next pass begins or when all is closed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

__all__ = ["Meanwhile", "num_noted", "put_back_all", "put_back_the_rest"]

_TRIES = 3


class Meanwhile:
    """A context.

    Args:
        enter: makes all as it once was.
        leave: makes all as it was when this was made. May be called again, wherever an earlier call has got to.
    """

    def __init__(self, enter: Callable[[], object], leave: Callable[[], object]) -> None:
        self._enter, self._leave = enter, leave

    def __enter__(self) -> None:
        _noted().append(self)
        try:
            self._enter()
        except BaseException:
            self.put_back()
            raise

    def __exit__(self, *exc_info: object) -> None:
        self.put_back()

    def put_back(self) -> None:
        """Leave, in spite of an interrupt, which is raised then."""
        interrupt: BaseException | None = None
        for _ in range(_TRIES):
            try:
                self._leave()
                break
            except Exception:  # not of a signal: it would come again
                _forget(self)
                raise
            except BaseException as error:
                interrupt = error
        else:
            raise interrupt  # type: ignore[misc]  # it is noted still
        _forget(self)
        if interrupt is not None:
            raise interrupt


_OPEN: dict[int, list[Meanwhile]] = {}
"""By thread. Only the main thread is interrupted, but others, too, run blocks again, at the same time."""


def _noted() -> list[Meanwhile]:
    return _OPEN.setdefault(threading.get_ident(), [])


def _forget(done: Meanwhile) -> None:
    noted = _noted()
    if done in noted:
        noted.remove(done)
    if not noted:
        _OPEN.pop(threading.get_ident(), None)


def put_back_the_rest(number: int) -> None:
    """Of this thread's, all but the ``number`` oldest, the newest first."""
    interrupt: BaseException | None = None
    while len(noted := _OPEN.get(threading.get_ident(), [])) > number:
        newest = noted[-1]
        try:
            newest.put_back()
        except BaseException as error:
            if newest in noted:
                raise
            interrupt = error
    if interrupt is not None:
        raise interrupt


def num_noted() -> int:
    """How many of this thread's have not come to their end."""
    return len(_OPEN.get(threading.get_ident(), []))


def put_back_all() -> None:
    """Whatever an interrupt has left of this thread's. Nothing, where a backward runs: it is at it."""
    if _OPEN and torch._C._current_autograd_node() is None:
        put_back_the_rest(0)
