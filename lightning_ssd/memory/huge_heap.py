"""Huge pages for glibc's heap: memory that is given back and taken again then costs a third."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from typing import ClassVar

from lightning_ssd.memory.mmap import ADVISE_HUGE, HUGE_PAGE_BYTES, MAP_FAILED, libc

__all__ = ["HugeHeap"]

libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, (ctypes.c_ssize_t,)
_SET_DISABLED, _GET_DISABLED = 41, 42  # PR_SET_THP_DISABLE and PR_GET_THP_DISABLE


class HugeHeap:
    """Asks for huge pages in the main heap of this process, and wherever it grows to.

    PyTorch asks for them under each tensor by itself (``THP_MEM_ALLOC_ENABLE``), but not where two tensors or none
    share one. The advice stays with the heap; where huge pages are switched off, it does nothing.

    While any of these objects is suspended, the process gets no huge pages at all, whoever asks for them: the setting
    is one of the process. Those that it has stay. A process that has none by its own or its parent's wish is left so.
    What is started meanwhile by another program than a fork of Python's has none, either.
    """

    # Guards who is suspended, and the setting of the process. A leaf lock: nothing is called under it but libc.
    _lock: ClassVar[threading.Lock] = threading.Lock()
    _suspended: ClassVar[weakref.WeakSet[HugeHeap]] = weakref.WeakSet()

    def __init__(self) -> None:
        self._start = self._end = _heap_start()
        self._dropped: weakref.finalize[..., HugeHeap] | None = None
        with self._lock:
            self._may_suspend = _prctl(_GET_DISABLED) == 0 or len(self._suspended) > 0

    def look(self) -> None:
        """Advise what has been added since the last look. Takes a microsecond where nothing has."""
        end = libc.sbrk(0)
        if self._start is None or self._end is None or end is None or end in (self._end, MAP_FAILED):
            return
        first = max(min(self._end, end) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES, self._start)
        if end > first:
            libc.madvise(first, end - first, ADVISE_HUGE)
        self._end = end

    def suspend(self) -> None:
        """Have this process get small pages only. Again from the same object: no effect."""
        if not self._may_suspend:
            return
        with self._lock:
            if self._dropped is None:
                self._dropped = weakref.finalize(self, _after_last)
                self._dropped.atexit = False
            self._suspended.add(self)  # first: wherever an interrupt comes, resume() makes it good
            _prctl(_SET_DISABLED, 1)

    def resume(self) -> None:
        """End this object's :meth:`suspend`. Without one: no effect."""
        if self not in self._suspended:
            return
        with self._lock:
            if len(self._suspended) == 1:
                _prctl(_SET_DISABLED, 0)
            self._suspended.discard(self)
            if self._dropped is not None:
                self._dropped.detach()
                self._dropped = None


def _prctl(option: int, value: int = 0) -> int:
    libc.prctl.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)
    return int(libc.prctl(option, value, 0, 0, 0))


def _heap_start() -> int | None:
    """Where the heap begins; ``None``: there is none, or nobody tells."""
    try:
        with open("/proc/self/maps") as maps:
            return next((int(line.partition("-")[0], 16) for line in maps if line.rstrip().endswith("[heap]")), None)
    except OSError:
        return None


def _after_last() -> None:
    """One has been dropped. Without the lock, which the thread that collects it may hold."""
    if not len(HugeHeap._suspended):
        _prctl(_SET_DISABLED, 0)


def _after_fork() -> None:
    # The fork may have come while another thread had it. A leaf lock, as before.
    HugeHeap._lock = threading.Lock()
    if len(HugeHeap._suspended):
        HugeHeap._suspended = weakref.WeakSet()
        _prctl(_SET_DISABLED, 0)


os.register_at_fork(after_in_child=_after_fork)
