"""Threads that read parts of files ahead of their use, into the system's page cache."""

from __future__ import annotations

import _thread
import queue
from collections.abc import Callable, Sequence
from contextlib import suppress

from lightning_ssd.common.forks import OwnProcess
from lightning_ssd.common.waiting import Latch
from lightning_ssd.memory.file_mapping import READ_BYTES, FileView

__all__ = ["CacheReader", "Read"]

Read = Callable[[int, FileView, Callable[[], bool]], None]
"""Reads what lies in the directory of a number: shows it in a view piece by piece, and asks before each piece whether
it is still wanted."""


class CacheReader:
    """Reads what it was asked for last. Whatever it is asked for next puts an end to the reads under way.

    They are not waited for: a thread that uses a part sooner reads it, and the system reads no page twice. Where there
    can be no more threads, nothing is read ahead.

    Args:
        num_drives: directories, each of which has a thread.
    """

    def __init__(self, num_drives: int = 1) -> None:
        self._requests = [queue.SimpleQueue[Sequence[Read] | None]() for _ in range(num_drives)]
        self._have_ended = [Latch() for _ in range(num_drives)]
        self._process = OwnProcess()
        for drive, has_ended in enumerate(self._have_ended):
            try:
                _thread.start_new_thread(self._serve, (drive,))
            except RuntimeError:
                has_ended.open()

    def ask(self, reads: Sequence[Read]) -> None:
        for requests, has_ended in zip(self._requests, self._have_ended, strict=True):
            if not has_ended.is_open:
                requests.put(reads)

    def _serve(self, drive: int) -> None:
        requests = self._requests[drive]
        try:
            scratch = FileView(READ_BYTES)
            while (reads := requests.get()) is not None:
                for read in reads:
                    with suppress(OSError, MemoryError):  # its user is told
                        read(drive, scratch, requests.empty)
        finally:
            self._have_ended[drive].open()

    def close(self) -> None:
        """Nothing is read any more. Idempotent; in a fork, which has no such thread, nothing to wait for."""
        if self._process.is_here:
            for requests, has_ended in zip(self._requests, self._have_ended, strict=True):
                requests.put(None)
                has_ended.wait()
