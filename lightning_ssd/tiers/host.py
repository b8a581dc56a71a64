"""The host tier: bounded host memory that takes what the drives cannot take in time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from lightning_ssd.common.tensors import Region
from lightning_ssd.errors import OffloaderClosedError, forget_frames
from lightning_ssd.memory.host_budget import HostMemoryBudget
from lightning_ssd.storage.backend import DEFAULT_CHUNK_BYTES, DEFAULT_WORKERS
from lightning_ssd.storage.extents import Extent
from lightning_ssd.telemetry.events import EventLog
from lightning_ssd.tiers.base import Progress, ReadOwner, StoredBytes, WriteOwner, check_size, moved_meanwhile
from lightning_ssd.tiers.copy_paths import host_bytes, storage_bytes
from lightning_ssd.tiers.host_arena import HostArena
from lightning_ssd.tiers.streams import CopyEngine, StreamEvent
from lightning_ssd.tiers.transfer_queue import Chunk, Transfer, TransferQueue

__all__ = ["HostTier"]

_log = logging.getLogger(__name__)

_DEVICE_CHUNK_BYTES = 64 << 20
"""A bus moves so much in about a millisecond, and each copy takes Python a part of that."""


class HostTier:
    """Host memory: locked for a CUDA device and reached by streams of our own, plain where there is none.

    A write reserves its extent when it is submitted, so that the caller knows at once whether there is room. The
    reservation belongs to the write: it ends with it, unless the write succeeds and hands it to the owner. A write that
    its owner took back keeps its extent until a worker gets to it.

    A read is handed over as soon as its last copy is queued; the user of the memory waits for the mark on its stream.
    Until the mark has passed the tier holds both memories: the extent is not lent again even if it is freed
    meanwhile, and the new storage stays allocated even if the tier alone holds it.

    There are no checksums here (``verify``): this is memory, as that of the tensors which are kept.

    Args:
        room: most memory to take, in bytes; or a budget that others take from, too. It is taken as it is needed and
            given back at :meth:`close`.
        copies: between the device and the host.
        pin: lock the memory for CUDA; each part once, when it is first used.
        events: gets one event per move.
        chunk_bytes: largest single copy, so that urgent reads can overtake others there; default: what takes a few
            milliseconds at most.
        num_workers: workers per direction.

    Raises:
        MemoryError: the process may not have that many addresses.
    """

    name = "host"

    def __init__(
        self,
        room: int | HostMemoryBudget,
        copies: CopyEngine,
        *,
        pin: bool,
        events: EventLog,
        chunk_bytes: int | None = None,
        num_workers: int = DEFAULT_WORKERS,
    ) -> None:
        self.copies = copies
        self.chunk_bytes = chunk_bytes or (_DEVICE_CHUNK_BYTES if copies.is_asynchronous else DEFAULT_CHUNK_BYTES)
        self.arena = HostArena(room, pin=pin)
        # Guards what is freed while it is read. Taken before the arena's lock, and under the locks of layers above.
        self._lock = threading.Lock()
        self._late_error: BaseException | None = None
        # Memory that a copy may still use, because waiting for it failed: never used again.
        self._lost: list[object] = []
        self._writes = TransferQueue("write", num_workers, events, tier=self.name)
        self._reads = TransferQueue("read", num_workers, events, tier=self.name)

    @property
    def capacity_bytes(self) -> int:
        """Most memory that it may have. Falls as others take from its budget, and where the system gives no more."""
        return self.arena.capacity_bytes

    @property
    def memory_bytes(self) -> int:
        """Memory that it has taken."""
        return self.arena.size_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes that are stored or reserved."""
        return self.arena.used_bytes

    def write(self, owner: WriteOwner, nbytes: int, after: StreamEvent | None, *, label: str) -> bool:
        extent = self.arena.allocate(nbytes)
        if extent is None:
            return False
        stored = _HostBytes(self, extent, nbytes, label)
        try:
            self._writes.submit(_Write(self, owner, stored, after))
        except BaseException:
            self.free(stored)
            raise
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
        if into is None:
            into, after = self._allocate(mine.nbytes, device)
        elif into.nbytes() != mine.nbytes:
            raise ValueError(f"{mine.label} has {mine.nbytes:,} bytes, and was to be read into {into.nbytes():,}")
        with self._lock:
            if mine.freed:
                raise ValueError(f"{mine.label} was freed; its bytes may be gone")
            mine.num_reads += 1
        try:
            transfer = _Read(self, owner, mine, into, after, urgent=urgent)
            self._reads.submit(transfer)
        except BaseException:
            self.read_over(mine)
            raise
        return transfer

    def _allocate(self, nbytes: int, device: torch.device) -> tuple[torch.UntypedStorage, StreamEvent]:
        return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage(), self.copies.mark()

    def promote(self, read: Transfer) -> None:
        self._reads.promote(read)

    def free(self, stored: StoredBytes) -> None:
        mine = self._mine(stored)
        if self.arena.is_foreign:
            return
        with self._lock:
            if mine.freed:
                raise ValueError(f"{mine.label} was freed twice")
            mine.freed = True
            if mine.num_reads == 0:
                self.arena.free(mine.extent)

    def progress(self) -> Progress:
        return Progress(*self._writes.progress(), *self._reads.progress())

    def flush(self) -> None:
        self._writes.wait_idle()

    def close(self) -> None:
        """See :class:`Tier`.

        Raises:
            BaseException: what a copy failed with after it had been handed over, when its owner had ended.
        """
        with ExitStack() as stack:  # upwards, whatever one of them raises
            stack.callback(self.arena.close)
            stack.callback(self._reads.close)
            stack.callback(self._writes.close)
        error, self._late_error = self._late_error, None
        if error is not None:
            raise error

    def _mine(self, stored: StoredBytes) -> _HostBytes:
        if not isinstance(stored, _HostBytes) or stored.tier is not self:
            raise TypeError(f"{stored!r} was given to a tier that did not store it; hand it to the one that did")
        return stored

    # -- used by the two transfers below -------------------------------------------------------------------------

    def read_over(self, stored: _HostBytes) -> None:
        """Nothing reads the extent for this transfer any more."""
        with self._lock:
            stored.num_reads -= 1
            if stored.freed and stored.num_reads == 0:
                self.arena.free(stored.extent)

    def lose(self, *memories: object) -> None:
        """Hold these for good: a copy may still use them."""
        self._lost.extend(memories)

    def note_late(self, error: BaseException, label: str) -> None:
        """A copy has failed that was handed over; the device is likely to be lost for every user of it."""
        forget_frames(error)
        self._late_error = self._late_error or error
        _log.error("copying %s from host memory failed after it was handed over: %s", label, str(error))


