"""Jobs of a tier: storages on their way to it, and back.

A read checks what comes back (``verify``), tries a failed or wrong chunk once more, and never hands on other bytes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from lightning_ssd.common.profiling import span
from lightning_ssd.common.tensors import new_tuple
from lightning_ssd.common.waiting import Latch
from lightning_ssd.errors import CorruptionError, StorageError, forget_frames
from lightning_ssd.memory.readings import is_out_of_memory
from lightning_ssd.tiers.base import (
    NoMemoryToReadError,
    Part,
    ReadEnd,
    ReadOwner,
    ReadRequest,
    StoredBytes,
    WriteEnd,
    WriteRequest,
)
from lightning_ssd.tiers.copy_paths import HERE, NO_EDGES, Edges, Loaded, Piece
from lightning_ssd.tiers.streams import PASSED, StreamEvent
from lightning_ssd.tiers.transfer_queue import Chunk, Settle, Transfer

if TYPE_CHECKING:
    from lightning_ssd.tiers.tier import Tier

__all__ = ["Read", "Write"]

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Outgoing:
    """One storage on its way to a tier.

    It begins when a worker gets to it: until then its owner may take it back, and nothing holds its memory.
    """

    request: WriteRequest
    parts: list[Part]  # the room that it has
    whole: Part | None  # the room for all of it, if that is in one place
    num_left: int  # pieces that have not ended
    storage: torch.UntypedStorage | None = None  # the memory, while it is written
    address: int = 0
    edges: Edges = NO_EDGES
    body_nbytes: int = 0  # bytes between the edges
    cuts: Sequence[tuple[int, int]] = ()
    checksums: list[int | None] | None = None  # one for each piece; ``None``: it has none
    missing_nbytes: int = 0  # bytes of the pieces that were no longer wanted
    error: BaseException | None = None
    is_begun: bool = False
    is_over: bool = False


class Write(Transfer):
    """Storages on their way to a tier, in one job: what a worker does once for each takes as long as a small write.

    So the storages of one chunk begin together, and their owners are told of the ends together.

    Args:
        tier: gets them.
        requests: what to write, each with the room that it has already.
    """

    def __init__(self, tier: Tier, requests: Sequence[tuple[WriteRequest, list[Part]]]) -> None:
        super().__init__("write", sum([request.nbytes for request, _ in requests]))
        self._tier = tier
        self._requests = requests  # until it begins
        self._outgoing: list[_Outgoing] = []
        self._failure: BaseException | None = None  # of telling owners, which their contract forbids
        # Order: before the accounting lock, which owners take. A storage begins once.
        self._beginning = threading.Lock()
        # Guards the numbers and the parts. A leaf lock.
        self._changing = threading.Lock()

    def begin(self) -> Sequence[Chunk]:
        tier, uncut, pieces, sizes = self._tier, self._tier.uncut_bytes, list[tuple[_Outgoing, int]](), list[int]()
        for request, parts in self._requests:
            whole, number = parts[0] if parts else None, 1
            if request.nbytes > uncut:
                number = max(len(tier.cut(0, request.nbytes, None if whole is None else whole.extent)), 1)
            outgoing = _Outgoing(request, parts, whole, number)
            self._outgoing.append(outgoing)
            pieces += zip((outgoing,) * number, range(number), strict=True)
            sizes += (request.nbytes // number,) * number
        self._requests = ()
        self._wait_for_producers()
        return [partial(self._run, pieces[start:stop]) for start, stop in tier.join(sizes)]

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
        """Write pieces one after the other."""
        with self._beginning:
            new = list({id(one): one for one, _ in pieces if not one.is_begun}.values())
            if new:
                self._begin(new)
        for one, index in pieces:
            if one.error is None and index < len(one.cuts):
                try:
                    self._store(one, index)
                except BaseException as error:
                    forget_frames(error)
                    one.error = error
        ended = []
        with self._changing:
            for one, _ in pieces:
                one.num_left -= 1
                if not one.num_left:
                    ended.append(one)
        self._end(ended)

    def _begin(self, group: Sequence[_Outgoing]) -> None:
        """Ask the owners for the storages, and find room for them."""
        tier, uncut, rooms = self._tier, self._tier.uncut_bytes, list[_Outgoing]()
        for one in group:
            one.is_begun = True
        try:
            owners = [one.request.owner for one in group]
            storages = type(owners[0]).all_begin(owners)
        except BaseException as error:
            forget_frames(error)
            for one in group:
                one.error = error
            return
        for one, storage in zip(group, storages, strict=True):
            one.storage, request = storage, one.request
            if storage is None:
                one.is_over = True
                tier.free_parts(one.parts)
                one.parts = []
                continue
            try:
                if storage.nbytes() != request.nbytes:
                    raise StorageError(
                        f"{request.label} has {storage.nbytes():,} bytes, and had {request.nbytes:,} when its write "
                        "was queued; saved storages must not be resized"
                    )
                one.address = storage.data_ptr()
                one.edges = edges = tier.mover.edges(storage)
                one.body_nbytes = request.nbytes - len(edges.head) - len(edges.tail)
            except BaseException as error:
                forget_frames(error)
                one.error = error
                continue
            if one.whole is None and not tier.is_striped:
                rooms.append(one)
        self._find_room(rooms)
        for one in group:
            if one.storage is not None and one.error is None:
                head, body, whole = len(one.edges.head), one.body_nbytes, one.whole
                if 0 < body <= uncut:
                    one.cuts = ((head, body),)
                else:
                    one.cuts = tier.cut(head, body, None if whole is None else whole.extent)
                one.checksums = [None] * len(one.cuts) if tier.wants_check and tier.wants_check() else None

    def _find_room(self, group: Sequence[_Outgoing]) -> None:
        """Take room for storages together; where the file has none for all of them yet, for each by itself."""
        extents = self._tier.allocate_all([one.body_nbytes for one in group]) if group else []
        if extents is None:
            for one in group:
                try:
                    one.whole = self._tier.allocate(len(one.edges.head), one.body_nbytes, {})
                    one.parts.append(one.whole)
                except BaseException as error:
                    forget_frames(error)
                    one.error = error
            return
        for one, extent in zip(group, extents, strict=True):
            one.whole = new_tuple(Part, (len(one.edges.head), one.body_nbytes, 0, extent))
            one.parts.append(one.whole)

    def _store(self, one: _Outgoing, index: int) -> None:
        storage, (start, nbytes), refused = one.storage, one.cuts[index], dict[int, OSError]()
        if storage is None or not one.request.owner.is_wanted():
            with self._changing:  # it was taken back, and would hold its memory as long as it is written
                one.missing_nbytes += nbytes
            return
        while True:
            part = one.whole
            if part is None:
                part = self._tier.allocate(start, nbytes, refused)
                one.parts.append(part)
            try:
                piece = self._tier.piece(storage, part, start, nbytes, one.request.after)
                checked = self._tier.mover.store(piece, check=one.checksums is not None)
                if one.checksums is not None:
                    one.checksums[index] = checked
                return
            except OSError as error:
                if part is one.whole:
                    raise
                with self._changing:
                    one.parts.remove(part)
                self._tier.free_parts([part])
                self._tier.gives_up(part.lane, error)
                forget_frames(error)  # they hold what is to be written
                refused[part.lane] = error

    def _end(self, group: Sequence[_Outgoing], closed: BaseException | None = None) -> None:
        """Tell owners how their writes have ended, once, and let go of the memory."""
        ends, moved_nbytes, failed_nbytes = list[WriteEnd](), 0, 0
        for one in group:
            if one.is_over:  # it was no longer wanted when it would have begun
                continue
            one.is_over = True
            error = one.error or closed
            storage, one.storage, request, stored = one.storage, None, one.request, None
            if error is None and storage is not None:
                if (storage.data_ptr(), storage.nbytes()) != (one.address, request.nbytes):
                    # ``untyped_storage().resize_()`` and ``share_memory_()`` give a storage other memory and free what
                    # it had, with no sign in its version. What was written may be anything then; what it has now is
                    # its owner's.
                    error = StorageError(
                        f"{request.label} was given other memory while it was written (resize_ or share_memory_); it "
                        "stays in memory"
                    )
                else:
                    checksums = () if one.checksums is None else tuple([v for v in one.checksums if v is not None])
                    places = tuple(sorted(one.parts)) if len(one.parts) > 1 else tuple(one.parts)
                    body, missing = one.body_nbytes - one.missing_nbytes, one.missing_nbytes
                    moved_nbytes += body
                    stored = StoredBytes(
                        self._tier, places, request.nbytes, one.edges, checksums, request.label, body, missing
                    )
            if stored is None:
                failed_nbytes += request.nbytes
                parts, one.parts = one.parts, []
                if not any(lost is storage for lost in self._tier.mover.lost):  # else a copy may still write there
                    self._tier.free_parts(parts)
            ends.append((request.owner, stored, error))
            del storage
        if ends:
            try:
                type(ends[0][0]).all_written(ends)
            except BaseException as raised:
                forget_frames(raised)
                self._failure = self._failure or raised
        with self._changing:
            self.nbytes += moved_nbytes - sum([one.request.nbytes for one in group])
            self.failed_nbytes += failed_nbytes

    def shares(self) -> Sequence[tuple[int | None, int]]:
        if not self.nbytes:
            return []
        return self._tier.shares([part for one in self._outgoing for part in one.parts], self.nbytes)

    def finish(self, error: BaseException | None) -> None:
        for _, parts in self._requests[len(self._outgoing) :]:  # the queue was closed before it began
            self._tier.free_parts(parts)
        self._requests = ()
        left = [one for one in self._outgoing if not one.is_over]  # those that an unexpected error has left
        if left:
            self._end(left, error)
        self._outgoing.clear()
        if self._failure is not None:
            raise self._failure


@dataclass(eq=False, slots=True)
class _Incoming:
    """One storage on its way back from a tier."""

    owner: ReadOwner
    stored: StoredBytes
    storage: torch.UntypedStorage | None
    after: StreamEvent | None
    mark: StreamEvent | None = None  # mark of the copy that was queued last
    error: BaseException | None = None
    fault: BaseException | None = None
    """Error of telling the owner of the end, which its contract forbids, or of a copy after that."""
    num_left: int = 0  # pieces that have not ended
    num_to_queue: int = 0  # copies that are not queued
    is_over: bool = False
    told: Latch | None = None  # for who waits until it is over


_Cut = tuple[_Incoming, Part, tuple[int, int], int | None]
"""A piece of a storage: its place, its begin and length in the storage, and its checksum."""


class Read(Transfer):
    """Storages on their way back from a tier, in one job. Each fails by itself.

    Owners are told together: when a chunk ends, or sooner where a thread waits for one of them.
    """

    def __init__(self, tier: Tier, requests: Sequence[ReadRequest], device: torch.device, *, urgent: bool) -> None:
        super().__init__("read", sum([request.stored.body_nbytes for request in requests]), urgent=urgent)
        self.outlasts = tier.mover.outlasts
        self.label = requests[0].stored.label
        self._tier = tier
        self._device = device
        self._incoming = [_Incoming(*request) for request in requests]
        self._num_untold = len(requests)
        self._is_awaited = False
        # Guards marks, numbers, errors, and the order of the copies. A leaf lock: under it one copy is queued.
        self._order = threading.Lock()

    def wait_for(self, owner: ReadOwner) -> None:
        """Block until one owner was told. Raises as :meth:`wait`."""
        with self._order:
            incoming = next((one for one in self._incoming if one.owner is owner), None)
            told = None
            if incoming is not None and not incoming.is_over:
                told = incoming.told = incoming.told or Latch()
                self._is_awaited = True
        if told is not None:
            with span("lightning_ssd::stall"):
                told.wait()
        if incoming is None or incoming.fault is not None:
            self.wait()

    def begin(self) -> Sequence[Chunk]:
        by_lane, tier, uncut = dict[int, list[_Cut]](), self._tier, self._tier.uncut_bytes
        for incoming in self._incoming:
            stored = incoming.stored
            try:
                self._take_memory(incoming)
            except BaseException as error:
                self._fail(incoming, error)
                continue
            expected = iter(stored.checksums)
            for part in stored.parts:
                cuts: Sequence[tuple[int, int]] = ((part.start, part.nbytes),)
                if not 0 < part.nbytes <= uncut:
                    cuts = tier.cut(part.start, part.nbytes, part.extent)
                incoming.num_left += len(cuts)
                pieces = by_lane.setdefault(part.lane, [])
                for cut in cuts:
                    pieces.append((incoming, part, cut, next(expected, None)))
            incoming.num_to_queue = incoming.num_left
        chunks, lanes = list[Chunk](), list[int]()
        for lane, pieces in by_lane.items():
            joined = tier.join([cut[1] for _, _, cut, _ in pieces])
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
        if stored.edges is not NO_EDGES:
            stored.edges.put_into(incoming.storage)

    def shares(self) -> Sequence[tuple[int | None, int]]:
        if not self.nbytes:
            return []
        return self._tier.shares([p for one in self._incoming if not one.error for p in one.stored.parts], self.nbytes)

    def _run(self, pieces: Sequence[_Cut]) -> Settle | None:
        """Read pieces one after the other, and queue their copies; return what waits for the last one."""
        settle: Settle | None = None
        ended = list[_Incoming]()
        for incoming, part, cut, expected in pieces:
            if settle is not None:  # a worker holds one staging buffer at a time
                settle()
                settle = None
            if incoming.error is None:
                try:
                    settle = self._bring(incoming, part, cut, expected)
                except BaseException as error:
                    self._fail(incoming, error)
            ended.append(incoming)
            if self._is_awaited:
                self._count(ended)
        self._count(ended)
        return settle

    def _count(self, ended: list[_Incoming]) -> None:
        """Count pieces that have ended, and tell the owners of storages that are there. The last ones learn it from
        :meth:`finish`, when the job has been counted.
        """
        with self._order:
            for incoming in ended:
                incoming.num_left -= 1
            whole = [incoming for incoming in ended if not incoming.num_left]
            self._num_untold -= len(whole)
            is_last = not self._num_untold
        ended.clear()
        if whole and not is_last:
            self._tell(whole)

    def _bring(self, incoming: _Incoming, part: Part, cut: tuple[int, int], expected: int | None) -> Settle | None:
        """Read one piece and queue its copy; return what waits for the copy."""
        storage = incoming.storage
        if storage is None:
            raise RuntimeError(f"{incoming.stored.label} is read, and has no memory to go to; report it")
        piece = self._tier.piece(storage, part, *cut, incoming.after)
        try:
            loaded = self._tier.mover.load(piece, expected)
        except OSError as refusal:
            # As text: a log handler may keep its records, and the traceback holds the memory that we read into.
            _log.warning("reading %s again after: %s", incoming.stored.label, str(refusal))
            loaded = None
        if loaded is None:
            loaded = self._load_again(incoming.stored, piece, expected)
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
        # The read itself holds the place until it ends, so that it is not freed in between.
        self._tier.hold([incoming.stored], loaded, within=self)
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
        self._tier.let_go([incoming.stored], loaded)
        return None

    def _load_again(self, stored: StoredBytes, piece: Piece, expected: int | None) -> Loaded:
        """Read one piece once more, because that failed or the bytes were wrong."""
        self._tier.num_retries += 1
        loaded = self._tier.mover.load(piece, expected)
        if loaded is None:
            raise CorruptionError(
                f"{stored.label}: {piece.nbytes} bytes at offset {piece.offset} of the spill file in "
                f"{piece.arena.directory} are not what was written, in two reads; nothing was handed on. "
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

    def _tell(self, group: Sequence[_Incoming], closed: BaseException | None = None) -> None:
        """Tell owners, once, and let go of the memory."""
        self._tier.let_go([incoming.stored for incoming in group], self)  # copies under way hold the place yet
        ends = list[ReadEnd]()
        for incoming in group:
            error, storage, incoming.storage = incoming.error or closed, incoming.storage, None
            # All copies of ours run on one stream, so that the one that was queued last stands for all; the user of
            # the bytes waits for it.
            told = (None, None, error) if error else (storage, incoming.mark, None)
            ends.append((incoming.owner, *told))
            del storage, told
        fault: BaseException | None = None
        try:
            type(group[0].owner).all_read(ends)
        except BaseException as raised:
            forget_frames(raised)
            fault = raised
        ends.clear()
        with self._order:
            for incoming in group:
                incoming.is_over, incoming.fault = True, fault
        for incoming in group:
            if incoming.told is not None:
                incoming.told.open()

    def finish(self, error: BaseException | None) -> None:
        left = [incoming for incoming in self._incoming if not incoming.is_over]
        if left:
            self._tell(left, error)
        fault = next((incoming.fault for incoming in self._incoming if incoming.fault is not None), None)
        if fault is not None:
            raise fault
