"""Huge pages for glibc's heap: memory that is given back and taken again then costs a third."""

from __future__ import annotations

import ctypes

from lightning_ssd.memory.mmap import ADVISE_HUGE, HUGE_PAGE_BYTES, MAP_FAILED, libc

__all__ = ["HugeHeap"]

libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, (ctypes.c_ssize_t,)


class HugeHeap:
    """Asks for huge pages in the main heap of this process, and wherever it grows to.

    PyTorch asks for them under each tensor by itself (``THP_MEM_ALLOC_ENABLE``), but not where two tensors or none
    share one. The advice stays with the heap; where huge pages are switched off, it does nothing.
    """

    def __init__(self) -> None:
        self._start = self._end = _heap_start()

    def look(self) -> None:
        """Advise what has been added since the last look. Takes a microsecond where nothing has."""
        end = libc.sbrk(0)
        if self._start is None or self._end is None or end is None or end in (self._end, MAP_FAILED):
            return
        first = max(min(self._end, end) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES, self._start)
        if end > first:
            libc.madvise(first, end - first, ADVISE_HUGE)
        self._end = end


def _heap_start() -> int | None:
    """Where the heap begins; ``None``: there is none, or nobody tells."""
    try:
        with open("/proc/self/maps") as maps:
            return next((int(line.partition("-")[0], 16) for line in maps if line.rstrip().endswith("[heap]")), None)
    except OSError:
        return None
