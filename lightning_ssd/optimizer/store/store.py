"""Where the states of each subgroup are: in memory, on a drive, or on the way.

A subgroup's bytes move as a whole. A write goes to a fresh extent, and the last good copy is given back only when the
new one is complete, so that no failure of a drive costs a state: what cannot be written stays in memory.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from lightning_ssd.common.profiling import span, spanned
from lightning_ssd.common.status_line import StatusLine
from lightning_ssd.common.waiting import Changes, Latch
from lightning_ssd.errors import OffloaderClosedError, StorageError, forget_frames
from lightning_ssd.memory.mmap import PAGE_BYTES
from lightning_ssd.memory.readings import is_out_of_memory
from lightning_ssd.optimizer.store.buffers import BufferPool
from lightning_ssd.optimizer.store.entry import (
    CopyPin,
    DeferredReleases,
    Owner,
    Residency,
    StoredCopy,
    SubgroupEntry,
    WriteFailures,
    copied,
)
from lightning_ssd.tiers.base import StoredBytes
from lightning_ssd.tiers.host import HostTier
from lightning_ssd.tiers.ssd import SsdTier
from lightning_ssd.tiers.streams import CopyEngine, StreamEvent

__all__ = ["StateStore"]


class _PendingWrite:
    """One write of a subgroup; the owner that its tier calls."""

    __slots__ = ("_storage", "_store", "index", "tier")

    def __init__(self, store: StateStore, index: int, tier: SsdTier | HostTier, storage: torch.UntypedStorage) -> None:
        self._store, self._storage = store, storage
        self.index, self.tier = index, tier

    def write_begins(self) -> torch.UntypedStorage | None:
        return self._storage if self._store._is_wanted(self) else None

    def is_wanted(self) -> bool:
        return True

    def write_ended(self, stored: StoredBytes | None, error: BaseException | None) -> None:
        self._store._written(self, stored, error)


class _PendingRead:
    """One read of a subgroup into memory that was taken for it; the owner that its tier calls."""

    __slots__ = ("_store", "index", "into")

    def __init__(self, store: StateStore, index: int, into: torch.UntypedStorage) -> None:
        self._store, self.index, self.into = store, index, into

    def read_ended(
        self, storage: torch.UntypedStorage | None, mark: StreamEvent | None, error: BaseException | None
    ) -> None:
        self._store._came_up(self, storage, mark, error)


class StateStore:
    """Subgroups by number, in a bounded number of pieces of memory and any number of directories.

    One thread trains: it calls everything but the tiers' callbacks.

    Args:
        tiers: one per directory.
        device: where the memory is.
        num_slots: pieces of memory at most; each holds a subgroup. One more for each that cannot be written.
        copies: between that device and the host.
        block_bytes: memory that is asked for is a multiple of this many bytes.
        host: a cache in host memory, for a device that has memory of its own.
    """

    def __init__(
        self,
        tiers: Sequence[SsdTier],
        *,
        device: torch.device,
        num_slots: int,
        copies: CopyEngine,
        block_bytes: int = PAGE_BYTES,
        host: HostTier | None = None,
    ) -> None:
        self.tiers = tuple(tiers)
        self.block_bytes = block_bytes
        self.stall_s = 0.0
        self.kept_bytes = 0
        self._device, self._copies, self._host = device, copies, host
        self.slots = BufferPool(device)
        # Guards everything below; told of every end of a move. Tiers' locks are taken under it, never it under theirs.
        self._changed = Changes()
        self._lock = self._changed.lock
        self._homes: list[SubgroupEntry] = []
        self._queue: deque[int] = deque()
        self._num_allowed = num_slots
        self._num_awaited = 0
        self._failures = WriteFailures()
        self._allocated: torch.UntypedStorage | None = None
        self._returned = DeferredReleases()
        self._is_closed = False

    # -- what there is -------------------------------------------------------------------------------------------

    @property
    def num_slots(self) -> int:
        """Pieces of memory at most, now."""
        return self._num_allowed + self._failures.num_stuck

    def add_slots(self, num: int) -> None:
        """Allow so many more pieces of memory, or fewer: then what is too much leaves as memory is needed."""
        with self._lock:
            self._num_allowed += num

    def __len__(self) -> int:
        return len(self._homes)

    def add(self, paths: Iterable[int], first: int | None = None) -> None:
        """More subgroups, with the tier that each is to be written to.

        Args:
            paths: of each, the tier.
            first: the number of the first one: homes beyond it, of an addition that was interrupted, are nobody's.
        """
        self._homes[first if first is not None else len(self) :] = [SubgroupEntry(path=path) for path in paths]

    @property
    def paths(self) -> list[int]:
        """Of each subgroup, the tier that its next write goes to."""
        return [home.path for home in self._homes]

    def assign(self, paths: Sequence[int]) -> None:
        """Send next writes elsewhere. What is on a drive already stays there until then."""
        for home, path in zip(self._homes, paths, strict=True):
            home.path = path

    def in_memory(self) -> list[int]:
        """Subgroups that need no fetch."""
        with self._lock:
            return [i for i, home in enumerate(self._homes) if home.storage is not None]

    # -- up ------------------------------------------------------------------------------------------------------

    def prefetch(self, indices: Iterable[int]) -> None:
        """Bring these up, in this order, as memory becomes free."""
        with self._lock:
            self._queue = deque(indices)
            self._pump()

    @spanned("lightning_ssd::fetch")
    def take(self, index: int) -> torch.UntypedStorage | None:
        """The memory of a subgroup, for the caller alone until :meth:`give`; ``None`` if it was never stored.

        Raises:
            StorageError: it cannot be read; its copy on the drive stays as it is.
        """
        home = self._homes[index]
        begin_s = time.perf_counter()
        with self._lock:
            home.is_wanted = True
            home.take_error()  # of a read ahead of time, when nobody wanted it: memory may have been short then
        self._until(lambda: not self._is_coming(index))
        with self._lock:
            home.is_wanted = False
            self.stall_s += time.perf_counter() - begin_s
            self._check_open()  # another thread may have closed it, and what was here is forgotten
            error = home.take_error()
            if error is not None:
                error.add_note(f"This was a read of the optimizer states of subgroup {index}.")
                raise error
            home.where, home.used = Residency.IN_USE, None
            if home.storage is not None:
                self.slots.used_here(home.storage)
            if home.mark is not None:
                self._copies.wait_on_current_stream(home.mark)
                home.mark = None
            return home.storage

    def _is_coming(self, index: int) -> bool:
        """Whether a subgroup that somebody waits for has still to move. Has its read begin if nobody has yet."""
        home = self._homes[index]
        if home.where is Residency.AWAY and home.copy is not None and home.error is None:
            if index not in self._queue:
                self._queue.appendleft(index)
            self._pump()
        is_queued = home.where is Residency.AWAY and index in self._queue
        return is_queued or home.where in (Residency.READING, Residency.WRITING)

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """Memory for a subgroup that has none that fits, once there is a slot for it. :meth:`give` takes it back."""
        begin_s = time.perf_counter()
        with self._lock:
            self._free_allocated()
            self._num_awaited = 1  # or reads ahead of time would take each slot that becomes free
        try:
            self._until(lambda: self.slots.num_lent < self.num_slots)
        finally:
            self._num_awaited = 0
        while True:
            with self._lock:
                try:
                    self._allocated = self.slots.take(nbytes)
                    break
                except (RuntimeError, MemoryError, OSError) as error:
                    if not is_out_of_memory(error) or not self._let_go_of_one():
                        raise
            self._until(lambda: not self._is_writing)
        self.stall_s += time.perf_counter() - begin_s
        return self._allocated

    def _free_allocated(self) -> None:
        """Of a step that was interrupted before it gave it."""
        storage, self._allocated = self._allocated, None
        self._free(storage)

    def _free(self, storage: torch.UntypedStorage | None) -> None:
        if storage is not None:
            self.slots.give_back(storage)
            self.slots.trim(self.num_slots)

    # -- down ----------------------------------------------------------------------------------------------------

    def will_change(self, index: int) -> None:
        """Before somebody writes to memory that he has taken: interrupted half-way, it is ahead of its drive."""
        with self._lock:
            self._homes[index].is_dirty = True

    def give(
        self,
        index: int,
        storage: torch.UntypedStorage | None,
        *,
        is_dirty: bool,
        keep: bool,
        new: tuple[Owner, Any] | None = None,
    ) -> None:
        """End of use.

        Args:
            index: of the subgroup.
            storage: what holds it now: that of :meth:`take`, or a new one of :meth:`allocate`; ``None``: nothing.
            is_dirty: whether it has changed.
            keep: leave it in memory; else it is written if dirty, and its memory becomes free.
            new: who is to know what the memory holds from now on, and what that is; ``None``: what it held.
        """
        with self._lock:
            home = self._homes[index]
            if self._allocated is not storage:
                self._free_allocated()
            # Now: a worker that lets go of it later, to make room, is on another stream.
            used = self._copies.mark() if storage is not None and (home.is_dirty or is_dirty) else None
            # No call in between: an interrupt would leave the bytes of one and the layout of the other.
            former, home.storage = home.storage, storage
            self._allocated = None if former is storage else former
            home.is_dirty = (home.is_dirty or is_dirty) and storage is not None
            home.used = used
            if new is not None:
                new[0].contents = new[1]
            self._free_allocated()
            if storage is None:
                self._failures.is_written(home)
                home.replace_copy(None)
            home.where = Residency.AWAY if storage is None else Residency.HERE
            if storage is not None and keep:
                self.kept_bytes += storage.nbytes()
            elif storage is not None:
                self._let_go(index)
            self._changed.tell()
            self._pump()

    def evict(self, indices: Iterable[int]) -> None:
        """Let go of what is in memory and not in use."""
        with self._lock:
            for index in indices:
                if self._homes[index].where is Residency.HERE:
                    self._let_go(index)
            self._pump()

    def flush(self) -> None:
        """Write what is ahead of its drive, and wait for all writes. What stays in memory stays there.

        Raises:
            StorageError: something cannot be written; it stays in memory.
        """
        with self._lock:
            for index, home in enumerate(self._homes):
                home.is_wanted = home.is_wanted or home.storage is not None
                if home.where is Residency.HERE and home.is_dirty:
                    self._let_go(index, to_drive=True)
        with StatusLine("Writing optimizer states") as line:
            self.wait_for_writes(line)
            self._empty_cache(line)
        with self._lock:
            for home in self._homes:
                home.is_wanted = False
            if any(home.is_dirty for home in self._homes):
                raise StorageError(
                    f"optimizer states could not be written, and stay in memory: {self._failures.last_error}"
                )

    def _empty_cache(self, line: StatusLine) -> None:
        """What is in host memory only goes through a slot to its drive."""
        for index, home in line.over(list(enumerate(self._homes)), lambda one: _cached_bytes(one[1])):
            if home.copy is not None and home.copy.is_cached:
                self.take(index)
                with self._lock:
                    home.where, home.is_dirty = Residency.HERE, True
                    self._let_go(index, to_drive=True)
        self.wait_for_writes(line)

    def wait_for_writes(self, line: StatusLine | None = None) -> None:
        """Until no write is under way. What was to leave memory has left it then."""
        self._until(lambda: not any(home.where is Residency.WRITING for home in self._homes), line)

    def _let_go(self, index: int, *, to_drive: bool = False) -> None:
        home = self._homes[index]
        if not home.is_dirty:
            self._drop(home)
            return
        home.where = Residency.WRITING
        try:
            self._write(index, to_drive=to_drive)
        except BaseException:  # an interrupt may come when it is queued: nobody wants it then
            home.where, home.writer = Residency.HERE, None
            raise

    def _write(self, index: int, *, to_drive: bool) -> None:
        """Write a subgroup to host memory while there is room, else to its own directory."""
        home = self._homes[index]
        if self._host is not None and not to_drive:
            if home.copy is not None and home.copy.is_cached:
                home.replace_copy(None)  # memory is ahead of it and stays until the write has ended: its room serves
            home.tried = set()
            if self._submit(index, self._host):
                return
        home.tried = {home.path}
        self._submit(index, self.tiers[home.path])

    def _write_elsewhere(self, index: int) -> bool:
        """Write a subgroup that was refused to a directory that has not refused it yet, if there is one."""
        home = self._homes[index]
        nearest_first = sorted(range(len(self.tiers)), key=lambda path: path != home.path)
        other = next((path for path in nearest_first if path not in home.tried), None)
        if other is None:
            return False
        home.path = other
        home.tried.add(other)
        try:
            self._submit(index, self.tiers[other])
        except OffloaderClosedError:  # it has closed before the one that refused
            return False
        return True

    def _submit(self, index: int, tier: SsdTier | HostTier) -> bool:
        """Return whether the tier has room."""
        home = self._homes[index]
        if home.storage is None:
            raise RuntimeError("a subgroup without memory was to be written")
        # A write that was interrupted while it was queued may be in the queue all the same: then it is not this one.
        write = home.writer = _PendingWrite(self, index, tier, home.storage)
        mark = home.used or self._copies.mark()
        return tier.write(write, home.storage.nbytes(), mark, label=f"optimizer states of subgroup {index}")

    def _is_wanted(self, write: _PendingWrite) -> bool:
        with self._lock:
            return self._homes[write.index].writer is write

    def _written(self, write: _PendingWrite, stored: StoredBytes | None, error: BaseException | None) -> None:
        with self._lock:
            home = self._homes[write.index]
            if home.writer is write:
                home.writer = None  # or it would hold the memory, which is a device's, until the next one
            if stored is not None:
                home.replace_copy(StoredCopy(write.tier, stored))
                self._failures.is_written(home)
                home.where = Residency.HERE
                # Whoever wants it may have it at once, but for one that could not be written before: its memory was
                # beyond the others', and is no more.
                if not home.is_wanted or self.slots.num_lent > self.num_slots:
                    self._drop(home)
            elif self._is_closed or not self._write_elsewhere(write.index):
                home.where = Residency.HERE
                self._failures.note(home, error, quietly=self._is_closed)
            self._changed.tell()
            self._pump()

    def take_warning(self) -> str | None:
        """What the user should know, once."""
        with self._lock:
            return self._failures.take_warning()

    def _drop(self, home: SubgroupEntry) -> None:
        if home.mark is not None:
            home.mark.synchronize()  # nobody has waited for its read, and the memory is lent again
            home.mark = None
        storage, home.storage, home.where, home.used = home.storage, None, Residency.AWAY, None
        self._free(storage)

    # -- moves ---------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Begin reads while there is memory for them."""
        self._returned.give_back()
        while self._queue and self.slots.num_lent + self._num_awaited < self.num_slots and not self._is_closed:
            index = self._queue.popleft()
            home = self._homes[index]
            if home.where is Residency.WRITING:
                home.is_wanted = True
            if home.where is Residency.AWAY and home.copy is not None and not self._begin_read(index, home, home.copy):
                self._queue.appendleft(index)
                return
            self._changed.tell()

    def _begin_read(self, index: int, home: SubgroupEntry, copy: StoredCopy) -> bool:
        """Return whether it has begun, or failed; else there will be memory for it when a write has ended."""
        storage = None
        try:
            home.storage = storage = self.slots.take(copy.stored.body_nbytes)
            home.where = Residency.READING
            owner, mark = _PendingRead(self, index, storage), self._copies.mark()
            copy.tier.read(owner, copy.stored, self._device, urgent=False, into=storage, after=mark)
        except Exception as error:
            # What nobody waits for yet is asked for again later, and takes no other's place now.
            if is_out_of_memory(error) and home.is_wanted and self._let_go_of_one():
                self._drop(home)
                return not self._is_writing and self._begin_read(index, home, copy)
            self._not_read(home, error)  # this may be a worker, where nobody would see it
        except BaseException:
            home.storage, home.where = (
                None,
                Residency.AWAY,
            )  # if it is queued all the same, its end gives the memory back
            raise
        return True

    @property
    def _is_writing(self) -> bool:
        return any(home.where is Residency.WRITING for home in self._homes)

    def _let_go_of_one(self) -> bool:
        """Memory has run out: let go of a subgroup that was to stay. Returns whether there is any hope: one has gone,
        or is on its way out.
        """
        kept = next((i for i, h in enumerate(self._homes) if h.where is Residency.HERE and not h.is_stuck), None)
        if kept is not None:
            self._let_go(kept)
        return kept is not None or self._is_writing

    def _not_read(self, home: SubgroupEntry, error: BaseException) -> None:
        """Whoever takes it gets the error. Nothing else is tried ahead of time now."""
        forget_frames(error)
        home.error = error
        self._drop(home)
        self._queue.clear()

    def _came_up(
        self,
        read: _PendingRead,
        storage: torch.UntypedStorage | None,
        mark: StreamEvent | None,
        error: BaseException | None,
    ) -> None:
        with self._lock:
            home = self._homes[read.index]
            if home.storage is not read.into:
                self._free(read.into)  # an interrupt came when the read was asked for, and nobody waits for it
            elif storage is None:
                self._not_read(home, error or StorageError("a read ended with neither bytes nor an error"))
            else:
                # Its last copy has been queued, and nobody has waited for it yet.
                home.where, home.mark = Residency.HERE, mark
            self._changed.tell()

    def forget(self, index: int) -> None:
        """There is no such state any more, neither in memory nor on a drive."""
        home = self._homes[index]
        with self._lock:
            self._queue.clear()
        self._until(lambda: home.where not in (Residency.READING, Residency.WRITING))
        with self._lock:
            self._failures.is_written(home)
            self._drop(home)
            home.replace_copy(None)
            home.error, home.is_wanted = None, False
            self._pump()

    # -- copies --------------------------------------------------------------------------------------------------

    def hold(self, index: int) -> StoredCopy | torch.UntypedStorage | None:
        """The copy on the drive, which stays as it is until :meth:`release`; one in memory if that is ahead of it."""
        with self._lock:
            self._returned.give_back()
            home = self._homes[index]
            if home.is_dirty and home.storage is not None:
                self.slots.used_here(home.storage)
                return copied(home.storage)
            if home.copy is not None:
                home.copy.num_holders += 1
            return home.copy

    def release(self, copies: Iterable[StoredCopy]) -> None:
        """Let go of held copies."""
        with self._lock:
            for copy in copies:
                copy.release()

    def release_with(self, hold: CopyPin, copies: list[StoredCopy]) -> None:
        """The same when their holder has died, with the next move or :meth:`settle`; more may come to the list."""
        with self._lock:
            self._returned.watch(hold, copies)

    def settle(self) -> None:
        """Give back what dead holders held."""
        with self._lock:
            self._returned.give_back()

    def _until(self, is_done: Callable[[], bool], line: StatusLine | None = None) -> None:
        """Wait for a change after which this is so, asked under the lock; the line is told without the lock."""
        while True:
            with self._lock:
                if is_done():
                    return
                latch = self._next()
            if line is not None:
                line.update()
            if latch is not None:
                with span("lightning_ssd::stall"):
                    latch.wait()

    def _check_open(self) -> None:
        if self._is_closed:
            raise OffloaderClosedError("the optimizer's files are closed; make a new offloader for more steps")

    def _next(self) -> Latch | None:
        """What to wait for; ``None`` where nothing moves, and what can be done about it has been."""
        self._check_open()
        if not any(home.where in (Residency.READING, Residency.WRITING) for home in self._homes):
            # Nothing will free a slot by itself: let go of what is kept, or of one more than was allowed.
            self._num_allowed += not self._let_go_of_one()
            self._pump()
            return None
        return self._changed.next()

    def close(self) -> None:
        """Forget everything. The tiers belong to whoever opened them."""
        with self._lock:
            self._is_closed = True
            self._queue.clear()
            for home in self._homes:
                self._drop(home)
            self.slots.clear()
            self._changed.tell()


def _cached_bytes(home: SubgroupEntry) -> int:
    return home.copy.stored.body_nbytes if home.copy is not None and home.copy.is_cached else 0
