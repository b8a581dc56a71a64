"""A tier: a place with capacity where the bytes of storages wait, and the workers that move them there and back."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

import torch

from lightning_ssd.common.forks import OwnProcess
from lightning_ssd.common.interrupts import deferring_interrupts
from lightning_ssd.common.tensors import new_tuple
from lightning_ssd.storage.extents import Extent
from lightning_ssd.telemetry.events import EventLog
from lightning_ssd.tiers.base import Part, Progress, ReadOwner, ReadRequest, StoredBytes, WriteOwner, WriteRequest
from lightning_ssd.tiers.checksum import Sampler
from lightning_ssd.tiers.copy_paths import Mover, Piece
from lightning_ssd.tiers.jobs import Read, Write
from lightning_ssd.tiers.read_priority import UrgentGate
from lightning_ssd.tiers.streams import StreamEvent
from lightning_ssd.tiers.transfer_queue import TransferQueue

__all__ = ["Tier"]

_MIN_JOINED = 16
"""One part in so many of a chunk, below which pieces are not shared out."""


class Tier:
    """Arenas that bytes lie in, a mover that carries them, and queues of writes and of reads.

    Every method may be called from any thread and under the locks of layers above; none but ``flush`` and ``close``
    waits for bytes to move.

    A read is handed over as soon as its last copy is queued; the user of the memory waits for its mark. Until that has
    passed the tier holds both memories: the place is not lent again even if it is freed meanwhile, and the new storage
    stays allocated even if the tier alone holds it.

    Args:
        mover: how bytes leave and enter tensor memory.
        arenas: where they lie; each has workers of its own.
        events: gets one event per move.
        sampler: which storages get checksums.
        chunk_bytes: largest request. The workers of a direction share a transfer chunk by chunk.
        num_workers: workers per direction and arena.
        gate: urgent reads announce themselves there, and writes give way to them.
    """

    name: ClassVar[str]
    """For events and counters: "ssd" or "host"."""

    def __init__(
        self,
        mover: Mover,
        arenas: Sequence[Any],
        *,
        events: EventLog,
        sampler: Sampler,
        chunk_bytes: int,
        num_workers: int,
        gate: UrgentGate | None = None,
    ) -> None:
        self.mover = mover
        self._arenas = arenas
        self.wants_check = None if sampler.mode == "off" else sampler.wants
        """Says whether the next storage gets checksums; ``None``: none does."""
        self._chunk_bytes = chunk_bytes
        self._num_workers = num_workers * len(arenas)
        self.is_striped = len(arenas) > 1
        """Whether each chunk of a storage goes to the arena whose worker takes it."""
        self.num_retries = 0
        # Guards what is freed while it is read. Taken before an arena's lock, and under the locks of layers above.
        self._lock = threading.Lock()
        self._process = OwnProcess()
        lanes: dict[str, Any] = {"tier": self.name, "num_lanes": len(arenas)}
        with ExitStack() as undo:  # no memory for a thread, or an interrupt from the keyboard
            self._writes = TransferQueue("write", num_workers, events, yields_to=gate, **lanes)
            undo.callback(self._writes.close)
            self._reads = TransferQueue("read", num_workers, events, announces=gate, **lanes)
            undo.pop_all()

    def write(self, owner: WriteOwner, nbytes: int, after: StreamEvent | None, *, label: str) -> bool:
        """Queue a write of ``nbytes`` bytes behind ``after``; return whether there is room: see :meth:`write_all`.

        Raises:
            OffloaderClosedError: after close.
        """
        return self.write_all([WriteRequest(owner, nbytes, after, label)])[0]

    def write_all(self, requests: Sequence[WriteRequest]) -> list[bool]:
        """Queue the writes of several storages as one job. Each ends, and fails, by itself.

        Returns:
            Whether there is room, for each. ``False``: it was not queued and its owner is not called. ``True``: the
            place is taken for good or goes back by itself, when the owner no longer wants the write, it fails or is
            discarded at close. A tier that learns of its room while it writes lets the write fail.

        Raises:
            OffloaderClosedError: after close.
        """
        claimed, job = list[list[Part] | None](), None
        try:
            self.claim_all([request.nbytes for request in requests], claimed)
            going = [(one, parts) for one, parts in zip(requests, claimed, strict=True) if parts is not None]
            if going:
                job = Write(self, going)
                self._writes.submit(job)
        except BaseException:
            if job is None or not job.is_queued:  # else it may be in the queue: what it has claimed stays with it
                for parts in claimed:
                    self.free_parts(parts or ())
            raise
        return [parts is not None for parts in claimed]

    def read(
        self,
        owner: ReadOwner,
        stored: StoredBytes,
        device: torch.device,
        *,
        urgent: bool,
        into: torch.UntypedStorage | None = None,
        after: StreamEvent | None = None,
    ) -> Read:
        """Queue a read; see :meth:`read_all`."""
        return self.read_all([ReadRequest(owner, stored, into, after)], device, urgent=urgent)

    def read_all(self, requests: Sequence[ReadRequest], device: torch.device, *, urgent: bool) -> Read:
        """Queue the reads of several storages as one job. Each is handed over, and fails, by itself, in this order.

        Args:
            requests: what to read, and who wants it.
            device: of the memory to read into.
            urgent: the training thread waits for it.

        Raises:
            OffloaderClosedError: after close.
            MemoryError: no memory (``torch.OutOfMemoryError`` on a device). Nothing was queued. Where a worker finds
                none, the owner is told.
            ValueError: memory that was brought has another size, or the bytes are not all there, or freed.
        """
        # Mapping memory waits for page faults of other threads: a speculative read has time, so a worker does.
        allocates, going = urgent or not self.mover.allocates_anywhere, list[ReadRequest]()
        for request in requests:
            owner, stored, into, _ = request
            if stored.tier is not self:
                self._check_mine(stored)
            if stored.missing_nbytes:
                raise ValueError(f"{stored.label} was not written to its end; it must not be read")
            if into is None and allocates:
                request = ReadRequest(owner, stored, *self.mover.allocate(stored.nbytes, stored.edges, device))
            elif into is not None and into.nbytes() != stored.nbytes:
                raise ValueError(
                    f"{stored.label} has {stored.nbytes:,} bytes, and was to be read into {into.nbytes():,}"
                )
            going.append(request)
        job, places = Read(self, going, device, urgent=urgent), [request.stored for request in going]
        try:
            self.hold(places, job)
            self._reads.submit(job)
        except BaseException:
            self.let_go(places, job)
            raise
        return job

    def promote(self, read: Read) -> None:
        """Serve this read before the speculative ones: the training thread waits for it."""
        self._reads.promote(read)

    def free(self, stored: StoredBytes) -> None:
        """Give the place back. ``stored`` must not be read any more. Harmless after close and in a forked child.

        Raises:
            ValueError: it was freed before.
        """
        if stored.is_freed:
            raise ValueError(f"{stored.label} was freed twice")
        self.free_all([stored])

    def free_all(self, places: Sequence[StoredBytes]) -> None:
        """Give places back, but for those that were freed before: see :meth:`free`."""
        if not self._process.is_here:
            return  # another thread may have held the lock at the fork
        free = list[Part]()
        for stored in places:
            if stored.tier is not self:
                self._check_mine(stored)
        with deferring_interrupts(), self._lock:
            for stored in places:
                if not stored.is_freed:
                    stored.is_freed = True
                    if not stored.readers:
                        free += stored.parts
            self.free_parts(free)

    def progress(self) -> Progress:
        """Bytes and busy seconds of both directions."""
        return Progress(*self._writes.progress(), *self._reads.progress())

    @property
    def cpu_s(self) -> float:
        """CPU time of the workers, in seconds."""
        return self._writes.cpu_s + self._reads.cpu_s

    def flush(self) -> None:
        """Block until every queued write has ended."""
        self._writes.wait_idle()

    def close(self) -> None:
        """End what is under way, drop what has not begun, give everything back. Idempotent.

        Raises:
            BaseException: what a copy failed with after it had been handed over.
        """
        with ExitStack() as stack:  # upwards, whatever one of them raises
            for arena in self._arenas:
                stack.callback(arena.close)
            stack.callback(self._reads.close)
            stack.callback(self._writes.close)

    def _check_mine(self, stored: StoredBytes) -> None:
        if stored.tier is not self:
            raise TypeError(f"{stored.label} was given to a tier that did not store it; hand it to the one that did")

    # -- used by the jobs ------------------------------------------------------------------------------------------

    def claim_all(self, sizes: Sequence[int], claimed: list[list[Part] | None]) -> None:
        """Take room for storages when their write is queued.

        Args:
            sizes: of the storages.
            claimed: gets the room of each at once, so that an interrupt leaves none behind. ``None``: there is none;
                empty: its worker takes it.
        """
        claimed += [[] for _ in sizes]

    def allocate_all(self, sizes: Sequence[int]) -> list[Extent] | None:
        """Return room in the only arena; ``None`` where there is none for all of them together."""
        extents: list[Extent] | None = self._arenas[0].allocate_all(sizes)
        return extents

    def allocate(self, start: int, nbytes: int, refused: Mapping[int, OSError]) -> Part:
        """Return room for part of a storage, for which none was claimed.

        Args:
            start: of the part in the storage.
            nbytes: of the part.
            refused: what lanes have answered that were asked to write it.

        Raises:
            OSError: there is no room.
        """
        raise NotImplementedError(f"the {self.name} tier claims room when a write is queued")

    def gives_up(self, lane: int, error: OSError) -> None:
        """Write to a lane no more while there is another one, because it refuses."""

    def free_parts(self, parts: Iterable[Part]) -> None:
        """Give the room of parts back."""
        by_lane = dict[int, list[Extent]]()
        for _, _, lane, extent in parts:
            by_lane.setdefault(lane, []).append(extent)
        for lane, extents in by_lane.items():
            self._arenas[lane].free(*extents)

    def hold(self, places: Iterable[StoredBytes], reader: object, *, within: object = None) -> None:
        """Note that ``reader`` reads there.

        Args:
            places: that are not lent again meanwhile.
            reader: lets go of them when it has ended.
            within: a reader that holds them already.

        Raises:
            ValueError: one was freed.
        """
        with self._lock:
            for stored in places:
                if stored.is_freed and within not in stored.readers:
                    raise ValueError(f"{stored.label} was freed; its bytes may be gone")
                stored.readers = (*stored.readers, reader)

    def let_go(self, places: Iterable[StoredBytes], reader: object) -> None:
        """Note that ``reader`` reads there no more. Once more: does nothing."""
        with self._lock:
            for stored in places:
                if reader in stored.readers:
                    is_last = len(stored.readers) == 1
                    if stored.is_freed and is_last:
                        self.free_parts(stored.parts)
                    stored.readers = () if is_last else tuple([one for one in stored.readers if one is not reader])

    def shares(self, parts: Sequence[Part], nbytes: int) -> list[tuple[int | None, int]]:
        """Return the numbers of the drives that hold these parts, with their bytes; ``None``: there is but one.

        Args:
            parts: of storages.
            nbytes: that have moved, for a tier of one arena.
        """
        if not self.is_striped or not parts:
            return [(None, nbytes)]
        by_lane: dict[int | None, int] = {}
        for part in parts:
            by_lane[part.lane] = by_lane.get(part.lane, 0) + part.nbytes
        return list(by_lane.items())

    @property
    def uncut_bytes(self) -> int:
        """Bytes up to which a storage is one piece, wherever it lies; 0: that depends on where."""
        return self._chunk_bytes

    def cut(self, start: int, nbytes: int, extent: Extent | None = None) -> list[tuple[int, int]]:
        """Cut bytes from ``start`` of a storage on into chunks: where each begins, and its bytes.

        Args:
            start: of the bytes.
            nbytes: in all.
            extent: that they lie in, if that is known.
        """
        step = self._chunk_bytes
        if 0 < nbytes <= step:
            return [(start, nbytes)]
        return [(start + done, min(step, nbytes - done)) for done in range(0, nbytes, step)]

    def join(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """Return which pieces make a chunk: small ones become one, as long as each worker has enough to do.

        Args:
            sizes: of the pieces.
        """
        # What is little takes one worker less time than to wake another one.
        most_bytes = min(self._chunk_bytes, max(-(-sum(sizes) // self._num_workers), self._chunk_bytes // _MIN_JOINED))
        chunks, start, left_bytes = [], 0, most_bytes
        for index, nbytes in enumerate(sizes):
            if nbytes > left_bytes and index > start:
                chunks.append((start, index))
                start, left_bytes = index, most_bytes
            left_bytes -= nbytes
        return [*chunks, (start, len(sizes))]

    def piece(
        self, storage: torch.UntypedStorage, part: Part, start: int, nbytes: int, after: StreamEvent | None
    ) -> Piece:
        """Return a chunk of a part, with where it lies."""
        offset = part.extent.offset + start - part.start
        piece: Piece = new_tuple(Piece, (storage, start, nbytes, self._arenas[part.lane], offset, after))
        return piece
