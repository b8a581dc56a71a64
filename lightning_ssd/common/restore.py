"""Temporarily set the program's state to an earlier one, and undo that even if Ctrl-C interrupts.

An interrupt may come at the entry of any function, so also while the state is put back. It is then put back once more
before the interrupt is raised. If that fails, too, the context stays noted. The next pass or ``close`` puts it back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

__all__ = ["Meanwhile", "num_noted", "put_back_all", "put_back_the_rest"]

_TRIES = 3


class Meanwhile:
    """A context in which an earlier state is in force.

    Args:
        enter: sets the earlier state.
        leave: sets the state as of the construction. May be called again after an interrupt in an earlier call.
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
        """Set the state as of the construction; raise an interrupt that comes meanwhile afterwards."""
        interrupt: BaseException | None = None
        for _ in range(_TRIES):
            try:
                self._leave()
                break
            except Exception:  # not by a signal: a further try would raise it again
                _forget(self)
                raise
            except BaseException as error:
                interrupt = error
        else:
            raise interrupt  # type: ignore[misc]  # the context stays noted
        _forget(self)
        if interrupt is not None:
            raise interrupt


_OPEN: dict[int, list[Meanwhile]] = {}
"""Contexts under way, by thread. Only the main thread is interrupted, but other threads recompute blocks, too."""


def _noted() -> list[Meanwhile]:
    return _OPEN.setdefault(threading.get_ident(), [])


def _forget(done: Meanwhile) -> None:
    noted = _noted()
    if done in noted:
        noted.remove(done)
    if not noted:
        _OPEN.pop(threading.get_ident(), None)


def put_back_the_rest(number: int) -> None:
    """Put back this thread's noted contexts except the ``number`` oldest ones, the newest first."""
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
    """Return how many contexts of this thread have not been put back."""
    return len(_OPEN.get(threading.get_ident(), []))


def put_back_all() -> None:
    """Put back all contexts that an interrupt has left in this thread. Does nothing in a backward, which uses them."""
    if _OPEN and torch._C._current_autograd_node() is None:
        put_back_the_rest(0)
