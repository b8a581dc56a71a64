"""How bytes reach a file: the contract of all backends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

import torch

from lightning_ssd.common.accelerators import locks_host_memory
from lightning_ssd.common.tensors import Region
from lightning_ssd.memory.pools import SlabPool, StagingPool
from lightning_ssd.storage.spill_file import Arena

__all__ = ["DEFAULT_CHUNK_BYTES", "DEFAULT_WORKERS", "Backend", "Verb", "open_staging"]

Verb = Literal["write", "read"]

# Both from the sweep in docs/results/bench_io_cpu.md.
DEFAULT_CHUNK_BYTES = 16 << 20
"""Largest request. 1 MiB costs two to three times the core time; 64 MiB makes an urgent read wait for 30 ms."""
DEFAULT_WORKERS = 2
"""Threads per direction. One leaves the drive idle between requests; more gain nothing."""


class Backend(Protocol):
    """Moves bytes between memory and an arena's file.

    Both moves block, may be called from many threads at once, and do not hold the GIL while bytes move. They move
    exactly ``region.nbytes`` bytes or raise. The caller promises that ``offset`` and ``region.nbytes`` are multiples
    of ``block_bytes`` and that the memory lives and stays as it is until the call returns. The address may be anything:
    one that is no multiple of ``memory_alignment`` is moved through a staging buffer, which costs a copy.
    """

    @property
    def name(self) -> str:
        """The way that is taken, for reports: "posix O_DIRECT", "posix page cache", "cuFile GDS", "kvikio GDS" or
        "kvikio POSIX".
        """

    @property
    def memory_alignment(self) -> int:
        """Addresses that are multiples of this are moved without a copy. Fixed."""

    @property
    def block_bytes(self) -> int:
        """Granularity of offsets, lengths and extents. Fixed."""

    @property
    def register(self) -> Callable[[Region], Callable[[], object]] | None:
        """Prepares device memory for transfers that begin at its first byte, and returns what undoes that.

        It raises a StorageError if the memory cannot be moved. ``None``: the backend moves host memory only.
        """

    def open_arena(self, directory: Path) -> Arena:
        """A new arena in ``directory``. The caller closes it, before the backend."""

    def write(self, arena: Arena, region: Region, offset: int) -> None:
        """Memory to file.

        Raises:
            OutOfSpaceError: the file system is full.
            ShortTransferError: the system moved less, again and again.
            StorageError: any other failure, with ``errno``, path, offset and length.
        """

    def read(self, arena: Arena, region: Region, offset: int) -> None:
        """File to memory. Raises as :meth:`write`; reading behind the end of the file is a ShortTransferError."""

    def close(self) -> None:
        """Free buffers and restore library-wide settings. Idempotent."""


def open_staging(
    backend: Backend, device: torch.device, *, nbytes: int = DEFAULT_CHUNK_BYTES, count: int = 1
) -> StagingPool:
    """Open the buffers through which memory of ``device`` goes to a file and back.

    The caller closes them, before the backend.

    Args:
        backend: moves the buffers.
        device: copies to and from them.
        nbytes: of each slab of device memory.
        count: of slabs that are made at once.

    Raises:
        StorageError: the backend cannot move device memory after all.
    """
    if backend.register is not None:
        return SlabPool(device, nbytes, count, backend.register)
    return StagingPool(pin=locks_host_memory(device), device=device)
