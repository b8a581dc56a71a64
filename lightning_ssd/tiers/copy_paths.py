"""How the bytes of one storage get between its memory and a tier: three ways, one contract.

* :class:`HostMover`: CPU memory, no copy. The aligned body goes straight from the tensor; the unaligned edges, less
  than a block each, stay in memory, and the reload gets memory of the same alignment.
* :class:`StagedMover`: device memory through staging buffers and streams of our own (``tiers/streams.py``). The buffers
  are host memory, or slabs of device memory where the backend moves these by itself (GPUDirect Storage).
* :class:`ArenaMover`: memory of any device to host memory and back, where the others go to a file.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import NamedTuple

import torch

from lightning_ssd.common.rounding import round_up
from lightning_ssd.common.tensors import Region, new_tuple
from lightning_ssd.errors import StorageError
from lightning_ssd.memory.mmap import VECTOR_BYTES
from lightning_ssd.memory.pools import ReloadPool, StagingPool
from lightning_ssd.storage.backend import Backend
from lightning_ssd.storage.spill_file import Arena, Extent
from lightning_ssd.tiers.checksum import checksum
from lightning_ssd.tiers.host_arena import HostArena
from lightning_ssd.tiers.streams import PASSED, CopyEngine, HostCopies, StreamEvent

__all__ = [
    "HERE",
    "NO_EDGES",
    "ArenaMover",
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


NO_EDGES = Edges(b"", b"")


class Piece(NamedTuple):
    """One chunk: ``nbytes`` bytes at ``start`` of the storage, at ``offset`` of the arena."""

    storage: torch.UntypedStorage
    start: int
    nbytes: int
    arena: Arena
    offset: int
    after: StreamEvent | None
    """When this has passed, the storage may be read from or written to."""

    @property
    def memory(self) -> Region:
        """Where its bytes are in the storage; for memory of the host."""
        region: Region = new_tuple(Region, (self.storage.data_ptr() + self.start, self.nbytes))
        return region


class Loaded(NamedTuple):
    """One piece that has been read, on its way into a storage."""

    bring_in: Callable[[], StreamEvent]
    """Called once. Returns the mark after which the bytes are there."""
    release: Callable[[], None]
    """Called once, when the mark has passed or nothing was brought in: the memory that it was read into is free."""


HERE = Loaded(lambda: PASSED, lambda: None)
"""A piece that was read to where it belongs."""


class Mover(ABC):
    """How bytes get between a storage and a tier. ``store`` and ``load`` block and run in workers.

    Args:
        copies: between the storage's device and the host.
    """

    allocates_anywhere = False
    """Whether a worker may call ``allocate``, because no stream is asked."""
    outlasts = False
    """Whether a read is but copies, and goes on until the last of them has passed."""

    def __init__(self, copies: CopyEngine) -> None:
        self.copies = copies
        self.lost: list[object] = []
        """Memory that a copy may still use, because waiting for it has failed. Held for good."""

    def edges(self, storage: torch.UntypedStorage) -> Edges:
        """Copy the bytes that do not go to the tier."""
        return NO_EDGES

    @abstractmethod
    def store(self, piece: Piece, *, check: bool) -> int | None:
        """Write one piece. Return its checksum where ``check`` asks for one."""

    def allocate(
        self, nbytes: int, edges: Edges, device: torch.device
    ) -> tuple[torch.UntypedStorage, StreamEvent | None]:
        """Memory for a read whose caller brings none, from the consuming thread and stream; its mark guards its earlier
        user.
        """
        storage = torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()
        return storage, self.copies.mark()

    @abstractmethod
    def load(self, piece: Piece, expected: int | None) -> Loaded | None:
        """Read one piece; ``None`` if it has not the expected checksum."""


class HostMover(Mover):
    """CPU memory to a file, without a copy.

    Args:
        backend: moves aligned bodies.
        reload: gives recycled memory for reloads (first touches of fresh pages cost more than the read itself).
            ``None``: for storages that are whole blocks and brought back to memory of the caller's. They have no edges:
            the file has all of their bytes.
    """

    allocates_anywhere = True

    def __init__(self, backend: Backend, reload: ReloadPool | None) -> None:
        super().__init__(HostCopies())
        self._backend = backend
        self._reload = reload
        self._alignment, self._block_bytes = max(backend.memory_alignment, VECTOR_BYTES), backend.block_bytes

    def edges(self, storage: torch.UntypedStorage) -> Edges:
        if self._reload is None:
            return NO_EDGES
        address, nbytes = storage.data_ptr(), storage.nbytes()
        head = min(-address % self._alignment, nbytes)
        tail = (nbytes - head) % self._block_bytes
        if not head and not tail:
            return NO_EDGES
        edges = ctypes.string_at(address, head), ctypes.string_at(address + nbytes - tail, tail)
        found: Edges = new_tuple(Edges, edges)
        return found

    def store(self, piece: Piece, *, check: bool) -> int | None:
        self._backend.write(piece.arena, piece.memory, piece.offset)
        return checksum(piece.memory) if check else None

    def allocate(
        self, nbytes: int, edges: Edges, device: torch.device
    ) -> tuple[torch.UntypedStorage, StreamEvent | None]:
        if self._reload is None:
            raise RuntimeError(f"a read of {nbytes:,} bytes was not told where to; give read() its memory")
        return self._reload.take(nbytes, -len(edges.head) % self._alignment, self._alignment), None

    def load(self, piece: Piece, expected: int | None) -> Loaded | None:
        self._backend.read(piece.arena, piece.memory, piece.offset)
        return HERE if expected is None or checksum(piece.memory) == expected else None


class _CopyingMover(Mover):
    """Through memory of ours: copy, mark, wait; copy, mark."""

    @abstractmethod
    def _lend(self, piece: Piece, writer: torch.device | None = None) -> AbstractContextManager[torch.Tensor]:
        """Return memory for one piece, ready for ``writer`` to fill."""

    def _put(self, region: Region, piece: Piece) -> None:
        """Write memory of ours to where it is to wait, unless that is where it is."""

    def _get(self, region: Region, piece: Piece) -> None:
        """Read memory of ours from where it waits."""

    def store(self, piece: Piece, *, check: bool) -> int | None:
        with ExitStack() as stack:
            staged = stack.enter_context(self._lend(piece, piece.storage.device))
            mark = self.copies.copy_out(
                staged[: piece.nbytes],
                storage_bytes(piece.storage, piece.start, piece.nbytes),
                piece.after or self.copies.mark(),
            )
            try:
                mark.synchronize()  # before it is written to a file, and before the owner lets go of the tensor
            except BaseException:
                self.lost.extend((piece.storage, stack.pop_all()))
                raise
            self._put(Region(staged.data_ptr(), staged.nbytes), piece)
            return checksum(Region(staged.data_ptr(), piece.nbytes)) if check else None

    def load(self, piece: Piece, expected: int | None) -> Loaded | None:
        with ExitStack() as stack:
            staged = stack.enter_context(self._lend(piece))
            self._get(Region(staged.data_ptr(), staged.nbytes), piece)
            if expected is not None and checksum(Region(staged.data_ptr(), piece.nbytes)) != expected:
                return None
            target = storage_bytes(piece.storage, piece.start, piece.nbytes)
            source = staged[: piece.nbytes]

            def bring_in() -> StreamEvent:
                return self.copies.copy_in(target, source, piece.after or self.copies.mark())

            if self.copies.is_asynchronous:
                return Loaded(bring_in, stack.pop_all().close)
            bring_in()  # here, where the workers that share a storage do so side by side
            return HERE


class StagedMover(_CopyingMover):
    """Device memory to a file, through staging buffers: pinned host memory, or slabs of the device's.

    Args:
        backend: moves the staging buffers, which are aligned and whole blocks long.
        staging: lends the buffers. With checksums these are host memory.
        copies: the streams.
    """

    def __init__(self, backend: Backend, staging: StagingPool, copies: CopyEngine) -> None:
        super().__init__(copies)
        self._backend = backend
        self._staging = staging

    def _lend(self, piece: Piece, writer: torch.device | None = None) -> AbstractContextManager[torch.Tensor]:
        return self._staging.lease(round_up(piece.nbytes, self._backend.block_bytes))

    def _put(self, region: Region, piece: Piece) -> None:
        self._backend.write(piece.arena, region, piece.offset)

    def _get(self, region: Region, piece: Piece) -> None:
        self._backend.read(piece.arena, region, piece.offset)


class ArenaMover(_CopyingMover):
    """Memory of any device to host memory of ours, where it waits; no file is behind it.

    Args:
        arena: the host memory.
        copies: the streams.
    """

    def __init__(self, arena: HostArena, copies: CopyEngine) -> None:
        super().__init__(copies)
        self.outlasts = copies.is_asynchronous
        self._arena = arena

    def _lend(self, piece: Piece, writer: torch.device | None = None) -> AbstractContextManager[torch.Tensor]:
        if writer is not None:
            self._arena.prepare(Extent(piece.offset, piece.nbytes), writer)
        return nullcontext(host_bytes(*self._arena.region(piece.offset, piece.nbytes)))


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
