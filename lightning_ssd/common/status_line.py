"""Show one line on the terminal while work takes long, and remove it when the work is over."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO, TypeVar

import torch

from lightning_ssd.common.formatting import escape_control, format_sizes

__all__ = ["DELAY_S", "StatusLine"]

T = TypeVar("T")

DELAY_S = 0.5
"""Work that takes less time shows no line."""
_REDRAW_S = 0.1
_ERASE_REST = "\x1b[K"


class StatusLine:
    """A context manager around the work, which draws the line in :meth:`update`. It has no thread.

    It writes only if standard error is a terminal, so that log files stay clean. Only the first process of a run
    writes, and only its main thread. The cursor stays at the beginning of the line, so that other output (a message, a
    progress bar) overwrites the line.

    Args:
        doing: the text of the line; ``None``: nothing is ever drawn.
        delay_s: work that takes less time shows no line; 0: the line is drawn at once.
    """

    def __init__(self, doing: str | None, *, delay_s: float = DELAY_S) -> None:
        self._doing = doing or ""
        self._terminal = None if doing is None else _terminal()
        self._due_s = time.perf_counter() + delay_s
        self._is_drawn = False

    def __enter__(self) -> StatusLine:
        self.update()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.clear()

    @property
    def is_wanted(self) -> bool:
        """Whether there is a terminal to draw on."""
        return self._terminal is not None

    def update(self, done_bytes: float = 0, total_bytes: float = 0) -> None:
        """Draw the line if the work has taken ``delay_s``, and a moment has passed since the last time.

        Args:
            done_bytes: how much of the work is done.
            total_bytes: how much there is; 0: unknown.
        """
        if self._terminal is not None and time.perf_counter() >= self._due_s:
            self.draw(done_bytes, total_bytes)

    def draw(self, done_bytes: float = 0, total_bytes: float = 0) -> None:
        """Draw the line now; the arguments are those of :meth:`update`."""
        if self._terminal is None:
            return
        sizes = [done_bytes, max(done_bytes, total_bytes)] if total_bytes else [done_bytes] if done_bytes else []
        amount = f": {' of '.join(format_sizes(*sizes))}" if sizes else " ..."
        self._due_s = time.perf_counter() + _REDRAW_S
        self._is_drawn = True
        self._write((escape_control(self._doing) + amount)[: _num_columns(self._terminal) - 1])

    def over(self, items: Sequence[T], nbytes: Callable[[T], float]) -> Iterator[T]:
        """Yield the items, while the line shows how many of their bytes are done.

        A caller that leaves the loop early has to clear the line.

        Args:
            items: the parts of the work.
            nbytes: returns the bytes of one of them.
        """
        done_bytes, total_bytes = 0.0, sum(map(nbytes, items))
        for item in items:
            size = nbytes(item)  # before the work, which may change it
            self.update(done_bytes, total_bytes)
            yield item
            done_bytes += size

    def clear(self) -> None:
        """Remove the line. Idempotent."""
        if self._is_drawn:
            self._is_drawn = False
            self._write("")

    def _write(self, text: str) -> None:
        if self._terminal is None:
            return
        try:
            self._terminal.write(f"\r{text}{_ERASE_REST}\r")
            self._terminal.flush()
        except Exception:  # the terminal is gone, or cannot show a name: training goes on
            self._terminal = None


def _terminal() -> TextIO | None:
    """Return standard error if it is a terminal and no other live display draws on it."""
    stream = sys.__stderr__
    # While a live display of rich is on (Lightning's RichProgressBar), sys.stderr is a stand-in, which would print the
    # line above it, for good.
    if stream is None or sys.stderr is not stream or os.environ.get("TERM") == "dumb":
        return None
    try:
        is_seen = stream.isatty()
    except ValueError:  # closed
        return None
    is_main = threading.current_thread() is threading.main_thread()
    return stream if is_seen and is_main and _is_first_process() else None


def _is_first_process() -> bool:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK"))


def _num_columns(terminal: TextIO) -> int:
    try:
        return os.get_terminal_size(terminal.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
