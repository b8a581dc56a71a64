"""Jobs of a tier: storages on their way to it, and back.

A read checks what comes back (``verify``), tries a failed or wrong chunk once more, and never hands on other bytes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from lightning_ssd.common.profiling import span
from lightning_ssd.common.waiting import Latch
from lightning_ssd.errors import CorruptionError, OffloaderClosedError, StorageError, forget_frames
from lightning_ssd.memory.readings import is_out_of_memory
from lightning_ssd.tiers.base import NoMemoryToReadError, Part, ReadOwner, ReadRequest, StoredBytes, WriteRequest
from lightning_ssd.tiers.copy_paths import HERE, Edges, Loaded, Piece
from lightning_ssd.tiers.streams import PASSED, StreamEvent
from lightning_ssd.tiers.transfer_queue import Chunk, Settle, Transfer

if TYPE_CHECKING:
    from lightning_ssd.tiers.tier import Tier

__all__ = ["Read", "Write"]

_log = logging.getLogger(__name__)


class _Outgoing:
    """One storage on its way to a tier.

    It begins when a worker gets to it: until then its owner may take it back, and nothing holds its memory.

    Args:
        tier: gets it.
        request: the storage, and who owns it.
        parts: the room that it has already.
        changing: guards the numbers and the parts. A leaf lock.
    """

    def __init__(self, tier: Tier, request: WriteRequest, parts: list[Part], changing: threading.Lock) -> None:
        self.request = request
        self.parts = parts
        self.moved_nbytes = 0
        """Bytes that go to the tier, without the pieces that were no longer wanted."""
        self.failed_nbytes = 0
        self.fault: BaseException | None = None
        """Error of telling the owner of the end, which its contract forbids."""
        self._whole = parts[0] if parts else None
        extent = None if self._whole is None else self._whole.extent
        self.num_pieces = self.num_left = max(len(tier.cut(0, request.nbytes, extent)), 1)
        """The most that it is cut into, and those of them that have not ended."""
        self._tier = tier
        self._storage: torch.UntypedStorage | None = None
        self._edges: Edges | None = None
        self._cuts: list[tuple[int, int]] = []
        self._checksums: list[int | None] = []
        self._check = False
        self._memory = 0, 0
        self._missing_nbytes = 0  # of the pieces that were no longer wanted
        self._error: BaseException | None = None
        self._is_begun = self._is_over = False
        # Order: before the accounting lock, which the owner takes. One piece is for one worker.
        self._beginning = threading.Lock() if self.num_pieces > 1 else None
        self._changing = changing

    def run(self, index: int) -> None:
        """Write one piece."""
        try:
            if self._beginning is None:
                self._begin()
            else:
                with self._beginning:
                    if not self._is_begun:
                        self._is_begun = True
                        self._begin()
            if self._error is None and index < len(self._cuts):
                self._store(index)
        except BaseException as error:
            forget_frames(error)
            self._error = self._error or error

    def _begin(self) -> None:
        request, tier = self.request, self._tier
        storage = self._storage = request.owner.write_begins()
        if storage is None:
            self._is_over = True
            self.give_back()
            return
        if storage.nbytes() != request.nbytes:
            raise StorageError(
                f"{request.label} has {storage.nbytes():,} bytes, and had {request.nbytes:,} when its write was "
                "queued; saved storages must not be resized"
            )
        self._memory = storage.data_ptr(), request.nbytes
        edges = self._edges = tier.mover.edges(storage)
        head, body = len(edges.head), request.nbytes - len(edges.head) - len(edges.tail)
        if self._whole is None and not tier.is_striped:
            self._whole = tier.allocate(head, body, {})
            self.parts.append(self._whole)
        self._cuts = tier.cut(head, body, None if self._whole is None else self._whole.extent)
        self._checksums = [None] * len(self._cuts)
        self._check = tier.wants_check()
        self.moved_nbytes = body

    def _store(self, index: int) -> None:
        storage, (start, nbytes), refused = self._storage, self._cuts[index], dict[int, OSError]()
        if storage is None or not self.request.owner.is_wanted():
            with self._changing:  # it was taken back, and would hold its memory as long as it is written
                self._missing_nbytes += nbytes
                self.moved_nbytes -= nbytes
            return
        while True:
            part = self._whole
            if part is None:
                part = self._tier.allocate(start, nbytes, refused)
                self.parts.append(part)
            try:
                piece = self._tier.piece(storage, part, start, nbytes, self.request.after)
                self._checksums[index] = self._tier.mover.store(piece, check=self._check)
                return
            except OSError as error:
                if part is self._whole:
                    raise
                with self._changing:
                    self.parts.remove(part)
                self._tier.free_parts([part])
                self._tier.gives_up(part.lane, error)
                refused[part.lane] = error

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
        storage, edges, request, stored = self._storage, self._edges, self.request, None
        self._storage = None
        if error is None and storage is not None and (storage.data_ptr(), storage.nbytes()) != self._memory:
            # ``untyped_storage().resize_()`` and ``share_memory_()`` give a storage other memory and free what it had,
            # with no sign in its version. What was written may be anything then; what it has now is its owner's.
            error = StorageError(
                f"{request.label} was given other memory while it was written (resize_ or share_memory_); it stays in "
                "memory"
            )
        if error is None and storage is not None and edges is not None:
            checksums = [value for value in self._checksums if value is not None] if self._check else ()
            parts = tuple(sorted(self.parts))
            stored = StoredBytes(
                self._tier, parts, request.nbytes, edges, tuple(checksums), request.label, self._missing_nbytes
            )
        else:
            self.moved_nbytes, self.failed_nbytes = 0, request.nbytes
            if not any(lost is storage for lost in self._tier.mover.lost):  # else a copy may still write there
                self.give_back()
        del storage
        request.owner.write_ended(stored, error)

    def give_back(self) -> None:
        """Give the room back."""
        parts, self.parts = self.parts, []
        self._tier.free_parts(parts)


class Write(Transfer):
    """Storages on their way to a tier, in one job: what a worker does once for each takes as long as a small write."""

    def __init__(self, tier: Tier) -> None:
        super().__init__("write", 0)
        self._tier = tier
        self._requests: list[tuple[WriteRequest, list[Part]]] = []  # until it begins
        self._outgoing: list[_Outgoing] = []
        # Guards the numbers of this and of what it moves. A leaf lock.
        self._changing = threading.Lock()

    def add(self, request: WriteRequest, parts: list[Part]) -> None:
        """Add a storage, before the job is queued, with the room that it has already."""
        self._requests.append((request, parts))
        self.nbytes += request.nbytes

    def begin(self) -> Sequence[Chunk] | None:
        self._outgoing = [_Outgoing(self._tier, *request, self._changing) for request in self._requests]
        self._requests.clear()
        self._wait_for_producers()
        pieces, sizes = list[tuple[_Outgoing, int]](), list[int]()
        for outgoing in self._outgoing:
            number = outgoing.num_pieces
            pieces += zip([outgoing] * number, range(number), strict=True)
            sizes += [outgoing.request.nbytes // number] * number
        return [partial(self._run, pieces[start:stop]) for start, stop in self._tier.join(sizes)]

    def _wait_for_producers(self) -> None:
        """Wait here, so that the rate is the tier's, and a take-back saves the write.

        Of marks of one stream the last one is waited for; each copy waits for its own besides.
        """
        marks = [outgoing.request.after for outgoing in self._outgoing]
        last = {mark.stream: mark for mark in marks if mark is not None and mark is not PASSED}
        if last:
            with self.not_busy():
                for mark in last.values():
                    mark.synchronize()

    def _run(self, pieces: Sequence[tuple[_Outgoing, int]]) -> None:
        for outgoing, index in pieces:
            outgoing.run(index)
            with self._changing:
                outgoing.num_left -= 1
                is_last = not outgoing.num_left
            if is_last:
                outgoing.end()
                with self._changing:
                    self.nbytes += outgoing.moved_nbytes - outgoing.request.nbytes
                    self.failed_nbytes += outgoing.failed_nbytes

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
        for _, parts in self._requests:
            self._tier.free_parts(parts)
        self._requests.clear()


class _Incoming:
    """One storage on its way back from a tier.

    Args:
        request: what is read, and who wants it.
    """

    def __init__(self, request: ReadRequest) -> None:
        self.owner, self.stored, self.storage, self.after = request
        self.mark: StreamEvent | None = None
        """Mark of the copy that was queued last."""
        self.error: BaseException | None = None
        self.fault: BaseException | None = None
        """Error of telling the owner of the end, which its contract forbids, or of a copy after that."""
        self.num_left = self.num_to_queue = 0
        """Pieces that have not ended, and copies that are not queued."""
        self.is_over = False
        self.told: Latch | None = None
        """For who waits until it is over."""


_Cut = tuple[_Incoming, Part, tuple[int, int], int | None]
"""A piece of a storage: its place, its begin and length in the storage, and its checksum."""


class Read(Transfer):
    """Storages on their way back from a tier, in one job. Each is handed over, and fails, by itself."""

    def __init__(self, tier: Tier, requests: Sequence[ReadRequest], device: torch.device, *, urgent: bool) -> None:
        super().__init__("read", sum([request.stored.body_nbytes for request in requests]), urgent=urgent)
        self.outlasts = tier.mover.outlasts
        self.label = requests[0].stored.label
        self._tier = tier
        self._device = device
        self._incoming = [_Incoming(request) for request in requests]
        self._num_untold = len(requests)
        # Guards marks, numbers, errors, and the order of the copies. A leaf lock: under it one copy is queued.
        self._order = threading.Lock()

    def wait_for(self, owner: ReadOwner) -> None:
        """Block until one owner was told. Raises as :meth:`wait`."""
        with self._order:
            incoming = next((one for one in self._incoming if one.owner is owner), None)
            told = None
            if incoming is not None and not incoming.is_over:
                told = incoming.told = incoming.told or Latch()
        if told is not None:
            with span("lightning_ssd::stall"):
                told.wait()
        if incoming is None or incoming.fault is not None:
            self.wait()

    def begin(self) -> Sequence[Chunk] | None:
        by_lane: dict[int, list[_Cut]] = {}
        for incoming in self._incoming:
            stored = incoming.stored
            try:
                self._take_memory(incoming)
            except BaseException as error:
                self._fail(incoming, error)
                continue
            cuts = [
                (part, cut) for part in stored.parts for cut in self._tier.cut(part.start, part.nbytes, part.extent)
            ]
            incoming.num_left = incoming.num_to_queue = len(cuts)
            expected: Sequence[int | None] = stored.checksums or [None] * len(cuts)
            for (part, cut), value in zip(cuts, expected, strict=True):
                by_lane.setdefault(part.lane, []).append((incoming, part, cut, value))
        chunks, lanes = list[Chunk](), list[int]()
        for lane, pieces in by_lane.items():
            joined = self._tier.join([cut[1] for _, _, cut, _ in pieces])
            chunks += [partial(self._run, pieces[first:last]) for first, last in joined]
            lanes += [lane] * len(joined)
        self.lanes = lanes
        return chunks

    def _take_memory(self, incoming: _Incoming) -> None:
        stored = incoming.stored
        if incoming.storage is None:
            try:
                incoming.storage, incoming.after = self._tier.mover.allocate(stored.nbytes, stored.edges, self._device)
            except (RuntimeError, MemoryError, OSError) as error:
                if is_out_of_memory(error):
                    raise NoMemoryToReadError(str(error)) from None
                raise
        stored.edges.put_into(incoming.storage)

    def shares(self) -> Sequence[tuple[int | None, int]]:
        if not self.nbytes:
            return []
        return self._tier.shares([p for one in self._incoming if not one.error for p in one.stored.parts], self.nbytes)

    def _run(self, pieces: Sequence[_Cut]) -> Settle | None:
        """Read pieces one after the other, and queue their copies; return what waits for the last one."""
        settle: Settle | None = None
        for incoming, part, cut, expected in pieces:
            if settle is not None:  # a worker holds one staging buffer at a time
                settle()
                settle = None
            if incoming.error is None:
                try:
                    settle = self._bring(incoming, part, cut, expected)
                except BaseException as error:
                    self._fail(incoming, error)
            with self._order:
                incoming.num_left -= 1
                is_whole = not incoming.num_left
                self._num_untold -= is_whole
                is_last = not self._num_untold
            if is_whole and not is_last:
                self._tell(incoming)
        return settle

    def _bring(self, incoming: _Incoming, part: Part, cut: tuple[int, int], expected: int | None) -> Settle | None:
        """Read one piece and queue its copy; return what waits for the copy."""
        storage = incoming.storage
        if storage is None:
            raise RuntimeError(f"{incoming.stored.label} is read, and has no memory to go to; report it")
        piece = self._tier.piece(storage, part, *cut, incoming.after)
        loaded = self._load(incoming.stored, piece, expected)
        if loaded is HERE:
            return None
        with self._order:
            try:
                mark = loaded.bring_in()
            except BaseException:
                loaded.release()
                raise
            incoming.mark = mark
            incoming.num_to_queue -= 1
            is_last = not incoming.num_to_queue
        incoming.stored.readers.add(loaded)  # the read itself is one until it ends: it is not freed in between
        settle = partial(self._settle, incoming, piece, loaded, mark)
        if is_last or not self.outlasts:
            return settle
        # It is handed over once the last copy is queued: what fails before that fails the read.
        error = settle()
        if error is not None:
            raise error
        return None

    def _settle(self, incoming: _Incoming, piece: Piece, loaded: Loaded, mark: StreamEvent) -> BaseException | None:
        """Hold both memories until the copy has passed; they may have been handed over and dropped long before."""
        try:
            self._await(piece.after)
            mark.synchronize()
        except BaseException as error:
            self._tier.mover.lost.extend((piece, loaded))
            self._fail(incoming, error)
            return error
        loaded.release()
        self._tier.let_go(incoming.stored, loaded)
        return None

    def _load(self, stored: StoredBytes, piece: Piece, expected: int | None) -> Loaded:
        """Read one piece; once more when that failed or the bytes are wrong."""
        mover = self._tier.mover
        if mover.uses_no_stream:  # kernels queued earlier may still use this memory under its former owner
            self._await(piece.after)
        try:
            loaded = mover.load(piece, expected)
            if loaded is not None:
                return loaded
        except OSError as error:
            # As text: a log handler may keep its records, and the traceback holds the memory that we read into.
            _log.warning("reading %s again after: %s", stored.label, str(error))
        self._tier.num_retries += 1
        loaded = mover.load(piece, expected)
        if loaded is None:
            raise CorruptionError(
                f"{stored.label}: {piece.nbytes} bytes at offset {piece.offset} of the spill file in "
                f"{piece.arena.path} are not what was written, in two reads; nothing was handed on. "
                "Check the drive (SMART, dmesg) or take another directory in HardwareProfile.paths"
            )
        return loaded

    def _await(self, mark: StreamEvent | None) -> None:
        if mark is not None:
            # What the device still computes before it may take the bytes says nothing of the tier.
            with self.not_busy(has_begun=not self.outlasts):
                mark.synchronize()

    def _fail(self, incoming: _Incoming, error: BaseException) -> None:
        """Note the first error of a storage. Its other pieces are left alone then; its owner is told, or has been."""
        forget_frames(error)
        with self._order:
            if incoming.is_over:
                incoming.fault = incoming.fault or error
            elif incoming.error is None:
                incoming.error = error
                self.nbytes -= incoming.stored.body_nbytes
                self.failed_nbytes += incoming.stored.body_nbytes

    def _tell(self, incoming: _Incoming, closed: BaseException | None = None) -> None:
        """Tell the owner, once, and let go of the memory."""
        storage, error = incoming.storage, incoming.error or closed
        incoming.storage = None
        self._tier.let_go(incoming.stored, self)  # copies under way hold the place yet
        try:
            # All copies of ours run on one stream, so that the one that was queued last stands for all; the user of
            # the bytes waits for it.
            incoming.owner.read_ended(None if error else storage, None if error else incoming.mark, error)
        except BaseException as raised:
            forget_frames(raised)
            incoming.fault = raised
        with self._order:
            incoming.is_over = True
        if incoming.told is not None:
            incoming.told.open()

    def finish(self, error: BaseException | None) -> None:
        for incoming in self._incoming:
            if not incoming.is_over:
                self._tell(incoming, error)
        fault = next((incoming.fault for incoming in self._incoming if incoming.fault is not None), None)
        if fault is not None:
            raise fault

    def discard(self) -> None:
        self.finish(OffloaderClosedError("the offloader was closed before this read began"))
