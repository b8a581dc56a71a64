"""Run one call in a thread of its own, and return its result later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from lightning_ssd.common.interrupts import deferring_interrupts
from lightning_ssd.common.status_line import DELAY_S, StatusLine, is_terminal
from lightning_ssd.common.waiting import Latch
from lightning_ssd.errors import copy_of

__all__ = ["Task"]

T = TypeVar("T")


class Task(Generic[T]):
    """Runs a call in a daemon thread. An interrupted wait leaves no lock taken, unlike one for a ``Future``.

    Args:
        work: the call.
        name: name of the thread.
    """

    def __init__(self, work: Callable[[], T], name: str) -> None:
        self._work = work
        self._name = name
        self._ended = Latch()
        self._value: T | None = None
        self._error: BaseException | None = None
        self._is_begun = False

    def start(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: there can be no more threads, or the interpreter is exiting.
        """
        with deferring_interrupts():  # in Thread.start it might leave a thread that never begins
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
            self._is_begun = True

    def _run(self) -> None:
        try:
            self._value = self._work()
        except BaseException as error:  # raised where the result is asked for
            self._error = error
        del self._work
        self._ended.open()

    @property
    def is_done(self) -> bool:
        """Whether the call has returned or raised."""
        return self._ended.is_open

    def wait(self, doing: str | None = None) -> None:
        """Block until the call has ended. Returns at once if it was never started.

        Args:
            doing: text of a status line on the terminal, if it takes long.
        """
        if not self._is_begun:
            return
        if doing is not None and is_terminal() and not self._ended.wait_for(DELAY_S):
            with StatusLine(doing, delay_s=0):
                self._ended.wait()
        self._ended.wait()

    def wait_for(self, timeout_s: float) -> bool:
        """Block up to ``timeout_s`` until the call has ended; return whether it has. For one thread at a time."""
        return not self._is_begun or self._ended.wait_for(timeout_s)

    def result(self) -> T:
        """Wait for the call, and return its result or raise its error."""
        self.wait()
        if self._error is not None:
            raise copy_of(self._error)
        return self._value  # type: ignore[return-value]