class _HostBytes:
    """One storage in host memory. The tier's lock guards the last two."""

    __slots__ = ("extent", "freed", "label", "nbytes", "num_reads", "tier")

    def __init__(self, tier: HostTier, extent: Extent, nbytes: int, label: str) -> None:
        self.tier = tier
        self.extent = extent
        self.nbytes = nbytes
        self.label = label
        self.num_reads = 0
        self.freed = False

    @property
    def body_nbytes(self) -> int:
        return self.nbytes

    @property
    def is_complete(self) -> bool:
        return True


class _Write(Transfer):
    """One storage on its way down."""

    def __init__(self, tier: HostTier, owner: WriteOwner, stored: _HostBytes, after: StreamEvent | None) -> None:
        super().__init__("write", stored.nbytes)
        self._tier = tier
        self._owner = owner
        self._stored = stored
        self._after = after
        self._lost = False
        self._storage: torch.UntypedStorage | None = None
        self._memory: Region | None = None

    def begin(self) -> Sequence[Chunk] | None:
        stored, arena = self._stored, self._tier.arena
        if self._after is not None:
            with self.not_busy():
                self._after.synchronize()  # here, so that the rate is that of copies, and a take-back saves the write
        storage = self._owner.write_begins()
        if storage is None:
            self._tier.free(stored)
            return None
        self._memory = check_size(storage, stored.nbytes, stored.label)
        self._storage = storage
        arena.prepare(stored.extent, storage.device)
        pieces = arena.pieces(stored.extent, stored.nbytes, self._tier.chunk_bytes)
        return [self._chunk(storage, *piece) for piece in pieces]

    def _chunk(self, storage: torch.UntypedStorage, start: int, address: int, nbytes: int) -> Chunk:
        def run() -> None:
            copies = self._tier.copies
            after = self._after or copies.mark()
            mark = copies.copy_out(host_bytes(address, nbytes), storage_bytes(storage, start, nbytes), after)
            try:
                mark.synchronize()  # the owner lets go of the tensor when we say that it is stored
            except BaseException:
                self._lost = True
                self._tier.lose(storage)
                raise

        return run

    def finish(self, error: BaseException | None) -> None:
        storage, self._storage, self._after = self._storage, None, None
        if error is None:
            error = moved_meanwhile(storage, self._memory, self._stored.label)
        del storage
        if error is None:
            self._owner.write_ended(self._stored, None)
            return
        if not self._lost:
            self._tier.free(self._stored)
        self._owner.write_ended(None, error)

    def discard(self) -> None:
        self._tier.free(self._stored)


