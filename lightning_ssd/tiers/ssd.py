"""The SSD tier: directories on drives, where the bytes of storages wait.

:class:`SsdTier` spreads storages over its directories, cuts each into chunks, and lets
its workers move them. It checks what comes back (``verify``), tries a failed or wrong chunk once more, and never
returns other bytes.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from lightning_ssd.common.tensors import Region
from lightning_ssd.errors import CorruptionError, OffloaderClosedError, OutOfSpaceError, StorageError, forget_frames
from lightning_ssd.memory.file_mapping import FileView
from lightning_ssd.memory.readings import is_out_of_memory
from lightning_ssd.storage.backend import DEFAULT_CHUNK_BYTES, DEFAULT_WORKERS, Backend
from lightning_ssd.storage.spill_file import Arena, Extent
from lightning_ssd.telemetry.events import EventLog
from lightning_ssd.tiers.base import (
    NoMemoryToReadError,
    Progress,
    ReadOwner,
    StoredBytes,
    WriteOwner,
    check_size,
    moved_meanwhile,
)
from lightning_ssd.tiers.checksum import Sampler
from lightning_ssd.tiers.copy_paths import Edges, Loaded, Mover, Piece
from lightning_ssd.tiers.read_priority import UrgentGate
from lightning_ssd.tiers.streams import StreamEvent
from lightning_ssd.tiers.transfer_queue import Chunk, Transfer, TransferQueue

__all__ = ["SsdTier"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _SsdBytes:
    """One storage in an arena. ``checksums`` holds one value per chunk, or nothing."""

    tier: SsdTier
    arena: Arena
    extent: Extent
    nbytes: int
    edges: Edges
    checksums: tuple[int, ...]
    label: str
    missing_nbytes: int = 0
    """Of a write that was given up."""

    @property
    def body_nbytes(self) -> int:
        return self.nbytes - len(self.edges.head) - len(self.edges.tail) - self.missing_nbytes

    @property
    def is_complete(self) -> bool:
        return not self.missing_nbytes


class SsdTier:
    """Directories on drives, one arena each, with workers that write and workers that read.

    Args:
        backend: how bytes reach a file.
        mover: how bytes leave and enter tensor memory.
        directories: one per drive; storages go round robin, an arena that is full is passed over.
        events: gets one event per move.
        sampler: which storages get checksums.
        chunk_bytes: largest request; a transfer is shared by the workers of its direction chunk by chunk.
        num_workers: workers per direction.
        first: number of the directory that the first storage goes to. Processes that share the directories save the
            same sizes at the same moments: with equal ones they would all write to one drive, then to the next.
        drive: where the tier has but one directory, its number among those of others, for events.

    Note [writes give way]: reads and writes share the drives. While somebody waits for a read, no worker begins a write
    or the next chunk of one (see ``tiers/read_priority.py`` for how long at most).
    """

    name = "ssd"

    def __init__(
        self,
        backend: Backend,
        mover: Mover,
        directories: Sequence[Path],
        *,
        events: EventLog,
        sampler: Sampler,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        num_workers: int = DEFAULT_WORKERS,
        first: int = 0,
        drive: int | None = None,
    ) -> None:
        self._backend = backend
        self.mover = mover
        self._sampler = sampler
        self._chunk_bytes = max(chunk_bytes // backend.block_bytes, 1) * backend.block_bytes
        self._arenas: list[Arena] = []
        self._turn = itertools.count(first)
        self._drive = drive
        self.num_retries = 0
        self._late_error: BaseException | None = None
        self._lost: list[object] = []
        gate = UrgentGate()
        with ExitStack() as undo:  # no memory for a thread, or an interrupt from the keyboard
            for directory in directories:
                self._arenas.append(backend.open_arena(directory))
                undo.callback(self._arenas[-1].close)
            self._writes = TransferQueue("write", num_workers, events, tier=self.name, yields_to=gate)
            undo.callback(self._writes.close)
            self._reads = TransferQueue("read", num_workers, events, tier=self.name, announces=gate)
            undo.pop_all()

    @property
    def disk_bytes(self) -> int:
        """Size of the spill files."""
        return sum(arena.size_bytes for arena in self._arenas)

    def reserve(self, nbytes: int) -> None:
        """Let the spill files have at least ``nbytes`` bytes together.

        Raises:
            OutOfSpaceError: a file system has not so many.
        """
        share = -(-nbytes // len(self._arenas))
        for arena in self._arenas:
            arena.reserve(share)

    def write(self, owner: WriteOwner, nbytes: int, after: StreamEvent | None, *, label: str) -> bool:
        self._writes.submit(_Write(self, owner, nbytes, after, label))
        return True

    def read(
        self,
        owner: ReadOwner,
        stored: StoredBytes,
        device: torch.device,
        *,
        urgent: bool,
        into: torch.UntypedStorage | None = None,
        after: StreamEvent | None = None,
    ) -> Transfer:
        mine = self._mine(stored)
        if not mine.is_complete:
            raise ValueError(f"{mine.label} was not written to its end; nobody was to read it")
        # Mapping memory waits for page faults of other threads: nobody waits for a speculative read, so a worker does.
        if into is None and (urgent or not self.mover.allocates_anywhere):
            into, after = self.mover.allocate(mine.nbytes, mine.edges, device)
        elif into is not None and into.nbytes() != mine.nbytes:
            raise ValueError(f"{mine.label} has {mine.nbytes:,} bytes, and was to be read into {into.nbytes():,}")
        transfer = _Read(self, owner, mine, into, after, device, urgent=urgent)
        self._reads.submit(transfer)
        return transfer

    def promote(self, read: Transfer) -> None:
        self._reads.promote(read)

    def free(self, stored: StoredBytes) -> None:
        mine = self._mine(stored)
        if mine.extent.nbytes:
            mine.arena.free(mine.extent)

    def show(self, stored: StoredBytes, view: FileView, start: int, offset: int, nbytes: int) -> None:
        """Map part of a body, from ``offset`` on, at ``start`` of a view. It stays as it is until :meth:`free`."""
        mine = self._mine(stored)
        mine.arena.show(view, start, mine.extent.offset + offset, nbytes)

    def progress(self) -> Progress:
        return Progress(*self._writes.progress(), *self._reads.progress())

    @property
    def cpu_s(self) -> float:
        """CPU time of the workers, in seconds."""
        return self._writes.cpu_s + self._reads.cpu_s

    @property
    def busy_s(self) -> tuple[float, float]:
        """Seconds in which at least one write, and at least one read, was under way."""
        return self._writes.progress()[1], self._reads.progress()[1]

    def flush(self) -> None:
        self._writes.wait_idle()

    def close(self) -> None:
        """See :class:`Tier`.

        Raises:
            BaseException: what a copy failed with after it had been handed over, when nobody was there to be told.
        """
        with ExitStack() as stack:  # upwards, whatever one of them raises
            for arena in self._arenas:
                stack.callback(arena.close)
            stack.callback(self._reads.close)
            stack.callback(self._writes.close)
        error, self._late_error = self._late_error, None
        if error is not None:
            raise error

    def _mine(self, stored: StoredBytes) -> _SsdBytes:
        if not isinstance(stored, _SsdBytes) or stored.tier is not self:
            raise TypeError(f"{stored!r} was given to a tier that did not store it; hand it to the one that did")
        return stored

    # -- used by the two transfers below -----------------------------------------------------------------------

    def allocate(self, nbytes: int) -> tuple[Arena, Extent]:
        """An extent on the next directory in turn; on another one when that is full."""
        if nbytes == 0:  # a storage smaller than a block: its edges are all there is
            return self._arenas[0], Extent(0, 0)
        first = next(self._turn)
        error: OutOfSpaceError | None = None
        for i in range(len(self._arenas)):
            arena = self._arenas[(first + i) % len(self._arenas)]
            try:
                return arena, arena.allocate(nbytes)
            except OutOfSpaceError as full:
                error = full
        raise error or StorageError("this tier has no directory; give at least one in HardwareProfile.paths")

    def drive_of(self, arena: Arena) -> int | None:
        """Number of the directory of an arena, for events; ``None``: there is but one."""
        return self._arenas.index(arena) if len(self._arenas) > 1 else self._drive

    def wants_check(self) -> bool:
        """Whether the next storage gets checksums."""
        return self._sampler.wants()

    def note_late(self, error: BaseException, label: str, *memories: object) -> None:
        """A copy has failed that was handed over, and may still use these memories, so that nobody else may."""
        forget_frames(error)
        self._lost.extend(memories)
        self._late_error = self._late_error or error
        _log.error("copying %s to the device failed after it was handed over: %s", label, str(error))

    def pieces(self, arena: Arena, extent: Extent, start: int, nbytes: int) -> Iterable[Piece]:
        """Cut a body into chunks."""
        for done in range(0, nbytes, self._chunk_bytes):
            yield Piece(start + done, min(self._chunk_bytes, nbytes - done), arena, extent.offset + done)


class _Write(Transfer):
    """One storage on its way down."""

    def __init__(self, tier: SsdTier, owner: WriteOwner, nbytes: int, after: StreamEvent | None, label: str) -> None:
        super().__init__("write", nbytes)
        self._tier = tier
        self._owner = owner
        self._after = after
        self._label = label
        self._storage: torch.UntypedStorage | None = None
        self._stored: _SsdBytes | None = None
        self._checksums: list[int | None] = []
        self._memory: Region | None = None
        self._missing_nbytes = 0  # of the pieces that nobody wanted any more
        # Guards it and the bytes that move. A leaf lock.
        self._giving_up = threading.Lock()

    def begin(self) -> Sequence[Chunk] | None:
        if self._after is not None:
            with self.not_busy():
                self._after.synchronize()  # here, so that the rate is the drive's, and a take-back saves the write
        storage = self._storage = self._owner.write_begins()
        if storage is None:
            return None
        self._memory = check_size(storage, self.nbytes, self._label)
        edges = self._tier.mover.edges(storage)
        body = storage.nbytes() - len(edges.head) - len(edges.tail)
        self.nbytes = body
        arena, extent = self._tier.allocate(body)
        self._stored = _SsdBytes(self._tier, arena, extent, storage.nbytes(), edges, (), self._label)
        self.drive = self._tier.drive_of(arena)
        pieces = list(self._tier.pieces(arena, extent, len(edges.head), body))
        self._checksums = [None] * len(pieces)
        check = self._tier.wants_check()
        return [partial(self._store, i, storage, piece, check) for i, piece in enumerate(pieces)]

    def _store(self, index: int, storage: torch.UntypedStorage, piece: Piece, check: bool) -> None:
        if not self._owner.is_wanted():  # it was taken back, and would hold its memory as long as it is written
            with self._giving_up:
                self._missing_nbytes += piece.nbytes
                self.nbytes -= piece.nbytes
            return
        self._checksums[index] = self._tier.mover.store(storage, piece, self._after, check=check)

    def finish(self, error: BaseException | None) -> None:
        stored, storage = self._stored, self._storage
        self._storage = self._after = None  # the tensor's memory may go now
        if error is None:
            error = moved_meanwhile(storage, self._memory, self._label)
        del storage
        if stored is not None and error is None:
            checksums = tuple(value for value in self._checksums if value is not None)
            stored = replace(stored, checksums=checksums, missing_nbytes=self._missing_nbytes)
        elif stored is not None:
            self._tier.free(stored)
            stored = None
        self._owner.write_ended(stored, error)

    def discard(self) -> None:
        self._storage = None


class _Read(Transfer):
    """One storage on its way up."""

    def __init__(
        self,
        tier: SsdTier,
        owner: ReadOwner,
        stored: _SsdBytes,
        storage: torch.UntypedStorage | None,
        after: StreamEvent | None,
        device: torch.device,
        *,
        urgent: bool,
    ) -> None:
        super().__init__("read", stored.body_nbytes, urgent=urgent)
        self.drive = tier.drive_of(stored.arena)
        self._tier = tier
        self._owner = owner
        self._stored = stored
        self._storage = storage
        self._after = after
        self._device = device
        self._mark: StreamEvent | None = None  # of the copy that was queued last
        # Guards the mark and the order of the copies. A leaf lock: under it one copy is queued.
        self._order = threading.Lock()

    def begin(self) -> Sequence[Chunk] | None:
        stored, storage = self._stored, self._storage
        if storage is None:
            try:
                storage, self._after = self._tier.mover.allocate(stored.nbytes, stored.edges, self._device)
            except (RuntimeError, MemoryError, OSError) as error:
                if is_out_of_memory(error):
                    raise NoMemoryToReadError(str(error)) from None
                raise
            self._storage = storage
        stored.edges.put_into(storage)
        pieces = list(self._tier.pieces(stored.arena, stored.extent, len(stored.edges.head), stored.body_nbytes))
        expected: Sequence[int | None] = stored.checksums or [None] * len(pieces)
        return [partial(self._bring, storage, piece, value) for piece, value in zip(pieces, expected, strict=True)]

    def _bring(self, storage: torch.UntypedStorage, piece: Piece, expected: int | None) -> Callable[[], None] | None:
        """Read one piece and queue its copy; return what waits for the copy."""
        loaded = self._load(storage, piece, expected)
        with self._order:
            try:
                mark = loaded.bring_in()
            except BaseException:
                loaded.release()
                raise
            self._mark = mark
        return None if mark is None else partial(self._settle, storage, loaded, mark)

    def _settle(self, storage: torch.UntypedStorage, loaded: Loaded, mark: StreamEvent) -> None:
        """Hold both memories until the copy has passed; they may have been handed over and dropped long before."""
        try:
            if self._after is not None:
                self._await(self._after)
            mark.synchronize()
        except BaseException as error:  # told at close: the owner was told that all is well
            self._tier.note_late(error, self._stored.label, storage, loaded)
        else:
            loaded.release()

    def _load(self, storage: torch.UntypedStorage, piece: Piece, expected: int | None) -> Loaded:
        """Read one piece; once more when that failed or the bytes are wrong."""
        try:
            loaded = self._tier.mover.load(storage, piece, self._after, expected, self._await)
            if loaded is not None:
                return loaded
        except OSError as error:
            # As text: a log handler may keep its records, and the traceback holds the memory that we read into.
            _log.warning("reading %s again after: %s", self._stored.label, str(error))
        self._tier.num_retries += 1
        loaded = self._tier.mover.load(storage, piece, self._after, expected, self._await)
        if loaded is None:
            raise CorruptionError(
                f"{self._stored.label}: {piece.nbytes} bytes at offset {piece.offset} of the spill file in "
                f"{piece.arena.path} are not what was written, in two reads; nothing was handed on. "
                "Check the drive (SMART, dmesg) or take another directory in HardwareProfile.paths"
            )
        return loaded

    def _await(self, mark: StreamEvent) -> None:
        # What the device still computes before it may take the bytes says nothing of the drive.
        with self.not_busy(has_begun=True):
            mark.synchronize()

    def finish(self, error: BaseException | None) -> None:
        storage, self._storage = self._storage, None
        # All copies of ours run on one stream, so that the one that was queued last stands for all; whoever wants the
        # bytes waits for it.
        self._owner.read_ended(None if error else storage, None if error else self._mark, error)

    def discard(self) -> None:
        self._storage = None
        self._owner.read_ended(None, None, OffloaderClosedError("the offloader was closed before this read began"))
