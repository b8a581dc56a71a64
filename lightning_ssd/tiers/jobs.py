"""Jobs of a tier: storages on their way to it, and one on its way back.

A read checks what comes back (``verify``), tries a failed or wrong chunk once more, and never hands on other bytes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from lightning_ssd.common.tensors import Region
from lightning_ssd.errors import CorruptionError, OffloaderClosedError, StorageError, forget_frames
from lightning_ssd.memory.readings import is_out_of_memory
from lightning_ssd.tiers.base import NoMemoryToReadError, Part, ReadOwner, StoredBytes, WriteRequest
from lightning_ssd.tiers.copy_paths import Edges, Loaded, Piece
from lightning_ssd.tiers.streams import StreamEvent
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
    """

    def __init__(self, tier: Tier, request: WriteRequest, parts: list[Part]) -> None:
        self.request = request
        self.parts = parts
        self.moved_nbytes = 0
        """Bytes that go to the tier, without the pieces that were no longer wanted."""
        self.failed_nbytes = 0
        self.fault: BaseException | None = None
        """Error of telling the owner of the end, which its contract forbids."""
        self._tier = tier
        self._storage: torch.UntypedStorage | None = None
        self._edges: Edges | None = None
        self._whole = parts[0] if parts else None
        self._cuts: list[tuple[int, int]] = []
        self._checksums: list[int | None] = []
        self._check = False
        self._memory: Region | None = None
        self._missing_nbytes = 0  # of the pieces that were no longer wanted
        self._error: BaseException | None = None
        self._is_begun = self._is_over = False
        self._num_left = 0
        # Order: before the accounting lock, which the owner takes.
        self._beginning = threading.Lock()
        # Guards the numbers, the parts and the error. A leaf lock.
        self._changing = threading.Lock()

    def num_pieces(self) -> int:
        """Return the most pieces that it is cut into. Called once, before any of them runs."""
        extent = None if self._whole is None else self._whole.extent
        self._num_left = max(len(self._tier.cut(0, self.request.nbytes, extent)), 1)
        return self._num_left

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
            self.give_back()
            return
        self._memory = _check_size(storage, request.nbytes, request.label)
        edges = self._edges = tier.mover.edges(storage)
        head, body = len(edges.head), request.nbytes - len(edges.head) - len(edges.tail)
        if self._whole is None and not tier.is_striped:
            self._whole = self._place(head, body, {})
        self._cuts = tier.cut(head, body, None if self._whole is None else self._whole.extent)
        self._checksums = [None] * len(self._cuts)
        self._check = tier.wants_check()
        self.moved_nbytes = body

    def _store(self, index: int) -> None:
        storage, cut, refused = self._storage, self._cuts[index], dict[int, OSError]()
        if storage is None or not self.request.owner.is_wanted():
            with self._changing:  # it was taken back, and would hold its memory as long as it is written
                self._missing_nbytes += cut[1]
                self.moved_nbytes -= cut[1]
            return
        while True:
            part = self._place(*cut, refused) if self._whole is None else self._whole
            try:
                piece = self._tier.piece(storage, part, *cut, self.request.after)
                self._checksums[index] = self._tier.mover.store(piece, check=self._check)
                return
            except OSError as error:
                if self._whole is not None:
                    raise
                with self._changing:
                    self.parts.remove(part)
                self._tier.free_parts([part])
                self._tier.gives_up(part.lane, error)
                refused[part.lane] = error

    def _place(self, start: int, nbytes: int, refused: Mapping[int, OSError]) -> Part:
        part = self._tier.allocate(start, nbytes, refused)
        with self._changing:
            self.parts.append(part)
        return part

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
            error = _moved_meanwhile(storage, self._memory, request.label)
        stored = None
        if error is None and storage is not None and edges is not None:
            stored = StoredBytes(
                self._tier,
                tuple(sorted(self.parts)),
                request.nbytes,
                edges,
                tuple(value for value in self._checksums if value is not None),
                request.label,
                self._missing_nbytes,
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


def _check_size(storage: torch.UntypedStorage, nbytes: int, label: str) -> Region:
    """Return where the memory of a storage is, when its write begins.

    Raises:
        StorageError: it has not the size any more with which its write was queued. It stays with its owner then.
    """
    if storage.nbytes() != nbytes:
        raise StorageError(
            f"{label} has {storage.nbytes():,} bytes, and had {nbytes:,} when its write was queued; saved storages "
            "must not be resized"
        )
    return Region.of(storage)


def _moved_meanwhile(storage: torch.UntypedStorage | None, memory: Region | None, label: str) -> StorageError | None:
    """Return what is wrong with the bytes that were read from ``memory`` while it was written.

    ``untyped_storage().resize_()`` and ``share_memory_()`` give a storage other memory and free what it had, with no
    sign in its version. What was written may be anything then; what the storage has now is its owner's.
    """
    if storage is None or memory is None or Region.of(storage) == memory:
        return None
    return StorageError(
        f"{label} was given other memory while it was written (resize_ or share_memory_); it stays in memory"
    )


class Write(Transfer):
    """Storages on their way to a tier, in one job: what a worker does once for each takes as long as a small write."""

    def __init__(self, tier: Tier) -> None:
        super().__init__("write", 0)
        self._tier = tier
        self._outgoing: list[_Outgoing] = []
        # Guards the bytes that have moved. A leaf lock.
        self._counting = threading.Lock()

    def add(self, request: WriteRequest, parts: list[Part]) -> None:
        """Add a storage, before the job is queued, with the room that it has already."""
        self._outgoing.append(_Outgoing(self._tier, request, parts))
        self.nbytes += request.nbytes

    def begin(self) -> Sequence[Chunk] | None:
        self._wait_for_producers()
        pieces, sizes = list[tuple[_Outgoing, int]](), list[int]()
        for outgoing in self._outgoing:
            number = outgoing.num_pieces()
            pieces += [(outgoing, index) for index in range(number)]
            sizes += [outgoing.request.nbytes // number] * number
        return [partial(self._run, pieces[start:stop]) for start, stop in self._tier.join(sizes)]

    def _wait_for_producers(self) -> None:
        """Wait here, so that the rate is the tier's, and a take-back saves the write.

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
        for outgoing in self._outgoing:
            outgoing.give_back()
        self._outgoing.clear()


class Read(Transfer):
    """One storage on its way back from a tier."""

    def __init__(
        self,
        tier: Tier,
        owner: ReadOwner,
        stored: StoredBytes,
        storage: torch.UntypedStorage | None,
        after: StreamEvent | None,
        device: torch.device,
        *,
        urgent: bool,
    ) -> None:
        super().__init__("read", stored.body_nbytes, urgent=urgent)
        self.outlasts = tier.mover.outlasts
        self._tier = tier
        self._owner = owner
        self._stored = stored
        self._storage = storage
        self._after = after
        self._device = device
        self.label = stored.label
        self._mark: StreamEvent | None = None  # of the copy that was queued last
        self._num_to_queue = 0
        # Guards the mark and the order of the copies. A leaf lock: under it one copy is queued.
        self._order = threading.Lock()

    def begin(self) -> Sequence[Chunk] | None:
        stored, storage, tier = self._stored, self._storage, self._tier
        if storage is None:
            try:
                storage, self._after = tier.mover.allocate(stored.nbytes, stored.edges, self._device)
            except (RuntimeError, MemoryError, OSError) as error:
                if is_out_of_memory(error):
                    raise NoMemoryToReadError(str(error)) from None
                raise
            self._storage = storage
        stored.edges.put_into(storage)
        cuts = [(part, *cut) for part in stored.parts for cut in tier.cut(part.start, part.nbytes, part.extent)]
        self.lanes = [part.lane for part, _, _ in cuts]
        self._num_to_queue = len(cuts)
        expected: Sequence[int | None] = stored.checksums or [None] * len(cuts)
        pieces = [tier.piece(storage, *cut, self._after) for cut in cuts]
        return [partial(self._bring, *chunk) for chunk in zip(pieces, expected, strict=True)]

    def shares(self) -> Sequence[tuple[int | None, int]]:
        return self._tier.shares(self._stored.parts, self.nbytes)

    def _bring(self, piece: Piece, expected: int | None) -> Settle | None:
        """Read one piece and queue its copy; return what waits for the copy."""
        loaded = self._load(piece, expected)
        with self._order:
            try:
                mark = loaded.bring_in()
            except BaseException:
                loaded.release()
                raise
            self._mark = mark
            self._num_to_queue -= 1
            is_last = not self._num_to_queue
        if mark is None:
            return None
        self._stored.readers.add(loaded)  # the read itself is one until it ends: it is not freed in between
        if is_last or not self.outlasts:
            return partial(self._settle, piece, loaded, mark)
        # It is handed over once the last copy is queued: what fails before that fails the read.
        error = self._settle(piece, loaded, mark)
        if error is not None:
            raise error
        return None

    def _settle(self, piece: Piece, loaded: Loaded, mark: StreamEvent) -> BaseException | None:
        """Hold both memories until the copy has passed; they may have been handed over and dropped long before."""
        try:
            self._await(piece.after)
            mark.synchronize()
        except BaseException as error:
            forget_frames(error)
            self._tier.mover.lost.extend((piece, loaded))
            return error
        loaded.release()
        self._tier.let_go(self._stored, loaded)
        return None

    def _load(self, piece: Piece, expected: int | None) -> Loaded:
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
            _log.warning("reading %s again after: %s", self._stored.label, str(error))
        self._tier.num_retries += 1
        loaded = mover.load(piece, expected)
        if loaded is None:
            raise CorruptionError(
                f"{self._stored.label}: {piece.nbytes} bytes at offset {piece.offset} of the spill file in "
                f"{piece.arena.path} are not what was written, in two reads; nothing was handed on. "
                "Check the drive (SMART, dmesg) or take another directory in HardwareProfile.paths"
            )
        return loaded

    def _await(self, mark: StreamEvent | None) -> None:
        if mark is not None:
            # What the device still computes before it may take the bytes says nothing of the tier.
            with self.not_busy(has_begun=not self.outlasts):
                mark.synchronize()

    def finish(self, error: BaseException | None) -> None:
        storage, self._storage = self._storage, None
        self._tier.let_go(self._stored, self)  # copies under way hold the place yet
        # All copies of ours run on one stream, so that the one that was queued last stands for all; the user of the
        # bytes waits for it.
        self._owner.read_ended(None if error else storage, None if error else self._mark, error)

    def discard(self) -> None:
        self._storage = None
        self._tier.let_go(self._stored, self)
        self._owner.read_ended(None, None, OffloaderClosedError("the offloader was closed before this read began"))
