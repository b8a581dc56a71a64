"""Defer Ctrl-C to the end of a short critical section."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["deferring_interrupts"]

_PATIENCE_S = 3.0
"""A second Ctrl-C at least this long after the first one interrupts at once, because the drive may hang."""


class deferring_interrupts:
    """A context around a critical section: it notes SIGINT, and calls its handler when the section is over.

    The section begins when C code exchanges the handler: before it no work has begun, and after it no interrupt is
    raised. If the section raises, the ``KeyboardInterrupt`` has that error as its context. Signals other than SIGINT
    are not deferred.

    It does nothing within another section, in other threads than the main one, and if SIGINT has no Python handler. It
    takes some microseconds, which is too slow for each saved tensor. No wait for bytes belongs in it.
    """

    __slots__ = ("_came_s", "_handler")

    def __enter__(self) -> None:
        self._came_s: float | None = None
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        handler = signal.getsignal(signal.SIGINT)
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or not callable(handler) or isinstance(handler, deferring_interrupts):
            return
        self._handler = handler
        try:
            signal.signal(signal.SIGINT, self)
        except ValueError:  # a thread of another interpreter
            self._handler = None
        except BaseException:  # another signal's handler has raised when the section had begun
            signal.signal(signal.SIGINT, handler)
            raise

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self._came_s is None:
            self._came_s = now_s
        elif now_s - self._came_s > _PATIENCE_S and self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            self._handler(number, frame)

    def __exit__(self, *exc_info: object) -> None:
        handler = self._handler
        if handler is None:
            return
        try:
            signal.signal(signal.SIGINT, handler)
        finally:
            if self._came_s is not None:
                handler(signal.SIGINT, sys._getframe())