class _Read(Transfer):
    """One storage on its way up."""

    def __init__(
        self,
        tier: HostTier,
        owner: ReadOwner,
        stored: _HostBytes,
        storage: torch.UntypedStorage,
        after: StreamEvent | None,
        *,
        urgent: bool,
    ) -> None:
        super().__init__("read", stored.nbytes, urgent=urgent)
        self.outlasts = tier.copies.is_asynchronous
        self._tier = tier
        self._owner = owner
        self._stored = stored
        self._storage: torch.UntypedStorage | None = storage
        self._after = after
        # Guards the two below and the order of the copies, so that the mark is that of the last one. A leaf lock:
        # under it only a copy is queued.
        self._order = threading.Lock()
        self._num_left = 0
        self._last: tuple[StreamEvent, StreamEvent] | None = None
        self._lost = False

    def begin(self) -> Sequence[Chunk] | None:
        stored, storage, arena = self._stored, self._storage, self._tier.arena
        if storage is None:
            return None
        pieces = list(arena.pieces(stored.extent, stored.nbytes, self._tier.chunk_bytes))
        self._num_left = len(pieces)
        return [self._chunk(storage, *piece) for piece in pieces]

    def _chunk(self, storage: torch.UntypedStorage, start: int, address: int, nbytes: int) -> Chunk:
        def run() -> None:
            copies = self._tier.copies
            after = self._after or copies.mark()
            target, source = storage_bytes(storage, start, nbytes), host_bytes(address, nbytes)
            if not self.outlasts:
                copies.copy_in(target, source, after)
                return
            with self._order:
                mark = copies.copy_in(target, source, after)
                self._num_left -= 1
                if self._num_left == 0:
                    # All copies of ours are queued on one stream, and this is the last: it stands for all, and
                    # the user of the bytes waits for it.
                    self._last = after, mark
                    return
            try:
                self._await(after, mark)  # one copy at a time, so that an urgent read can get between two
            except BaseException:
                self._lost = True
                raise

        return run

    def _await(self, after: StreamEvent, mark: StreamEvent) -> None:
        """Block until a copy has passed; before that, until the stream has got to where it may begin."""
        with self.not_busy():
            after.synchronize()
        mark.synchronize()

    def finish(self, error: BaseException | None) -> None:
        if error is None:
            self._owner.read_ended(self._storage, None if self._last is None else self._last[1], None)
        else:
            self._owner.read_ended(None, None, error)
        if not self.outlasts:
            self._release()

    def settle(self) -> BaseException | None:
        error = None
        try:
            if self._last is not None:
                self._await(*self._last)
        except BaseException as caught:  # told at close: the owner was told that all is well
            error, self._lost = caught, True
            self._tier.note_late(caught, self._stored.label)
        self._release()
        return error

    def discard(self) -> None:
        self._release()
        self._owner.read_ended(None, None, OffloaderClosedError("the offloader was closed before this read began"))

    def _release(self) -> None:
        """Let go of both memories, or, if a copy may still use them, of neither."""
        storage, self._storage = self._storage, None
        if self._lost:
            self._tier.lose(storage)
        else:
            self._tier.read_over(self._stored)
