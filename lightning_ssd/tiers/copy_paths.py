"""How the bytes of one storage get between its memory and a file: three ways, one contract.

* :class:`HostMover`: CPU memory, no copy. The aligned body goes straight from the tensor; the unaligned edges, less
  than a block each, stay in memory, and the reload gets memory of the same alignment.
* :class:`StagedMover`: device memory through staging buffers and streams of our own (``tiers/streams.py``).
* :class:`DeviceMover`: device memory that the backend moves by itself (GPUDirect Storage).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple, Protocol

import torch

from lightning_ssd.common.rounding import round_up
from lightning_ssd.common.tensors import Region
from lightning_ssd.errors import StorageError
from lightning_ssd.memory.mmap import VECTOR_BYTES
from lightning_ssd.memory.pools import ReloadPool, StagingPool
from lightning_ssd.storage.backend import Backend
from lightning_ssd.storage.spill_file import Arena
from lightning_ssd.tiers.checksum import checksum
from lightning_ssd.tiers.streams import CopyEngine, StreamEvent

__all__ = [
    "DeviceMover",
    "Edges",
    "HostMover",
    "Loaded",
    "Mover",
    "Piece",
    "StagedMover",
    "host_bytes",
    "storage_bytes",
]


class Edges(NamedTuple):
    """The first and last bytes of a storage, kept in memory because direct I/O cannot move them in place."""

    head: bytes
    tail: bytes

    def put_into(self, storage: torch.UntypedStorage) -> None:
        """Write them to both ends of a storage."""
        ctypes.memmove(storage.data_ptr(), self.head, len(self.head))
        ctypes.memmove(storage.data_ptr() + storage.nbytes() - len(self.tail), self.tail, len(self.tail))


_NO_EDGES = Edges(b"", b"")


class Piece(NamedTuple):
    """One chunk: ``nbytes`` bytes at ``start`` of the storage, at ``offset`` of the arena's file."""

    start: int
    nbytes: int
    arena: Arena
    offset: int


class Loaded(Protocol):
    """One piece that has been read, on its way into a storage."""

    def bring_in(self) -> StreamEvent | None:
        """Called once. Return the mark after which the bytes are there; ``None``: they are."""

    def release(self) -> None:
        """Called once, when the mark has passed or nothing was brought in: the memory that it was read into is free."""


class Mover(Protocol):
    """The contract of the three ways. ``store`` and ``load`` block and run in workers."""

    allocates_anywhere: bool
    """Whether a worker may call ``allocate``, because no stream is asked."""

    def edges(self, storage: torch.UntypedStorage) -> Edges:
        """Copy the bytes that do not go to the file."""

    def store(
        self, storage: torch.UntypedStorage, piece: Piece, after: StreamEvent | None, *, check: bool
    ) -> int | None:
        """Write one piece, once ``after`` has passed. Return its checksum where ``check`` asks for one."""

    def allocate(
        self, nbytes: int, edges: Edges, device: torch.device
    ) -> tuple[torch.UntypedStorage, StreamEvent | None]:
        """Memory for a read whose caller brings none, from the consuming thread and stream; its mark guards its earlier
        user.
        """

    def load(
        self,
        storage: torch.UntypedStorage,
        piece: Piece,
        after: StreamEvent | None,
        expected: int | None,
        wait: Callable[[StreamEvent], None],
    ) -> Loaded | None:
        """Read one piece; ``None`` if it has not the expected checksum.

        ``wait`` blocks until the device has got to a mark; the time that it takes is not the drive's.
        """


class _Here:
    """It was read to where it belongs."""

    def bring_in(self) -> None:
        """Nothing moves any more."""

    def release(self) -> None:
        """There is no other memory."""


_HERE = _Here()


class HostMover:
    """CPU memory, without a copy.

    Args:
        backend: moves aligned bodies.
        reload: gives recycled memory for reloads (first touches of fresh pages cost more than the read itself).
            ``None``: for storages that are whole blocks and brought back to memory of the caller's. They have no edges:
            the file has all of their bytes.
    """

    allocates_anywhere = True

    def __init__(self, backend: Backend, reload: ReloadPool | None) -> None:
        self._backend = backend
        self._reload = reload

    @property
    def _alignment(self) -> int:
        return max(self._backend.memory_alignment, VECTOR_BYTES)  # asked anew each time: the former may rise

    def edges(self, storage: torch.UntypedStorage) -> Edges:
        if self._reload is None:
            return _NO_EDGES
        address, nbytes = storage.data_ptr(), storage.nbytes()
        head = min(-address % self._alignment, nbytes)
        tail = (nbytes - head) % self._backend.block_bytes
        return Edges(ctypes.string_at(address, head), ctypes.string_at(address + nbytes - tail, tail))

    def store(
        self, storage: torch.UntypedStorage, piece: Piece, after: StreamEvent | None, *, check: bool
    ) -> int | None:
        region = Region(storage.data_ptr() + piece.start, piece.nbytes)
        self._backend.write(piece.arena, region, piece.offset)
        return checksum(region) if check else None

    def allocate(
        self, nbytes: int, edges: Edges, device: torch.device
    ) -> tuple[torch.UntypedStorage, StreamEvent | None]:
        if self._reload is None:
            raise RuntimeError(f"a read of {nbytes:,} bytes was not told where to; give read() its memory")
        alignment = self._alignment
        return self._reload.take(nbytes, -len(edges.head) % alignment, alignment), None

    def load(
        self,
        storage: torch.UntypedStorage,
        piece: Piece,
        after: StreamEvent | None,
        expected: int | None,
        wait: Callable[[StreamEvent], None],
    ) -> Loaded | None:
        region = Region(storage.data_ptr() + piece.start, piece.nbytes)
        self._backend.read(piece.arena, region, piece.offset)
        return _HERE if expected is None or checksum(region) == expected else None


