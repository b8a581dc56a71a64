"""The SSD tier: directories on drives, where the bytes of storages wait.

:class:`SsdTier` cuts storages into chunks. Each directory has workers of its own, and a worker that is free writes the
next chunk to its directory. So each drive gets as much as it can take, and a slow one slows no other. The tier checks
what comes back (``verify``), tries a failed or wrong chunk once more, and never returns other bytes.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_ssd.common.tensors import Region
from lightning_ssd.errors import (
    FULL_ERRNOS,
    CorruptionError,
    OffloaderClosedError,
    OutOfSpaceError,
    StorageError,
    forget_frames,
)
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
    WriteRequest,
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


class _Part(NamedTuple):
    """``nbytes`` bytes from ``start`` of a storage on, in one arena."""

    start: int
    nbytes: int
    lane: int
    extent: Extent


@dataclass(frozen=True, slots=True)
class _SsdBytes:
    """One storage in arenas, in order. ``checksums`` holds one value per chunk, or nothing."""

    tier: SsdTier
    parts: tuple[_Part, ...]
    nbytes: int
    edges: Edges
    checksums: tuple[int, ...]
    label: str
    missing_nbytes: int = 0
    """Bytes that a write left out when it was given up."""

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
        directories: one per drive. Where one is full, or refuses to be written to, others get its part.
        events: gets one event per move.
        sampler: which storages get checksums.
        chunk_bytes: largest request; a transfer is shared by the workers of its direction chunk by chunk.
        num_workers: workers per direction and directory.
        first: number of the directory that the first bytes go to. Processes that share the directories save the same
            sizes at the same moments: with equal ones they would all begin at one drive.
        drive: where the tier has but one directory, its number among those of others, for events.

    Note [writes give way]: reads and writes share the drives. While the training thread waits for a read, no worker
    begins a write or the next chunk of one (see ``tiers/read_priority.py`` for how long at most).
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
        self._drive = drive
        self._num_workers = num_workers * max(len(directories), 1)
        self._begins_at = deque([first % max(len(directories), 1)])  # once
        self._refusing: set[int] = set()  # directories that no write goes to any more
        self.num_retries = 0
        self._late_error: BaseException | None = None
        self._lost: list[object] = []
        gate = UrgentGate()
        with ExitStack() as undo:  # no memory for a thread, or an interrupt from the keyboard
            for directory in directories:
                self._arenas.append(backend.open_arena(directory))
                undo.callback(self._arenas[-1].close)
            lanes: dict[str, Any] = {"tier": self.name, "num_lanes": len(self._arenas)}
            self._writes = TransferQueue("write", num_workers, events, yields_to=gate, **lanes)
            undo.callback(self._writes.close)
            self._reads = TransferQueue("read", num_workers, events, announces=gate, **lanes)
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
        self.write_all([WriteRequest(owner, nbytes, after, label)])
        return True

    def write_all(self, requests: Sequence[WriteRequest]) -> None:
        """Queue the writes of several storages as one job. Each ends, and fails, by itself."""
        self._writes.submit(_Write(self, requests))

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
            raise ValueError(f"{mine.label} was not written to its end; it must not be read")
        # Mapping memory waits for page faults of other threads: a speculative read has time, so a worker does.
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
        self.free_parts(self._mine(stored).parts)

    def show(self, stored: StoredBytes, view: FileView, start: int, offset: int, nbytes: int) -> None:
        """Map part of a body, from ``offset`` on, at ``start`` of a view. It stays as it is until :meth:`free`."""
        mine = self._mine(stored)
        head = len(mine.edges.head)
        for part in mine.parts:
            begin, end = max(offset, part.start - head), min(offset + nbytes, part.start - head + part.nbytes)
            if begin < end:
                at = part.extent.offset + begin - (part.start - head)
                self._arenas[part.lane].show(view, start + begin - offset, at, end - begin)

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
            BaseException: what a copy failed with after it had been handed over, when its owner had ended.
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

    @property
    def num_directories(self) -> int:
        """Number of directories, each with its own workers."""
        return len(self._arenas)

    def allocate(self, start: int, nbytes: int, avoided: Collection[int] = ()) -> _Part:
        """Return room for part of a storage on the directory of the worker that asks; else on another one.

        Args:
            start: of the part in the storage.
            nbytes: of the part.
            avoided: directories that have refused this part.

        Raises:
            OSError: all are full or refuse.
        """
        if nbytes == 0:  # a storage smaller than a block: its edges are all there is
            return _Part(start, 0, 0, Extent(0, 0))
        error: OSError | None = None
        first = self._begins_at.pop() if self._begins_at else self._writes.lane
        lanes = [(first + i) % len(self._arenas) for i in range(len(self._arenas))]
        for lane in sorted(lanes, key=self._refusing.__contains__):
            if lane in avoided:
                continue
            try:
                return _Part(start, nbytes, lane, self._arenas[lane].allocate(nbytes))
            except OSError as refusal:
                self.gives_up(lane, refusal)
                error = refusal
        raise error or StorageError("every directory of HardwareProfile.paths has refused these bytes")

    def gives_up(self, lane: int, error: OSError) -> None:
        """Write to a directory no more while there is another one, because it refuses."""
        is_full = isinstance(error, OutOfSpaceError) or error.errno in FULL_ERRNOS  # it may have room again
        if lane not in self._refusing and not is_full:
            self._refusing.add(lane)
            _log.warning("%s is written to no more, after: %s", self._arenas[lane].path, str(error))

    def free_parts(self, parts: Iterable[_Part]) -> None:
        """Give the room of parts back."""
        for part in parts:
            if part.extent.nbytes:
                self._arenas[part.lane].free(part.extent)

    def shares(self, parts: Sequence[_Part], nbytes: int) -> list[tuple[int | None, int]]:
        """Return the numbers of the drives that hold these parts, with their bytes; ``None``: there is but one.

        Args:
            parts: of one storage.
            nbytes: that have moved, for a tier of one drive.
        """
        if len(self._arenas) == 1 or not parts:
            return [(self._drive, nbytes)]
        by_lane: dict[int | None, int] = {}
        for part in parts:
            by_lane[part.lane] = by_lane.get(part.lane, 0) + part.nbytes
        return list(by_lane.items())

    def wants_check(self) -> bool:
        """Whether the next storage gets checksums."""
        return self._sampler.wants()

    def note_late(self, error: BaseException, label: str, *memories: object) -> None:
        """Note that a copy failed after it was handed over. It may still use these memories: none is lent again."""
        forget_frames(error)
        self._lost.extend(memories)
        self._late_error = self._late_error or error
        _log.error("copying %s to the device failed after it was handed over: %s", label, str(error))

    def cut(self, start: int, nbytes: int) -> list[tuple[int, int]]:
        """Cut a body into chunks: where each begins, and its bytes."""
        step = self._chunk_bytes
        return [(start + done, min(step, nbytes - done)) for done in range(0, nbytes, step)]

    def num_chunks(self, nbytes: int) -> int:
        """Return the number of chunks that a storage is cut into at most."""
        return max(-(-nbytes // self._chunk_bytes), 1)

    def join(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """Return which pieces make a chunk: small ones become one, as long as each worker has something to do.

        Args:
            sizes: of the pieces.
        """
        most_bytes = min(self._chunk_bytes, -(-sum(sizes) // self._num_workers))
        chunks, start, left_bytes = [], 0, most_bytes
        for index, nbytes in enumerate(sizes):
            if nbytes > left_bytes and index > start:
                chunks.append((start, index))
                start, left_bytes = index, most_bytes
            left_bytes -= nbytes
        return [*chunks, (start, len(sizes))]

    def piece(self, part: _Part, start: int, nbytes: int) -> Piece:
        """Return where a chunk of a part lies."""
        return Piece(start, nbytes, self._arenas[part.lane], part.extent.offset + start - part.start)

    def pieces(self, parts: Iterable[_Part]) -> list[tuple[int, Piece]]:
        """Return the chunks of a body, each with its lane."""
        return [(part.lane, self.piece(part, *cut)) for part in parts for cut in self.cut(part.start, part.nbytes)]


class _Outgoing:
    """One storage on its way down.

    It begins, and takes its place on the drive, when a worker gets to it: until then its owner may take it back, and
    nothing holds its memory.

    Args:
        tier: gets it.
        request: the storage, and who owns it.
    """

    def __init__(self, tier: SsdTier, request: WriteRequest) -> None:
        self.request = request
        self.parts: list[_Part] = []
        self.moved_nbytes = 0
        """Bytes that go to drives, without the pieces that were no longer wanted."""
        self.failed_nbytes = 0
        self.fault: BaseException | None = None
        """Error of telling the owner of the end, which its contract forbids."""
        self._tier = tier
        self._storage: torch.UntypedStorage | None = None
        self._edges: Edges | None = None
        self._whole: _Part | None = None
        self._cuts: list[tuple[int, int]] = []
        self._checksums: list[int | None] = []
        self._check = False
        self._memory: Region | None = None
        self._missing_nbytes = 0  # of the pieces that were no longer wanted
        self._error: BaseException | None = None
        self._is_begun = self._is_over = False
        self._num_left = self.num_pieces = tier.num_chunks(request.nbytes)
        # Order: before the accounting lock, which the owner takes.
        self._beginning = threading.Lock()
        # Guards the numbers, the parts and the error. A leaf lock.
        self._changing = threading.Lock()

    def run(self, index: int) -> bool:
        """Write one piece. Return whether it was the last one, so that all that is left is to end."""
        try:
            with self._beginning:
                if not self._is_begun:
                    self._is_begun = True
                    self._begin()
            if self._error is None and index < len(self._cuts):
                self._store(index)
        except BaseException as error:
            forget_frames(error)
            with self._changing:
                self._error = self._error or error
        with self._changing:
            self._num_left -= 1
            return not self._num_left

    def _begin(self) -> None:
        request, tier = self.request, self._tier
        storage = self._storage = request.owner.write_begins()
        if storage is None:
            self._is_over = True
            return
        self._memory = check_size(storage, request.nbytes, request.label)
        edges = self._edges = tier.mover.edges(storage)
        head, body = len(edges.head), request.nbytes - len(edges.head) - len(edges.tail)
        self._cuts = tier.cut(head, body)
        self._checksums = [None] * len(self._cuts)
        self._check = tier.wants_check()
        # With one directory one extent, which leaves one hole. With several, a chunk belongs to the drive that is free.
        if tier.num_directories == 1:
            self._whole = tier.allocate(head, body)
            self.parts.append(self._whole)
        self.moved_nbytes = body

    def _store(self, index: int) -> None:
        storage, cut, refused = self._storage, self._cuts[index], dict[int, OSError]()
        if storage is None or not self.request.owner.is_wanted():
            with self._changing:  # it was taken back, and would hold its memory as long as it is written
                self._missing_nbytes += cut[1]
                self.moved_nbytes -= cut[1]
            return
        while True:
            place = self._place(*cut, refused) if self._whole is None else self._whole
            try:
                piece = self._tier.piece(place, *cut)
                self._checksums[index] = self._tier.mover.store(storage, piece, self.request.after, check=self._check)
                return
            except OSError as error:
                if self._whole is not None:
                    raise
                with self._changing:
                    self.parts.remove(place)
                self._tier.free_parts([place])
                self._tier.gives_up(place.lane, error)
                refused[place.lane] = error
                if len(refused) == self._tier.num_directories:
                    raise

    def _place(self, start: int, nbytes: int, refused: Collection[int]) -> _Part:
        place = self._tier.allocate(start, nbytes, refused)
        with self._changing:
            self.parts.append(place)
        return place

    def end(self, error: BaseException | None = None) -> None:
        """Tell the owner, once, and let go of the memory."""
        if self._is_over:
            return
        self._is_over = True
        try:
            self._tell(self._error or error)
        except BaseException as raised:
            forget_frames(raised)
            self.fault = raised

    def _tell(self, error: BaseException | None) -> None:
        storage, edges, request = self._storage, self._edges, self.request
        self._storage = None
        if error is None:
            error = moved_meanwhile(storage, self._memory, request.label)
        stored = None
        if error is None and storage is not None and edges is not None:
            stored = _SsdBytes(
                self._tier,
                tuple(sorted(self.parts)),
                request.nbytes,
                edges,
                tuple(value for value in self._checksums if value is not None),
                request.label,
                self._missing_nbytes,
            )
        else:
            self._tier.free_parts(self.parts)
            self.parts, self.moved_nbytes, self.failed_nbytes = [], 0, request.nbytes
        del storage
        request.owner.write_ended(stored, error)


class _Write(Transfer):
    """Storages on their way down, in one job: what a worker does once for each job takes as long as a small write."""

    def __init__(self, tier: SsdTier, requests: Sequence[WriteRequest]) -> None:
        super().__init__("write", sum(request.nbytes for request in requests))
        self._tier = tier
        self._outgoing = [_Outgoing(tier, request) for request in requests]
        # Guards the bytes that have moved. A leaf lock.
        self._counting = threading.Lock()

    def begin(self) -> Sequence[Chunk] | None:
        self._wait_for_producers()
        pieces = [(outgoing, index) for outgoing in self._outgoing for index in range(outgoing.num_pieces)]
        sizes = [outgoing.request.nbytes // outgoing.num_pieces for outgoing, _ in pieces]
        return [partial(self._run, pieces[start:stop]) for start, stop in self._tier.join(sizes)]

    def _wait_for_producers(self) -> None:
        """Wait here, so that the rate is the drive's, and a take-back saves the write.

        Of marks of one stream the last one is waited for; each copy waits for its own besides.
        """
        marks = [outgoing.request.after for outgoing in self._outgoing]
        last = {mark.stream: mark for mark in marks if mark is not None}
        if last:
            with self.not_busy():
                for mark in last.values():
                    mark.synchronize()

    def _run(self, pieces: Sequence[tuple[_Outgoing, int]]) -> None:
        for outgoing, index in pieces:
            if outgoing.run(index):
                outgoing.end()
                self._count()

    def _count(self) -> None:
        with self._counting:
            self.nbytes = sum(outgoing.moved_nbytes for outgoing in self._outgoing)
            self.failed_nbytes = sum(outgoing.failed_nbytes for outgoing in self._outgoing)

    def shares(self) -> Sequence[tuple[int | None, int]]:
        if not self.nbytes:
            return []
        return self._tier.shares([part for outgoing in self._outgoing for part in outgoing.parts], self.nbytes)

    def finish(self, error: BaseException | None) -> None:
        for outgoing in self._outgoing:  # those that an unexpected error has left
            outgoing.end(error)
        fault = next((outgoing.fault for outgoing in self._outgoing if outgoing.fault is not None), None)
        self._outgoing.clear()
        if fault is not None:
            raise fault

    def discard(self) -> None:
        self._outgoing.clear()


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
        pieces = self._tier.pieces(stored.parts)
        self.lanes = [lane for lane, _ in pieces]
        expected: Sequence[int | None] = stored.checksums or [None] * len(pieces)
        return [partial(self._bring, storage, piece, value) for (_, piece), value in zip(pieces, expected, strict=True)]

    def shares(self) -> Sequence[tuple[int | None, int]]:
        return self._tier.shares(self._stored.parts, self.nbytes)

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
        # All copies of ours run on one stream, so that the one that was queued last stands for all; the user of the
        # bytes waits for it.
        self._owner.read_ended(None if error else storage, None if error else self._mark, error)

    def discard(self) -> None:
        self._storage = None
        self._owner.read_ended(None, None, OffloaderClosedError("the offloader was closed before this read began"))
