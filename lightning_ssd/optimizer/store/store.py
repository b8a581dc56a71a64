"""Move the states of subgroups between memory and drives.

A subgroup's bytes move as a whole. A write goes to a fresh extent, and the last good copy is freed only when the new
one is complete. So no failure of a drive loses a state: a subgroup that cannot be written stays in memory.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
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
    Residency,
    StoredCopy,
    SubgroupEntry,
)
from lightning_ssd.tiers.base import ReadEnd, StoredBytes, WriteEnd
from lightning_ssd.tiers.copy_paths import storage_bytes
from lightning_ssd.tiers.host import HostTier
from lightning_ssd.tiers.ssd import SsdTier
from lightning_ssd.tiers.streams import CopyEngine, StreamEvent

__all__ = ["StateStore"]


class _Move:
    """One write or read of a subgroup; the owner that its tier calls."""

    __slots__ = ("_store", "index", "storage", "tier")

    def __init__(self, store: StateStore, index: int, tier: SsdTier | HostTier, storage: torch.UntypedStorage) -> None:
        self._store = store
        self.index, self.tier, self.storage = index, tier, storage

    @staticmethod
    def all_begin(moves: Sequence[_Move]) -> list[torch.UntypedStorage | None]:
        store = moves[0]._store
        with store._lock:
            return [move.storage if store._homes[move.index].writer is move else None for move in moves]

    def is_wanted(self) -> bool:
        return True

    @staticmethod
    def all_written(ends: Sequence[WriteEnd]) -> None:
        for move, *end in ends:
            move._store._written(move, *end)

    @staticmethod
    def all_read(ends: Sequence[ReadEnd]) -> None:
        for move, *end in ends:
            move._store._came_up(move, *end)


class StateStore:
    """Subgroups by number, in a bounded number of slots in memory, and on drives.

    The training thread makes all calls except the callbacks of tiers, which workers make.

    Args:
        tier: the drives.
        device: device of the memory.
        num_slots: limit of slots, each of which holds a subgroup. A subgroup that cannot be written gets one more.
        copies: makes copies between that device and the host.
        block_bytes: all sizes of memory are multiples of this many bytes.
        host: a cache in host memory, for a device that has memory of its own.
    """

    def __init__(
        self,
        tier: SsdTier,
        *,
        device: torch.device,
        num_slots: int,
        copies: CopyEngine,
        block_bytes: int = PAGE_BYTES,
        host: HostTier | None = None,
    ) -> None:
        self.tier = tier
        self.block_bytes = block_bytes
        self.stall_s = 0.0
        self.kept_bytes = 0
        self._device, self._copies, self._host = device, copies, host
        self.slots = BufferPool(device)
        # Guards everything below, and wakes waits when a move ends. Tiers' locks are taken under it, never it under
        # theirs.
        self._changed = Changes()
        self._lock = self._changed.lock
        self._homes: list[SubgroupEntry] = []
        self._queue: deque[int] = deque()
        self._num_allowed = num_slots
        self._num_awaited = 0
        self._num_stuck = 0
        self._warning: str | None = None
        self.write_error: str | None = None
        """The last error of a write that no drive has taken."""
        self._allocated: torch.UntypedStorage | None = None
        self._returned = DeferredReleases()
        self._is_closed = False

    # -- what there is -------------------------------------------------------------------------------------------

    @property
    def num_slots(self) -> int:
        """Present limit of slots."""
        return self._num_allowed + self._num_stuck

    def add_slots(self, num: int) -> None:
        """Raise the limit of slots by ``num``. If it is lowered, subgroups are evicted when memory is needed."""
        with self._lock:
            self._num_allowed += num

    def __len__(self) -> int:
        return len(self._homes)

    def add(self, num: int, first: int | None = None) -> None:
        """Add subgroups.

        Args:
            num: how many.
            first: number of the first new subgroup. Entries from it on are left from an interrupted call, and dropped.
        """
        self._homes[first if first is not None else len(self) :] = [SubgroupEntry() for _ in range(num)]

    def in_memory(self) -> list[int]:
        """Return the subgroups that are in memory, and need no fetch."""
        with self._lock:
            return [i for i, home in enumerate(self._homes) if home.storage is not None]

    # -- up ------------------------------------------------------------------------------------------------------

    def prefetch(self, indices: Iterable[int]) -> None:
        """Read these subgroups into memory, in this order, as slots become free."""
        with self._lock:
            self._queue = deque(indices)
            self._pump()

    @spanned("lightning_ssd::fetch")
    def take(self, index: int) -> torch.UntypedStorage | None:
        """Return the memory of a subgroup, for the caller alone until :meth:`give`; ``None`` if it was never stored.

        Raises:
            StorageError: it cannot be read. Its copy on the drive is not changed.
        """
        home = self._homes[index]
        begin_s = time.perf_counter()
        with self._lock:
            home.is_wanted = True
            # Of a speculative read: memory may have been short then.
            self._homes[index].error = None  # not by `home`: mypy would take it for None below

        def begin_read_unless_ready() -> bool:
            """Begin its read if it has to; return whether it is on its way no more."""
            if home.where is Residency.AWAY and home.copy is not None and home.error is None:
                if index not in self._queue:
                    self._queue.appendleft(index)
                self._pump()
            is_queued = home.where is Residency.AWAY and index in self._queue
            return not is_queued and home.where not in (Residency.READING, Residency.WRITING)

        self._until(begin_read_unless_ready)
        with self._lock:
            home.is_wanted = False
            self.stall_s += time.perf_counter() - begin_s
            self._check_open()  # another thread may have closed it, and dropped the memory
            error, home.error = home.error, None
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

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """Wait for a slot, and return memory for a subgroup that has none of this size. :meth:`give` takes it back."""
        begin_s = time.perf_counter()
        with self._lock:
            self._free_allocated()
            self._num_awaited = 1  # or speculative reads would take each slot that becomes free
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
        """Free the memory of :meth:`allocate` if an interrupted step has not given it back."""
        storage, self._allocated = self._allocated, None
        self._free(storage)

    def _free(self, storage: torch.UntypedStorage | None) -> None:
        if storage is not None:
            self.slots.give_back(storage)
            self.slots.trim(self.num_slots)

    # -- down ----------------------------------------------------------------------------------------------------

    def will_change(self, index: int) -> None:
        """Mark a subgroup as dirty before it is modified, so that an interrupt cannot lose the update."""
        with self._lock:
            self._homes[index].is_dirty = True

    def give(
        self,
        index: int,
        storage: torch.UntypedStorage | None,
        *,
        is_dirty: bool,
        keep: bool,
        new: tuple[Any, Any] | None = None,
    ) -> None:
        """Give a subgroup back after use.

        Args:
            index: number of the subgroup.
            storage: its memory, from :meth:`take` or :meth:`allocate`; ``None``: it has none any more.
            is_dirty: whether the memory has changed.
            keep: leave it in memory; else it is written if dirty, and its memory becomes free.
            new: an object and its new ``contents``, which describe the memory and are set together with it; ``None``:
                they are unchanged.
        """
        with self._lock:
            home = self._homes[index]
            if self._allocated is not storage:
                self._free_allocated()
            # Now, because a worker that evicts it later is on another stream.
            used = self._copies.mark() if storage is not None and (home.is_dirty or is_dirty) else None
            # No call in between: an interrupt would leave the old layout with the new bytes.
            former, home.storage = home.storage, storage
            self._allocated = None if former is storage else former
            home.is_dirty = (home.is_dirty or is_dirty) and storage is not None
            home.used = used
            if new is not None:
                new[0].contents = new[1]
            self._free_allocated()
            if storage is None:
                self._mark_clean(home)
                home.replace_copy(None)
            home.where = Residency.AWAY if storage is None else Residency.HERE
            if storage is not None and keep:
                self.kept_bytes += storage.nbytes()
            elif storage is not None:
                self._let_go(index)
            self._changed.tell()
            self._pump()

    def evict(self, indices: Iterable[int]) -> None:
        """Evict those of the subgroups that are in memory and not in use."""
        with self._lock:
            for index in indices:
                if self._homes[index].where is Residency.HERE:
                    self._let_go(index)
            self._pump()

    def flush(self) -> None:
        """Write all dirty subgroups to drives, and wait for all writes. Subgroups in memory also stay in memory.

        Raises:
            StorageError: a subgroup cannot be written; it stays in memory.
        """
        with self._lock:
            for index, home in enumerate(self._homes):
                home.is_wanted = home.is_wanted or home.storage is not None
                if home.where is Residency.HERE and home.is_dirty:
                    self._let_go(index, to_drive=True)
        with StatusLine("Writing optimizer states") as line:
            self.wait_for_writes(line)
            # Each subgroup that is in the cache in host memory goes to its drive through a slot.
            for index, home in enumerate(self._homes):
                if home.copy is not None and home.copy.is_cached:
                    self.take(index)
                    with self._lock:
                        home.where, home.is_dirty = Residency.HERE, True
                        self._let_go(index, to_drive=True)
                    line.update()
            self.wait_for_writes(line)
        with self._lock:
            for home in self._homes:
                home.is_wanted = False
            if any(home.is_dirty for home in self._homes):
                raise StorageError(f"optimizer states could not be written, and stay in memory: {self.write_error}")

    def wait_for_writes(self, line: StatusLine | None = None) -> None:
        """Wait until no write is under way. Evicted subgroups have left memory then."""
        self._until(lambda: not self._is_writing, line)

    def _let_go(self, index: int, *, to_drive: bool = False) -> None:
        """Write a subgroup to host memory while there is room, else to the drives; or drop it."""
        home = self._homes[index]
        if not home.is_dirty:
            self._drop(home)
            return
        home.targets = [self.tier]
        if self._host is not None and not to_drive:
            home.targets.insert(0, self._host)
            if home.copy is not None and home.copy.is_cached:
                home.replace_copy(None)  # free its room for the write: memory is newer, and stays until the write ends
        home.where = Residency.WRITING
        try:
            self._write_next(index)
        except BaseException:  # an interrupt may come when the write is queued: without a writer it is not wanted
            home.where, home.writer = Residency.HERE, None
            raise

    def _write_next(self, index: int) -> bool:
        """Queue a write of a subgroup to the next tier that has room; return whether there was one."""
        home = self._homes[index]
        while home.targets:
            tier = home.targets.pop(0)
            if home.storage is None:
                raise RuntimeError("a subgroup without memory was to be written")
            # An earlier write may be in the queue though its call was interrupted. It is no longer the entry's writer.
            write = home.writer = _Move(self, index, tier, home.storage)
            mark = home.used or self._copies.mark()
            if tier.write(write, home.storage.nbytes(), mark, label=f"optimizer states of subgroup {index}"):
                return True
        return False

    def _written(self, write: _Move, stored: StoredBytes | None, error: BaseException | None) -> None:
        with self._lock:
            home = self._homes[write.index]
            if home.writer is write:
                home.writer = None  # or it would hold the memory of a device until the next write
            if stored is not None:
                home.replace_copy(StoredCopy(write.tier, stored))
                self._mark_clean(home)
                home.where = Residency.HERE
                # A wanted subgroup stays in memory, so that it is taken at once. But if its earlier write failed, its
                # buffer exceeded the slot limit, and is freed.
                if not home.is_wanted or self.slots.num_lent > self.num_slots:
                    self._drop(home)
            else:
                is_queued = False
                with suppress(OffloaderClosedError):  # the next tier has closed before the one that refused
                    is_queued = not self._is_closed and self._write_next(write.index)
                if not is_queued:
                    home.where = Residency.HERE
                    self._mark_stuck(home, error)
            self._changed.tell()
            self._pump()

    def take_warning(self) -> str | None:
        """Return the warning about failed writes, once; ``None``: there is none."""
        with self._lock:
            warning, self._warning = self._warning, None
            return warning

    def _mark_clean(self, home: SubgroupEntry) -> None:
        """Note that a subgroup's copy is as new as its memory."""
        home.is_dirty = False
        self._num_stuck -= home.is_stuck
        home.is_stuck = False

    def _mark_stuck(self, home: SubgroupEntry, error: BaseException | None) -> None:
        """Note that a subgroup stays in memory. Without one more slot for it training would wait for ever."""
        self._num_stuck += not home.is_stuck
        home.is_stuck = True
        if self.write_error is None and not self._is_closed:
            self._warning = (
                f"optimizer states could not be written and stay in memory, exact as before: {error}. Free space on "
                "the drive, or name another directory in HardwareProfile.paths"
            )
        self.write_error = str(error) or repr(error)  # not the error, whose frames hold the bytes of the write

    def _drop(self, home: SubgroupEntry) -> None:
        if home.mark is not None:
            home.mark.synchronize()  # no stream has waited for its read, and the memory is lent again
            home.mark = None
        storage, home.storage, home.where, home.used = home.storage, None, Residency.AWAY, None
        self._free(storage)

    # -- moves ---------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Begin queued reads while there are slots for them."""
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
        """Begin a read; return whether it has begun or failed. Else there is memory for it when a write has ended."""
        storage = None
        try:
            home.storage = storage = self.slots.take(copy.stored.body_nbytes)
            home.where = Residency.READING
            owner, mark = _Move(self, index, copy.tier, storage), self._copies.mark()
            copy.tier.read(owner, copy.stored, self._device, urgent=False, into=storage, after=mark)
        except Exception as error:
            # A speculative read that runs out of memory is dropped. It is requested again when it is needed.
            if is_out_of_memory(error) and home.is_wanted and self._let_go_of_one():
                self._drop(home)
                return not self._is_writing and self._begin_read(index, home, copy)
            self._not_read(home, error)  # not raised: this thread may be a worker
        except BaseException:
            # If the read is queued all the same, its end gives the memory back.
            home.storage, home.where = None, Residency.AWAY
            raise
        return True

    @property
    def _is_writing(self) -> bool:
        return any(home.where is Residency.WRITING for home in self._homes)

    def _let_go_of_one(self) -> bool:
        """Evict a subgroup that was to stay, because memory has run out; return whether memory becomes free by it.

        It does if a subgroup was evicted, or is being written.
        """
        kept = next((i for i, h in enumerate(self._homes) if h.where is Residency.HERE and not h.is_stuck), None)
        if kept is not None:
            self._let_go(kept)
        return kept is not None or self._is_writing

    def _not_read(self, home: SubgroupEntry, error: BaseException) -> None:
        """Note the error of a read, which :meth:`take` raises, and drop the queue of speculative reads."""
        forget_frames(error)
        home.error = error
        self._drop(home)
        self._queue.clear()

    def _came_up(
        self,
        read: _Move,
        storage: torch.UntypedStorage | None,
        mark: StreamEvent | None,
        error: BaseException | None,
    ) -> None:
        with self._lock:
            home = self._homes[read.index]
            if home.storage is not read.storage:
                self._free(read.storage)  # an interrupt came when the read was queued, and the entry does not use it
            elif storage is None:
                self._not_read(home, error or StorageError("a read ended with neither bytes nor an error"))
            else:
                # The last copy to the device is queued on a stream, and no other stream has waited for it yet.
                home.where, home.mark = Residency.HERE, mark
            self._changed.tell()

    def forget(self, index: int) -> None:
        """Drop the state of a subgroup, in memory and on its drive."""
        home = self._homes[index]
        with self._lock:
            self._queue.clear()
        self._until(lambda: home.where not in (Residency.READING, Residency.WRITING))
        with self._lock:
            self._mark_clean(home)
            self._drop(home)
            home.replace_copy(None)
            home.error, home.is_wanted = None, False
            self._pump()

    # -- copies --------------------------------------------------------------------------------------------------

    def hold(self, index: int) -> StoredCopy | torch.UntypedStorage | None:
        """Hold the stored copy until it is released, and return it; if memory is newer, return a copy of that."""
        with self._lock:
            self._returned.give_back()
            home = self._homes[index]
            if home.is_dirty and home.storage is not None:
                self.slots.used_here(home.storage)
                return storage_bytes(home.storage, 0, home.storage.nbytes()).clone().untyped_storage()
            if home.copy is not None:
                home.copy.num_holders += 1
            return home.copy

    def release_with(self, hold: CopyPin, copies: list[StoredCopy]) -> None:
        """Release the copies in a list, to which the caller may add, after ``hold`` has died: with the next move."""
        with self._lock:
            self._returned.watch(hold, copies)

    def _until(self, is_done: Callable[[], bool], line: StatusLine | None = None) -> None:
        """Wait until ``is_done()``, called under the lock after each change; ``line`` is updated without the lock."""
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
        """Return a latch that opens with the next change; ``None``: nothing moves, and a slot was freed or added."""
        self._check_open()
        if not any(home.where in (Residency.READING, Residency.WRITING) for home in self._homes):
            # Nothing will free a slot by itself: let go of what is kept, or of one more than was allowed.
            self._num_allowed += not self._let_go_of_one()
            self._pump()
            return None
        return self._changed.next()

    def close(self) -> None:
        """Free all memory. The caller closes the tiers."""
        with self._lock:
            self._is_closed = True
            self._queue.clear()
            for home in self._homes:
                self._drop(home)
            self.slots.clear()
            self._changed.tell()
