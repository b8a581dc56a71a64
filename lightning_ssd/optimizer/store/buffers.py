"""Reuse a few blocks of memory for subgroups of optimizer states, even while other objects still point at them.

Fresh memory is slow (a page fault per 4 KiB), and sizes rounded up to powers of two would waste up to half of it. So a
block is as large as the largest subgroup so far. Only the touched pages of it take memory.
"""

from __future__ import annotations

import ctypes

import torch

from lightning_ssd.common.accelerators import accelerator_of
from lightning_ssd.common.rounding import round_up
from lightning_ssd.memory.mmap import PAGE_BYTES, MappedBlock
from lightning_ssd.tiers.copy_paths import storage_bytes

__all__ = ["BufferPool"]


class BufferPool:
    """Lends storages of exact sizes. It is not thread-safe: its owner has to lock.

    Args:
        device: device of the storages. A CPU's are page-aligned, in huge pages; others are from PyTorch's allocator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spare: list[ctypes.Array[ctypes.c_char]] = []
        self._lent: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self._largest_nbytes = 0
        self.num_lent = self.lent_bytes = self.peak_bytes = 0

    def take(self, nbytes: int) -> torch.UntypedStorage:
        """Return a storage of ``nbytes`` bytes with arbitrary content.

        Raises:
            MemoryError: memory has run out (``torch.OutOfMemoryError`` on a device).
        """
        storage = self._take(nbytes)
        self.num_lent += 1
        self.lent_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.lent_bytes)
        return storage

    def _take(self, nbytes: int) -> torch.UntypedStorage:
        if self._device.type != "cpu":
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device).untyped_storage()
        self._largest_nbytes = max(self._largest_nbytes, nbytes)
        fitting = [array for array in self._spare if len(array) >= nbytes]
        if fitting:
            array = min(fitting, key=len)
            self._spare.remove(array)
        else:
            if self._spare:
                self._spare.pop()  # too small: a larger one replaces it
            # By the largest size, because blocks of slightly growing sizes would be made again and again, and a move
            # keeps an old block alive.
            array = MappedBlock(round_up(self._largest_nbytes, PAGE_BYTES)).export()
        self._lent[ctypes.addressof(array)] = array
        return torch.frombuffer(array, dtype=torch.uint8, count=nbytes).untyped_storage()

    def used_here(self, storage: torch.UntypedStorage) -> None:
        """Record that the current stream uses the memory, which a worker may have allocated on another stream."""
        if (accelerator := accelerator_of(self._device)) is not None:
            whole = storage_bytes(storage, 0, storage.nbytes())
            whole.record_stream(accelerator.current_stream())

    def give_back(self, storage: torch.UntypedStorage) -> None:
        """Take a storage back, which no thread and no stream may read or write any more."""
        self.num_lent -= 1
        self.lent_bytes -= storage.nbytes()
        array = self._lent.pop(storage.data_ptr(), None)
        if array is not None:
            self._spare.append(array)

    def trim(self, num: int) -> None:
        """Free spare blocks until there are at most ``num``, with the lent ones."""
        while self._spare and len(self._spare) + len(self._lent) > num:
            self._spare.pop()

    def clear(self) -> None:
        """Free all blocks that are not lent."""
        self._spare.clear()
