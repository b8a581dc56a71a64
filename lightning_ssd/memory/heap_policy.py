"""How glibc allocates while a pass runs, and between passes."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable

import torch

from lightning_ssd.memory.malloc import (
    MallocThreshold,
    besides_blocks_bytes,
    free_heap_bytes,
    has_whole_pages,
    trim,
)
from lightning_ssd.memory.readings import level_bytes

__all__ = ["HeapMode", "HeapPolicy"]

_CPU = torch.device("cpu")
_MIN_RELAXED_S = 0.2
"""Between borders that are closer than this, changing to and fro would cost more than it saves."""
_SLACK_BYTES = 16 << 20
"""Free memory that never has to return."""
_LOOK_BYTES = 16 << 20
"""Looked at after so much has been saved or brought back. A look costs 0.25 ms: a file of ``/proc`` is read without the
GIL."""


class HeapMode(enum.Enum):
    """The way of freed memory while one pass runs."""

    RELAXED = enum.auto()
    """It stays or goes as malloc sees fit: the pass keeps everything."""
    TRIM = enum.auto()
    """It stays for the tensors to come, up to what the pass is expected to take, and is given back above that."""
    MAP_EACH = enum.auto()
    """It is given back at once: each tensor is mapped on its own."""


class HeapPolicy:
    """Lets freed activations leave the process, in passes that free any.

    glibc keeps freed tensors for those to come. That is fast, because pages that are mapped anew cost a fault each, and
    harmless as long as the process is no larger than at the worst moment of such passes, where all of it was in use.
    What is resident beyond that and some slack is given back (``malloc_trim``) if it is free; if it is in use, the
    worst moment is a worse one than was known.

    Where the limit is one of all memory, or there is little, nothing may stay: glibc maps each tensor on its own
    (:class:`~lightning_ssd.memory.malloc.MallocThreshold`). A pass that keeps everything has glibc as it is without us.

    Where tensors have whole pages, the heap reuses what it has: then glibc gives nothing back by itself in passes that
    move and between them, and large tensors lie in the heap, too.

    Another malloc (tcmalloc, jemalloc) decides by itself.

    Args:
        is_ours: whether activations live in memory of malloc; False does nothing.
        level: returns the bytes resident in this process.
    """

    def __init__(self, *, is_ours: bool = False, level: Callable[[], int] = lambda: level_bytes(_CPU)) -> None:
        threshold = MallocThreshold() if is_ours else None
        self._threshold = None if threshold is None or threshold.reason else threshold
        self._reuses = self._threshold is not None and has_whole_pages()
        self._level = level
        # One thread looks at a time; nothing is waited for. A leaf lock.
        self._looking = threading.Lock()
        self._last_border_s = 0.0
        self._looked_bytes = 0
        """Saved and brought back in the whole run, at the last look."""
        self._is_watched = self._is_scarce = self._has_holes = False
        self._needed_bytes = 0
        """Resident at the worst moment of such passes, without what was free; as far as it is known."""
        self._unheaped_bytes: int | None = None
        """Result of :func:`besides_blocks_bytes` when nothing was free; ``None``: unknown."""
        self._peak_bytes = 0
        """Saved tensors at the worst moment of the next pass."""

    def enter(self, mode: HeapMode) -> None:
        """Begin a pass, or give the one under way another mode. Where memory is scarce, ``TRIM`` is ``MAP_EACH``."""
        if self._threshold is None:
            return
        if mode is HeapMode.TRIM and self._is_scarce:
            mode = HeapMode.MAP_EACH
        # A leaf lock, as before: an interrupt may have left the last one taken.
        self._looking = threading.Lock()
        keeps = mode is HeapMode.RELAXED
        if keeps and self._has_holes:
            # What keeps everything needs other holes than those that moved tensors have left: these would stay resident
            # beside it.
            trim()
        self._has_holes = not keeps
        self._is_watched = mode is HeapMode.TRIM
        self._looked_bytes = -_LOOK_BYTES
        if mode is HeapMode.MAP_EACH:
            self._threshold.fix()
        elif mode is HeapMode.TRIM and self._reuses:
            self._threshold.reuse()
        else:
            self._threshold.restore()

    def expect(self, peak_bytes: int, room_bytes: int | None = None) -> None:
        """Note what the next pass that moves will take, before it enters. What is known of such passes outlasts others.

        Args:
            peak_bytes: memory of saved tensors at the worst moment, as far as it is known.
            room_bytes: what these and free memory may take together; ``None``: unknown.
        """
        self._is_scarce = room_bytes is not None and room_bytes < peak_bytes + _SLACK_BYTES
        if abs(peak_bytes - self._peak_bytes) > _SLACK_BYTES:
            self._needed_bytes = 0  # such passes are no longer the same
        self._needed_bytes = max(self._needed_bytes - _SLACK_BYTES // 8, 0)
        self._peak_bytes = peak_bytes

    @property
    def is_ours(self) -> bool:
        """Whether activations live in memory that glibc manages."""
        return self._threshold is not None

    def free_bytes(self) -> int:
        """Return what is resident and free between passes: memory that the next one can have besides."""
        return 0 if self._threshold is None else free_heap_bytes()

    def look(self, come_bytes: int) -> None:
        """Give free memory back where there is too much of it. Called often, by workers too, so that nothing is raised.

        Args:
            come_bytes: saved activations that have come in the whole run so far, also from a drive.
        """
        if not self._is_watched or come_bytes < self._looked_bytes + _LOOK_BYTES:
            return
        looking = self._looking
        if looking.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._looked_bytes = come_bytes
                looking.release()

    def _look(self) -> None:
        try:
            level = self._level()
            if level > self._needed_bytes + _SLACK_BYTES:
                needed_bytes = self._without_free(level)
                self._needed_bytes = max(self._needed_bytes, needed_bytes)
        except OSError:  # out of file descriptors, say: memory can return at the next look
            return

    def _without_free(self, level: int) -> int:
        """Give free memory back if there is much of it; return what is needed."""
        besides_blocks = besides_blocks_bytes()
        if besides_blocks is not None and self._unheaped_bytes is not None:
            free = max(besides_blocks - self._unheaped_bytes, 0)
            if free <= _SLACK_BYTES:
                # Such as gradients and what a loss needs: trimming would take holes from tensors that come next.
                return level - free
        trim()
        self._unheaped_bytes = besides_blocks_bytes()
        return self._level()

    def border(self) -> None:
        """A backward is over."""
        self._is_watched = False
        now_s = time.perf_counter()
        if self._threshold is not None and not self._reuses and now_s - self._last_border_s > _MIN_RELAXED_S:
            self._threshold.restore()
        self._last_border_s = now_s

    def close(self) -> None:
        """Leave malloc as it was, without our holes."""
        if self._threshold is not None:
            self._threshold.restore()
            trim()
