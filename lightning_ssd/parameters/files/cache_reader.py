"""A thread that reads parts of files ahead of their use, into the system's page cache."""

from __future__ import annotations

import _thread
import os
import queue
from collections.abc import Callable, Sequence
from contextlib import suppress

from lightning_ssd.common.waiting import Latch
from lightning_ssd.memory.file_mapping import READ_BYTES, FileView

__all__ = ["CacheReader", "Read"]

Read = Callable[[FileView, Callable[[], bool]], None]
"""Reads a part of a file: shows it in a view piece by piece, and asks before each piece whether it is still wanted."""


class CacheReader:
    """Reads what it was asked for last. Whatever it is asked for next puts an end to the read under way.

    It is not waited for: a thread that uses a part sooner reads it, and the system reads no page twice. Where there can
    be no more threads, nothing is read ahead.
    """

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[Sequence[Read] | None] = queue.SimpleQueue()
        self._has_ended = Latch()
        self._pid = os.getpid()
        try:
            _thread.start_new_thread(self._serve, ())
        except RuntimeError:
            self._has_ended.open()

    def ask(self, reads: Sequence[Read]) -> None:
        if not self._has_ended.is_open:
            self._requests.put(reads)

    def _serve(self) -> None:
        try:
            scratch = FileView(READ_BYTES)
            while (reads := self._requests.get()) is not None:
                for read in reads:
                    with suppress(OSError, MemoryError):  # its user is told
                        read(scratch, self._requests.empty)
        finally:
            self._has_ended.open()

    def close(self) -> None:
        """Nothing is read any more. Idempotent; in a fork, which has no such thread, nothing to wait for."""
        if os.getpid() == self._pid:
            self._requests.put(None)
            self._has_ended.wait()
