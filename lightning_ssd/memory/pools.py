"""Memory for transfers: staging buffers of the host or of a device, and recycled memory that reloads go to.

Host memory is anonymous, in transparent huge pages. Fresh memory is dear: its first touch costs a page fault per
4 KiB, which takes longer than reading the page from a drive.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from queue import SimpleQueue

import torch

from lightning_ssd.common.accelerators import accelerator_of
from lightning_ssd.common.rounding import round_up
from lightning_ssd.common.tensors import Region
from lightning_ssd.errors import OffloaderClosedError, StorageError
from lightning_ssd.memory.mmap import PAGE_BYTES, MappedBlock, lock_memory, unlock_memory

__all__ = ["ReloadPool", "SlabPool", "StagingPool"]

_log = logging.getLogger(__name__)

_MAX_WASTE = 1.25
_SMALL_NBYTES = 64 << 10
_GPU_PAGE_BYTES = 64 << 10  # what a driver pins of a device's memory


def _best_fit(spare: list[MappedBlock], need: int, alignment: int) -> MappedBlock | None:
    """The smallest spare block that fits without much waste."""
    fitting = (b for b in spare if need <= b.nbytes <= need * _MAX_WASTE and b.address % alignment == 0)
    return min(fitting, key=lambda block: block.nbytes, default=None)


class StagingPool:
    """Page-aligned host buffers, which threads use one after the other.

    A thread holds one at a time. So there are no more of them than threads that move bytes, and each is as large as the
    largest chunk that was moved through it.

    Args:
        pin: lock the buffers in memory for CUDA (done once per buffer: it costs more than a copy through it).
        device: whose context locks them; ``None``: that of the thread that leases.
    """

    def __init__(self, *, pin: bool = False, device: torch.device | None = None) -> None:
        self._pin = pin
        self._device = device
        self._undo = dict[int, Callable[[], object]]()  # what was done to a buffer, by its address
        self.lent_bytes = 0
        """Bytes in use."""
        self._spare: list[torch.Tensor] = []
        self._closed = False
        # Guards the three above. A leaf lock: memory is allocated and pinned outside of it.
        self._lock = threading.Lock()

    @contextmanager
    def lease(self, nbytes: int) -> Iterator[torch.Tensor]:
        """Lend ``nbytes`` bytes for the length of a ``with`` block. The address is a multiple of 4,096.

        Raises:
            OffloaderClosedError: after close.
        """
        need = round_up(max(nbytes, 1), PAGE_BYTES)
        with self._lock:
            if self._closed:
                raise OffloaderClosedError("a staging buffer was asked for after the pool was closed")
            buffer = self._spare.pop() if self._spare else None
        if buffer is not None and buffer.nbytes < need:
            self._free([buffer])
            buffer = None
        if buffer is None:
            buffer = self._create(need)
        with self._lock:
            self.lent_bytes += buffer.nbytes
        try:
            yield buffer[:nbytes]
        finally:
            self._give_back(buffer)

    def close(self) -> None:
        """Free the spare buffers; lent ones are freed when their lease ends. Idempotent."""
        with self._lock:
            self._closed = True
            spare, self._spare = self._spare, []
        self._free(spare)

    def _create(self, need: int) -> torch.Tensor:
        block = MappedBlock(need)
        if self._pin:
            code = lock_memory(block.address, block.nbytes, self._device)
            if code:
                self._pin = False
                _log.warning(
                    "CUDA could not lock staging memory (error %s); copies to and from the device are slower", code
                )
            else:
                self._undo[block.address] = partial(unlock_memory, block.address, self._device)
        return torch.frombuffer(block.export(), dtype=torch.uint8)

    def _give_back(self, buffer: torch.Tensor) -> None:
        with self._lock:
            self.lent_bytes -= buffer.nbytes
            keep = not self._closed
            if keep:
                self._spare.append(buffer)
        if not keep:
            self._free([buffer])

    def _free(self, buffers: Sequence[torch.Tensor]) -> None:
        with ExitStack() as stack:  # all of them, whatever one raises
            for buffer in buffers:
                stack.callback(self._undo.pop(buffer.data_ptr(), lambda: None))


class SlabPool(StagingPool):
    """Slabs of device memory in place of host memory. Each is registered once with the backend that moves it.

    Args:
        device: whose memory.
        nbytes: of each slab; no lease may be larger.
        count: of slabs, which are made at once: that waits for all of the device's work. Where a device has no room for
            so many, there are fewer, and threads wait for one.
        register: prepares a slab for transfers, and returns what undoes that. What it raises for the first slab is
            passed on.
    """

    def __init__(
        self, device: torch.device, nbytes: int, count: int, register: Callable[[Region], Callable[[], object]]
    ) -> None:
        super().__init__()
        self._nbytes = nbytes
        try:
            for _ in range(count):
                self._spare.append(self._made(device, register))
        except (StorageError, torch.OutOfMemoryError) as error:
            if not self._spare:
                raise
            _log.warning(
                "%s of %s buffers of device memory could be registered (%s); moves wait for each other",
                len(self._spare),
                count,
                str(error),
            )
        except BaseException:
            self.close()
            raise
        self._idle = SimpleQueue[None]()  # one token for each slab: it waits in C, where Ctrl-C leaves no lock taken
        for _ in self._spare:
            self._idle.put(None)

    @contextmanager
    def lease(self, nbytes: int) -> Iterator[torch.Tensor]:
        if nbytes > self._nbytes:
            raise ValueError(f"{nbytes:,} bytes were asked for of slabs of {self._nbytes:,}")
        self._idle.get()
        try:
            with super().lease(nbytes) as slab:
                yield slab
        finally:
            self._idle.put(None)

    def _made(self, device: torch.device, register: Callable[[Region], Callable[[], object]]) -> torch.Tensor:
        memory = torch.empty(self._nbytes + _GPU_PAGE_BYTES, dtype=torch.uint8, device=device)
        if (accelerator := accelerator_of(device)) is not None:
            accelerator.synchronize()  # PyTorch may have lent it before, to work that is still queued
        slab = memory[-memory.data_ptr() % _GPU_PAGE_BYTES :][: self._nbytes]
        self._undo[slab.data_ptr()] = register(Region(slab.data_ptr(), slab.nbytes))
        return slab


class _Loan(weakref.ref["ctypes.Array[ctypes.c_char]"]):
    """Watches the object through which torch holds a block."""

    __slots__ = ("block",)

    block: MappedBlock


class ReloadPool:
    """Gives torch storages for reloads on CPU, backed by memory that is recycled when torch lets go of them.

    Note [coming back]: torch drops a storage in whatever thread, also inside garbage collection, so that the callback
    of the weak reference only appends to a deque. The next ``take`` empties it under the lock.

    Args:
        max_spare_bytes: memory that may be kept for the next reload; beyond it the least recently used is freed.
    """

    def __init__(self, max_spare_bytes: int) -> None:
        self._max_spare_bytes = max_spare_bytes
        self._spare: list[MappedBlock] = []
        self._lent: dict[int, _Loan] = {}
        self._returned: deque[_Loan] = deque()
        self._closed = False
        # Guards spare, lent and closed. A leaf lock; finalisers that run under it only append to the deque.
        self._lock = threading.Lock()

    def take(self, nbytes: int, phase: int, memory_alignment: int) -> torch.UntypedStorage:
        """A CPU storage of exactly ``nbytes`` whose address is ``phase`` behind a multiple of ``memory_alignment``.

        Its content is arbitrary: the caller fills all of it.

        Raises:
            OffloaderClosedError: after close.
        """
        if not 0 <= phase < memory_alignment:
            raise ValueError(f"phase={phase}; give 0 up to {memory_alignment - 1}, the alignment less one")
        if nbytes < _SMALL_NBYTES:
            return _small_storage(nbytes, phase, memory_alignment)
        need = round_up(phase + nbytes, PAGE_BYTES)
        with self._lock:
            if self._closed:
                raise OffloaderClosedError("memory for a reload was asked for after the pool was closed")
            self._drain()
            block = _best_fit(self._spare, need, memory_alignment)
            if block is not None:
                self._spare.remove(block)
            surplus = self._surplus()
        del surplus  # unmapped here, outside of the lock
        if block is None:
            block = MappedBlock(need, memory_alignment)
        array = block.export()
        loan = _Loan(array, self._returned.append)
        loan.block = block
        with self._lock:
            if not self._closed:
                self._lent[id(loan)] = loan
        return torch.frombuffer(array, dtype=torch.uint8, offset=phase, count=nbytes).untyped_storage()

    def release(self) -> None:
        """Free all spare memory; the pool stays open."""
        with self._lock:
            self._drain()
            spare, self._spare = self._spare, []
        del spare

    def close(self) -> None:
        """Free the spare memory. Storages that torch still holds stay valid and free theirs themselves. Idempotent."""
        with self._lock:
            self._closed = True
            spare, self._spare = self._spare, []
            # Without a loan no callback tells when torch lets go, and the memory goes with its last reference.
            self._lent.clear()
            self._returned.clear()
        del spare

    def _drain(self) -> None:
        while self._returned:
            loan = self._returned.popleft()
            if self._lent.pop(id(loan), None) is not None:
                self._spare.append(loan.block)

    def _surplus(self) -> list[MappedBlock]:
        surplus = []
        spare_bytes = sum(block.nbytes for block in self._spare)
        while spare_bytes > self._max_spare_bytes:
            surplus.append(self._spare.pop(0))
            spare_bytes -= surplus[-1].nbytes
        return surplus


def _small_storage(nbytes: int, phase: int, memory_alignment: int) -> torch.UntypedStorage:
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu").untyped_storage()
    memory = bytearray(nbytes + memory_alignment)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return torch.frombuffer(
        memory, dtype=torch.uint8, offset=(phase - address) % memory_alignment, count=nbytes
    ).untyped_storage()