class StagedMover:
    """Device memory through (pinned) staging buffers: copy, mark, wait, write; read, copy, mark.

    Args:
        backend: moves the staging buffers, which are aligned and whole blocks long.
        staging: bounded pool; a worker waits there when it is exhausted.
        copies: the streams.
    """

    allocates_anywhere = False

    def __init__(self, backend: Backend, staging: StagingPool, copies: CopyEngine) -> None:
        self._backend = backend
        self._staging = staging
        self._copies = copies

    def edges(self, storage: torch.UntypedStorage) -> Edges:
        return _NO_EDGES

    def store(
        self, storage: torch.UntypedStorage, piece: Piece, after: StreamEvent | None, *, check: bool
    ) -> int | None:
        with self._staging.lease(self._padded(piece)) as region:
            mark = self._copies.copy_out(
                host_bytes(region.address, piece.nbytes),
                storage_bytes(storage, piece.start, piece.nbytes),
                after or self._copies.mark(),
            )
            mark.synchronize()  # the file must not get the buffer before the copy has filled it
            self._backend.write(piece.arena, region, piece.offset)
            return checksum(Region(region.address, piece.nbytes)) if check else None

    def allocate(
        self, nbytes: int, edges: Edges, device: torch.device
    ) -> tuple[torch.UntypedStorage, StreamEvent | None]:
        storage = torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()
        return storage, self._copies.mark()

    def load(
        self,
        storage: torch.UntypedStorage,
        piece: Piece,
        after: StreamEvent | None,
        expected: int | None,
        wait: Callable[[StreamEvent], None],
    ) -> Loaded | None:
        with ExitStack() as stack:
            region = stack.enter_context(self._staging.lease(self._padded(piece)))
            self._backend.read(piece.arena, region, piece.offset)
            if expected is not None and checksum(Region(region.address, piece.nbytes)) != expected:
                return None
            target = storage_bytes(storage, piece.start, piece.nbytes)
            source = host_bytes(region.address, piece.nbytes)
            return _Staged(self._copies, target, source, after, stack.pop_all())

    def _padded(self, piece: Piece) -> int:
        return round_up(piece.nbytes, self._backend.block_bytes)


class _Staged:
    """In a staging buffer, which goes back to its pool when the copy has left it."""

    def __init__(
        self,
        copies: CopyEngine,
        target: torch.Tensor,
        source: torch.Tensor,
        after: StreamEvent | None,
        lease: ExitStack,
    ) -> None:
        self._copies = copies
        self._target = target
        self._source = source
        self._after = after
        self._lease = lease

    def bring_in(self) -> StreamEvent:
        return self._copies.copy_in(self._target, self._source, self._after or self._copies.mark())

    def release(self) -> None:
        self._lease.close()


class DeviceMover:
    """Device memory that the backend reaches by itself. Checksums need the bytes on the host: use StagedMover."""

    allocates_anywhere = False

    def __init__(self, backend: Backend, copies: CopyEngine) -> None:
        self._backend = backend
        self._copies = copies

    def edges(self, storage: torch.UntypedStorage) -> Edges:
        return _NO_EDGES

    def store(
        self, storage: torch.UntypedStorage, piece: Piece, after: StreamEvent | None, *, check: bool
    ) -> int | None:
        if after is not None:
            after.synchronize()  # the drive reads device memory outside of any stream
        self._backend.write(piece.arena, Region(storage.data_ptr() + piece.start, piece.nbytes), piece.offset)
        return None

    def allocate(
        self, nbytes: int, edges: Edges, device: torch.device
    ) -> tuple[torch.UntypedStorage, StreamEvent | None]:
        storage = torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()
        return storage, self._copies.mark()

    def load(
        self,
        storage: torch.UntypedStorage,
        piece: Piece,
        after: StreamEvent | None,
        expected: int | None,
        wait: Callable[[StreamEvent], None],
    ) -> Loaded | None:
        if after is not None:
            wait(after)  # kernels queued earlier may still use this memory under its former owner
        self._backend.read(piece.arena, Region(storage.data_ptr() + piece.start, piece.nbytes), piece.offset)
        return _HERE


def storage_bytes(storage: torch.UntypedStorage, start: int, nbytes: int) -> torch.Tensor:
    """A part of a storage as a byte tensor over the same memory.

    Raises:
        StorageError: the storage has become smaller; PyTorch would make it larger again.
    """
    if start + nbytes > storage.nbytes():
        raise StorageError(f"a storage of {storage.nbytes():,} bytes has no bytes {start:,} to {start + nbytes:,}")
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (nbytes,), (1,))


def host_bytes(address: int, nbytes: int) -> torch.Tensor:
    """Host memory of ours as a byte tensor. It does not keep the memory alive."""
    return torch.frombuffer(Region(address, nbytes).view(), dtype=torch.uint8)
