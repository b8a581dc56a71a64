"""Ctrl-C that waits for the end of a short section."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["run_between"]

T = TypeVar("T")


class _Gate:
    """A handler of SIGINT that passes one interrupt on, and notes all others."""

    def __init__(self) -> None:
        self.is_open = False
        self.noted: list[tuple[object, ...]] = []
        handler = signal.getsignal(signal.SIGINT)
        is_ours = threading.current_thread() is threading.main_thread() and callable(handler)
        self._handler = handler if is_ours and callable(handler) else None
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._take)

    def _take(self, *args: object) -> None:
        if self.is_open and self._handler is not None:
            self.is_open = False  # at once: the next one may come before the caller can close it
            self._handler(*args)  # type: ignore[arg-type]
        else:
            self.noted.append(args)

    def remove(self) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self.noted:
                self._handler(*self.noted.pop())  # type: ignore[arg-type]


def run_between(before: Callable[[], object], function: Callable[[], T], after: Callable[[], object]) -> T:
    """Call three functions in turn, ``after`` also where the others raise. Ctrl-C divides only the second.

    An interrupt in the others is raised when all is over. In other threads than the main one no signal is handled.
    """
    gate = _Gate()
    try:
        try:
            before()
            try:
                gate.is_open = True
                return function()
            finally:
                gate.is_open = False
        finally:
            after()
    finally:
        gate.remove()
