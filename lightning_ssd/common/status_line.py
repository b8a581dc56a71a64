"""Show one line on the terminal while work takes long, and remove it when the work is over."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

import torch
from tqdm import tqdm
from tqdm.utils import ObjectWrapper

from lightning_ssd.common.formatting import escape_control, format_sizes

__all__ = ["DELAY_S", "StatusLine", "is_terminal"]

T = TypeVar("T")

DELAY_S = 0.5
"""Work that takes less time shows no line."""


class _Line(tqdm):  # type: ignore[misc]  # it has no types
    """A progress bar without the bar, and without the thread that watches other bars."""

    monitor_interval = 0
    __del__ = bool
    """Runs no Python, which would swallow Ctrl-C: a context closes the line."""


class _Terminal(ObjectWrapper):  # type: ignore[misc]  # it has no types
    """A terminal that may be gone, busy, or unable to show a name: training goes on."""

    def write(self, text: str) -> None:
        """Write, if it can be."""
        with suppress(OSError, ValueError):
            self._wrapped.write(text)

    def flush(self) -> None:
        """Show what was written, if it can be."""
        with suppress(OSError, ValueError):
            self._wrapped.flush()


class StatusLine:
    """A context manager around the work, which draws the line in :meth:`update`. It has no thread.

    It writes only if standard error is a terminal, so that log files stay clean. Only the first process of a run
    writes, and only its main thread.

    Args:
        doing: the text of the line; ``None``: nothing is ever drawn.
        delay_s: work that takes less time shows no line; 0: the line is drawn at once.
    """

    def __init__(self, doing: str | None, *, delay_s: float = DELAY_S) -> None:
        self._doing = escape_control(doing or "")
        self._line = _Line(
            desc=f"{self._doing} ...",
            delay=delay_s,
            disable=doing is None or not is_terminal(),
            bar_format="{desc}",
            leave=False,
            dynamic_ncols=True,
            miniters=0,
            file=_Terminal(sys.__stderr__),
        )

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._line.close()

    def update(self, done_bytes: float = 0, total_bytes: float = 0) -> None:
        """Draw the line if the work has taken ``delay_s``, and a moment has passed since the last time.

        Args:
            done_bytes: how much of the work is done.
            total_bytes: how much there is; 0: unknown.
        """
        if total_bytes:
            done, total = format_sizes(done_bytes, max(done_bytes, total_bytes))
            self._line.set_description_str(f"{self._doing}: {done} of {total}", refresh=False)
        elif done_bytes:
            self._line.set_description_str(f"{self._doing}: {format_sizes(done_bytes)[0]}", refresh=False)
        self._line.update(0)

    def over(self, items: Sequence[T], nbytes: Callable[[T], float]) -> Iterator[T]:
        """Yield the items, while the line shows how many of their bytes are done.

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


def is_terminal() -> bool:
    """Return whether standard error is a terminal of this process alone, and no other live display draws on it."""
    stream = sys.__stderr__
    # While a live display of rich is on (Lightning's RichProgressBar), sys.stderr is a stand-in, which would print the
    # line above it, for good.
    if stream is None or stream.closed or sys.stderr is not stream or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty() and threading.current_thread() is threading.main_thread() and _is_first_process()


def _is_first_process() -> bool:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK"))
