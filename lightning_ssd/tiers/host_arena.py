"""Where offloaded bytes lie in host memory: one range of addresses, taken as it is needed, cut into extents."""

from __future__ import annotations

import logging
import os
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from functools import partial

import torch

from lightning_ssd.common.forks import OwnProcess
from lightning_ssd.common.interrupts import deferring_interrupts
from lightning_ssd.common.rounding import round_up
from lightning_ssd.common.task import Task
from lightning_ssd.common.tensors import Region
from lightning_ssd.errors import OffloaderClosedError, StorageError
from lightning_ssd.memory.host_budget import HostMemoryBudget
from lightning_ssd.memory.mmap import HUGE_PAGE_BYTES, PAGE_BYTES, MappedBlock, lock_memory, touch, unlock_memory
from lightning_ssd.storage.extents import Extent, ExtentAllocator

__all__ = ["HostArena"]

_log = logging.getLogger(__name__)

_FIRST_GROWTH_BYTES = 64 << 20
_MAX_GROWTH_BYTES = 256 << 20
"""Slabs after the first one are a quarter of the size, at most so much."""
_AHEAD_BYTES = 64 << 20
_PAUSE_S = 0.002
"""Between two slabs that are locked ahead: the driver's lock holds up kernels that training launches."""


class HostArena:
    """Bounded host memory in extents. Thread-safe; of use to the opening process only.

    Addresses for the whole capacity are reserved at once, which costs nothing. Memory is taken in growing slabs, and
    each slab is locked (pinned) once: when the first extent in it is prepared, or ahead, in a thread of its own.
    Extents are reused, lowest first, and may lie across slabs; no size is rounded up to more than a page.

    Args:
        room: most memory to take, in bytes; or a budget that others take from, too, each as it grows.
        pin: lock slabs for CUDA. Where that fails it goes on without, with one warning.
        ahead: have no memory but what :meth:`lock_ahead` has locked for this device: no one waits for the driver.

    Raises:
        MemoryError: there are not that many addresses (``ulimit -v``).
    """

    def __init__(self, room: int | HostMemoryBudget, *, pin: bool, ahead: torch.device | None = None) -> None:
        host_budget = HostMemoryBudget(room) if isinstance(room, int) else room
        self._share = host_budget.share()
        self._limit_bytes = host_budget.total_bytes
        self._process = OwnProcess()
        self._extents = ExtentAllocator(PAGE_BYTES)
        self._ahead = ahead
        # Guards extents, slabs, limit, block and the six below. Held for arithmetic and one quick system call. Order:
        # the budget's may be taken under it, nothing else.
        self._lock = threading.Lock()
        self._slab_ends: list[int] = []
        self._wanted_bytes = self._locked_bytes = 0
        self._locking: Task[None] | None = None
        self._is_closing = self._is_locking = False
        # Guards the two below, and is held while slabs are locked, which takes long: reads never need it. Order: the
        # lock above may be taken under this one, never the other way round.
        self._pin_lock = threading.Lock()
        self._pin = pin
        self._num_pinned = 0
        self._pinned_starts: list[int] = []
        self._device: torch.device | None = None
        # Said once no lock is held: a handler of the log may wait for a thread that asks for numbers.
        self._unsaid: deque[str] = deque()
        self._block: MappedBlock | None = MappedBlock(max(host_budget.total_bytes, PAGE_BYTES), usable=False)

    @property
    def capacity_bytes(self) -> int:
        """Most memory that it may have: what it has, and what others and the system leave; ahead, what it had when all
        that was wanted was locked.
        """
        if self._ahead is not None:
            return self._locked_bytes
        return min(self._limit_bytes, self._share.nbytes + self._share.host_budget.left_bytes)

    @property
    def size_bytes(self) -> int:
        """Memory taken so far. It goes back at :meth:`close`."""
        return self._extents.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes in extents that are lent."""
        if self._process.is_here:
            with self._lock:
                self._extents.merge_returned()
        return self._extents.used_bytes

    def allocate(self, nbytes: int) -> Extent | None:
        """An extent of at least ``nbytes`` bytes, or ``None`` where there is no room. Zero bytes need no place.

        Raises:
            OffloaderClosedError: after close.
            StorageError: after a fork.
        """
        self._opened()  # before the lock, which another thread may have held at a fork
        extent: Extent | None = None
        try:
            with self._lock:
                self._opened()
                if nbytes == 0:
                    return Extent(0, 0)
                try:
                    extent = self._extents.allocate(nbytes)
                    if extent is None and self._ahead is None and self._grow(nbytes):
                        extent = self._extents.allocate(nbytes)
                except BaseException:
                    self._extents.recover()
                    raise
            self._say()
        except BaseException:
            if extent is not None:  # an interrupt: the caller never learns of it
                self._extents.free(extent)
            raise
        return extent

    def free(self, *extents: Extent) -> None:
        """Take extents back. Never waits; harmless after close and in a forked child.

        Raises:
            ValueError: if one is not lent.
        """
        if self._block is not None and self._process.is_here:
            self._extents.free(*[extent for extent in extents if extent.nbytes])

    def lock_ahead(self, nbytes: int) -> None:
        """Have at least so many bytes locked, as far as there is room. Returns at once: a thread of its own locks them.

        It touches each slab first, which takes most of the time, and not the driver's. Steps go on meanwhile.

        Args:
            nbytes: in all.
        """
        if self._ahead is None or nbytes <= self._wanted_bytes or not self._process.is_here:
            return
        with deferring_interrupts():
            with self._lock:
                self._wanted_bytes = nbytes
                if self._is_closing or self._is_locking:  # the thread asks once more what is wanted before it ends
                    return
                self._is_locking = True
                task = self._locking = Task(partial(self._lock_what_is_wanted, self._ahead), "lightning_ssd-host-lock")
            try:
                task.start()
            except RuntimeError as error:  # there can be no more threads, and training goes on with what is locked
                self._locking, self._is_locking = None, False
                _log.warning("no more memory of the host tier is locked: %s", error)

    def _lock_what_is_wanted(self, device: torch.device) -> None:
        try:
            self._lock_slabs(device)
        except BaseException as error:  # closing raises it
            _log.warning("no more memory of the host tier is locked: %s", error)
            raise
        finally:
            self._say()

    def _lock_slabs(self, device: torch.device) -> None:
        while (slab := self._next_slab()) is not None:
            start, nbytes = slab
            if not touch(self._opened().address + start, nbytes):
                with self._lock:
                    self._refused(start, nbytes)
                continue  # there is no more, which ends it
            with self._pin_lock:
                if self._pin:
                    self._lock_slab(start, nbytes, device)
            with self._lock:
                self._add_slab(start, nbytes)
            time.sleep(_PAUSE_S)

    def _next_slab(self) -> tuple[int, int] | None:
        """Take memory for the next slab to lock ahead: where it begins, and its bytes. ``None``: all is there."""
        with self._lock:
            start = self.size_bytes
            left = min(round_up(self._wanted_bytes, HUGE_PAGE_BYTES), self._limit_bytes) - start
            nbytes = 0
            if left > 0 and not self._is_closing:
                nbytes = self._take(start, PAGE_BYTES, min(left, _AHEAD_BYTES))
            self._is_locking = nbytes > 0
            if not nbytes:
                self._locked_bytes = start
        return (start, nbytes) if nbytes else None

    def prepare(self, extent: Extent, device: torch.device) -> None:
        """Lock the slabs under an extent where that has not been done; takes long for each new slab."""
        if self._ahead is not None:  # it was done, and the next slab may be in the driver
            return
        with self._pin_lock:
            with self._lock:
                ends = list(self._slab_ends)
            while self._pin and self._num_pinned < len(ends):
                start = ends[self._num_pinned - 1] if self._num_pinned else 0
                if start >= extent.offset + extent.nbytes:
                    break  # extents fill the lowest places first: slabs above will be wanted later
                self._lock_slab(start, ends[self._num_pinned] - start, device)
        self._say()

    def region(self, offset: int, nbytes: int) -> Region:
        """Return the memory of ``nbytes`` bytes at ``offset``.

        Raises:
            OffloaderClosedError: after close.
        """
        return Region(self._opened().address + offset, nbytes)

    def pieces(self, extent: Extent, nbytes: int, chunk_bytes: int) -> Iterator[tuple[int, int, int]]:
        """Cut the first ``nbytes`` bytes of an extent into (start within it, address, length).

        No piece crosses slabs: CUDA does not copy from or to two separately locked ranges at once.
        """
        with self._lock:
            address, ends = self._opened().address, list(self._slab_ends)
        done = 0
        while done < nbytes:
            at = extent.offset + done
            length = min(chunk_bytes, nbytes - done, ends[bisect_right(ends, at)] - at)
            yield done, address + at, length
            done += length

    def close(self) -> None:
        """Give the memory back. It must not be copied from or to any more. Idempotent."""
        if not self._process.is_here:
            return  # the memory is not in this process, and the locks may have been taken at the fork
        with self._lock:
            self._is_closing, locking = True, self._locking
        if locking is not None:
            locking.wait()  # for one slab
        with self._pin_lock, self._lock:
            block, self._block = self._block, None
            starts, self._pinned_starts = self._pinned_starts, []
            if block is not None:
                for start in starts:
                    unlock_memory(block.address + start, self._device)
                self._share.close()
            self._locking = None
        if locking is not None:
            locking.result()  # raises what has failed there, once

    def _opened(self) -> MappedBlock:
        if not self._process.is_here:
            raise StorageError(
                f"the host tier was opened by process {self._process.pid}; its child {os.getpid()} has not got its "
                "memory. Open the offloader after the fork"
            )
        if self._block is None:
            raise OffloaderClosedError("the host tier is closed; open the offloader again to use it")
        return self._block

    def _grow(self, nbytes: int) -> bool:
        """Take one more slab in which, with what is free at the end, ``nbytes`` bytes fit."""
        size, left = self.size_bytes, self._limit_bytes - self.size_bytes
        need = self._extents.round_up(nbytes) - self._extents.tail_free_bytes
        if need > left:
            return False
        slab = min(max(_FIRST_GROWTH_BYTES, size // 4), _MAX_GROWTH_BYTES)
        taken = self._take(size, need, min(round_up(max(slab, need), HUGE_PAGE_BYTES), left))
        if taken:
            self._add_slab(size, taken)
        return bool(taken)

    def _take(self, start: int, least_bytes: int, most_bytes: int) -> int:
        """Take memory from the budget and the system; return how many bytes, 0 where there are too few."""
        nbytes = self._share.grow(least_bytes, most_bytes)
        if nbytes and not self._opened().make_usable(start, nbytes):
            self._refused(start, nbytes)
            return 0
        return nbytes

    def _refused(self, start: int, nbytes: int) -> None:
        """The system has no such memory: go on with what there is."""
        self._share.give_back(nbytes)
        self._limit_bytes = start
        self._unsaid.append(f"the system gives no more than {start:,} bytes to the host tier; it stays at that")

    def _add_slab(self, start: int, nbytes: int) -> None:
        self._extents.grow(nbytes)
        self._slab_ends.append(start + nbytes)

    def _lock_slab(self, start: int, nbytes: int, device: torch.device) -> None:
        self._device = device
        code = lock_memory(self._opened().address + start, nbytes, device)
        if code:
            self._pin = False
            self._unsaid.append(
                f"CUDA could not lock more memory of the host tier (error {code}); copies there are slower"
            )
            return
        self._pinned_starts.append(start)
        self._num_pinned += 1

    def _say(self) -> None:
        while True:
            try:
                text = self._unsaid.popleft()
            except IndexError:
                return
            _log.warning("%s", text)
