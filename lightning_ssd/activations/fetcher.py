"""Gives backward the bytes that it asks for: forwarded, brought up ahead, or read urgently.

What comes next is brought up within a byte budget, in the order that earlier passes recorded. Bytes count as *ahead*
from the moment their memory is taken (or, for a write that is taken back, given up) until an unpack asks for them.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence

import torch

from lightning_ssd.activations.accounting import MemoryAccounting
from lightning_ssd.activations.kept_storage import KeptStorage
from lightning_ssd.activations.live_passes import LivePasses
from lightning_ssd.activations.saved_pass import SavedPass
from lightning_ssd.activations.saved_storage import SavedStorage
from lightning_ssd.activations.storage_state import AWAY, FREED, ON_DISK, READING, READY, RELOADED
from lightning_ssd.common.accelerators import accelerator_of
from lightning_ssd.common.profiling import span
from lightning_ssd.common.waiting import Latch
from lightning_ssd.errors import OffloaderClosedError, copy_of
from lightning_ssd.memory.readings import is_out_of_memory
from lightning_ssd.scheduling.clock import Clock, Stamp
from lightning_ssd.scheduling.pass_profile import PrefetchBudget
from lightning_ssd.scheduling.stalls import Stalls
from lightning_ssd.tiers.jobs import Read
from lightning_ssd.tiers.streams import CopyEngine
from lightning_ssd.tiers.tier import Tier

__all__ = ["Fetcher"]

# Reloaded storages that everybody has unpacked stay for so many more: the operation that asked is still running.
# With retain_graph the graph goes on holding them; then their memory goes, and the file still has them.
_NUM_CONSUMED = 8
_LONGEST_WAIT_S = 0.1
_NOT_AWAY = (*READY, READING, FREED)
_GROUP_STORAGES = 64
_GROUP_BYTES = 16 << 20
"""Most that come back in one job, which costs as much Python as a small read takes. It is as long as one chunk, so that
an urgent read waits no longer."""
_MAX_WAIT_S = 1.0
"""Lets a worker let go of memory, unless the program holds it."""
_SHARE = 4
"""One part in so many of what is free when backward begins may be brought up ahead."""


class Fetcher:
    """One per tensor cache.

    Args:
        accounting: of the saved storages; its lock guards us.
        passes: that are alive.
        budget: of what is brought up ahead.
        stalls: told of each wait.
        device: where the bytes go.
        clock: of the device.
        copies: between the device and the host.
        tier: takes what was to stay and has to go, under a budget; ``None``: nothing goes.
    """

    def __init__(
        self,
        accounting: MemoryAccounting,
        passes: LivePasses,
        *,
        budget: PrefetchBudget,
        stalls: Stalls,
        device: torch.device,
        clock: Clock,
        copies: CopyEngine,
        tier: Tier | None,
    ) -> None:
        self.budget = budget
        self._most_bytes = sys.maxsize  # that may be ahead
        self.stalls = stalls
        self.is_closed = False
        self.failure: BaseException | None = None
        """The last read that failed for good."""
        self.accounting = accounting
        self.passes = passes
        self.device = device
        self._clock = clock
        self.copies = copies
        self._tier = tier
        self._consumed: deque[SavedStorage] = deque()
        self.given: deque[SavedStorage] = deque()
        """Storages that hooks have given backward without the lock, to be noted by the next operation that takes it."""

    def close(self) -> BaseException | None:
        """Read and evict nothing from now on; what is in memory may still be had. Return the failure, once."""
        self.is_closed = True
        # The caller raises it, with frames whose tensors hold their graph, and the graph may hold us.
        failure, self.failure = self.failure, None
        return failure

    def fetch(self, record: SavedStorage) -> torch.UntypedStorage:
        """The storage's bytes, in memory and visible to the current stream. The caller holds no lock."""
        start_s, is_noted = 0.0, False
        begin: Stamp = None
        while True:
            with self.accounting.lock:
                if not is_noted:
                    self._asked_for(record)
                    self.note_given()
                    self._note_one(record)
                    is_noted = True
                pending = self._bring_up(record)
                storage, mark = record.storage, record.mark
            if storage is not None:
                break
            if isinstance(pending, Latch):
                self.wait_for_room(record.nbytes, pending)
                continue
            if begin is None:
                start_s, begin = time.perf_counter(), self._clock.stamp()
            for read in pending:
                read.wait_for(record)
            self._raise_if_failed(record)
        # What has arrived costs the device nothing, and two stamps would tell of the time that Python takes for them.
        if mark is not None and not mark.query():
            if begin is None:
                start_s, begin = time.perf_counter(), self._clock.stamp()
            self.copies.wait_on_current_stream(mark)
        if begin is not None:
            end = self._clock.stamp()
            with self.accounting.lock:
                self._stalled(record.nbytes, start_s, begin, end, for_read=True)
        return storage

    def _stalled(self, nbytes: int, start_s: float, begin: Stamp, end: Stamp, *, for_read: bool) -> None:
        """The training thread has waited. The lock is held."""
        self.stalls.add(nbytes, start_s, begin, end, for_read=for_read)
        self.passes.stalled(begin, end)

    def prune(self) -> None:
        """Forget storages whose graphs are gone. The lock is held."""
        self._consumed = deque(r for r in self._consumed if r.state is not FREED)

    def note_given(self) -> None:
        """Note what hooks have given backward. The lock is held."""
        while self.given:
            record = self.given.popleft()
            if record.state is FREED:  # by now: nothing of it is left to note
                continue
            if record.home is not None:
                record.home.asked_for(record, 0.0, self.passes.book)
            self._note_one(record)

    def _note_one(self, record: SavedStorage) -> None:
        """Note an unpack; what all tensors of a storage have had by now need not stay."""
        if record.ahead:
            record.ahead = False
            self.accounting.ahead_bytes -= record.nbytes
        record.num_unpacked += 1
        if record.num_unpacked >= record.num_tensors:
            self._consumed.append(record)
        while len(self._consumed) > _NUM_CONSUMED:
            consumed = self._consumed.popleft()
            if consumed is not record and consumed.state is RELOADED:
                consumed.drop_copy()

    def _asked_for(self, record: SavedStorage | KeptStorage) -> bool:
        """Backward asks for a storage; return whether it is the first one of its pass. The lock is held."""
        self.accounting.settle()
        if (home := record.home) is None:
            return False
        is_first = not home.order
        if is_first:
            # Gradients and temporaries are to come, and know nothing of us.
            available_bytes = self.passes.available()
            self._most_bytes = sys.maxsize if available_bytes is None else available_bytes // _SHARE
        home.asked_for(record, time.perf_counter(), self.passes.book)
        return is_first

    def note_kept(self, record: KeptStorage) -> None:
        """Note that backward asks for a storage that has stayed; the first one begins the look ahead."""
        with self.accounting.lock:
            if self._asked_for(record):
                self._advance(record)

    def wait_for_room(self, nbytes: int, room: Latch) -> bool:
        """Wait for what :meth:`admit` gave. The caller holds no lock.

        Returns:
            Whether room may come: not after the end, when no write goes on.
        """
        begin, start_s = self._clock.stamp(), time.perf_counter()
        with span("lightning_ssd::stall"):
            room.wait_for(_LONGEST_WAIT_S)
        with self.accounting.lock:
            self._stalled(nbytes, start_s, begin, self._clock.stamp(), for_read=False)
        return not self.is_closed

    def _bring_up(self, record: SavedStorage) -> list[Read] | Latch:
        """Make the storage come, urgently; then look ahead. Returns what to wait for before trying again: reads, or
        room.
        """
        if not record.forward():
            if self.is_closed:
                raise OffloaderClosedError(
                    "backward asked for a saved tensor after the offloader was closed; run backward before closing"
                )
            if record.state is READING:
                if record.stored is not None and record.read is not None:
                    record.stored.tier.promote(record.read)  # a thread waits for it
            elif record.state in AWAY:
                room = self._make_room(record)
                if room is not None:
                    return room
                pending = self._begin_read(record)
                if pending is not None:
                    return pending
        if record.read is None:
            return []
        self._advance(record)  # the drive has time for it while this one is waited for
        return [record.read]

    def look_ahead(self, record: SavedStorage) -> None:
        """Bring up what backward wants after this storage. The caller holds no lock."""
        with self.accounting.lock:
            if self.given:
                self.accounting.settle()
                self.note_given()
            self._advance(record)

    def _advance(self, record: SavedStorage | KeptStorage) -> None:
        """Look ahead from where a pass has got to; then, while the budget lasts, into earlier passes."""
        current = record.home
        if current is None or self.is_closed:  # what is in memory may be had after the end
            return
        if self.accounting.has_no_memory:
            self.accounting.has_no_memory = False
            self.budget.out_of_memory()
        if not self._walk(current):
            return
        earlier = False
        for other in reversed(self.passes):
            if earlier and not self._walk(other):
                return
            earlier = earlier or other is current

    def _walk(self, current: SavedPass) -> bool:
        """Return False when the budget is used up."""
        order, records, cursor = current.expected_order(self.passes.book), current.records, current.cursor
        group, group_bytes, accounting = list[SavedStorage](), 0, self.accounting
        known = None if cursor is None else cursor.followed
        budget = min(max(self.budget.nbytes, 0 if known is None else known.plan.ahead_bytes), self._most_bytes)
        limit = None if cursor is None or cursor.limit_bytes is None else cursor.limit_bytes - cursor.reserve_bytes
        for position in range(current.next_ahead, len(order)):
            record = records[order[position]]
            if not isinstance(record, SavedStorage) or (state := record.state) in _NOT_AWAY:
                continue
            nbytes, ahead_bytes = record.nbytes, accounting.ahead_bytes + group_bytes
            # One that is larger than the whole budget goes alone.
            has_room = not ahead_bytes or ahead_bytes + nbytes <= budget
            if has_room and limit is not None and not record.is_in_memory:
                has_room = self._fits(group_bytes + nbytes, limit)
            if not has_room:
                self._read_ahead(current, group, position)
                return False
            if state is not ON_DISK and record.forward():  # else its memory has gone for certain
                record.hold_ahead([record])
                continue
            is_full = group_bytes + nbytes > _GROUP_BYTES or len(group) == _GROUP_STORAGES
            if group and (is_full or record.tier is not group[0].tier):
                if not self._read_ahead(current, group, position):
                    return False
                group, group_bytes = [], 0
            group.append(record)
            group_bytes += nbytes
        return self._read_ahead(current, group, len(order))

    def _fits(self, nbytes: int, limit_bytes: int) -> bool:
        """Return whether so much may come under a limit of what is in memory."""
        if self.accounting.counters.resident_bytes + nbytes > limit_bytes:
            self.accounting.sweep_all()
        return self.accounting.counters.resident_bytes + nbytes <= limit_bytes

    def _read_ahead(self, current: SavedPass, group: Sequence[SavedStorage], position: int) -> bool:
        """Queue the reads of storages that are wanted one after the other, as one job, and go on at a position.

        Returns:
            Whether there was memory for them.
        """
        if group:
            try:
                SavedStorage.start_reads(group, self.device, urgent=False)
            except (RuntimeError, MemoryError, OSError) as error:
                if not is_out_of_memory(error):
                    raise
                # No unpack waits for these yet: look less far ahead, and let the unpack ask for them.
                self.budget.out_of_memory()
                return False
            SavedStorage.hold_ahead(group)
        current.next_ahead = position
        return True

    def _begin_read(self, record: SavedStorage) -> list[Read] | Latch | None:
        """Read urgently. ``None``: it has begun; else memory ran out, and this is to be waited for before trying again.

        What gives memory back goes in the order of what it costs: what was brought up ahead is dropped, writes under
        way are waited for, PyTorch's cache is emptied.
        """
        try:
            record.start_reads([record], self.device, urgent=True)
        except (RuntimeError, MemoryError, OSError) as error:
            if not is_out_of_memory(error):
                raise
            dropped, reads = self._give_up()
            if dropped or reads:
                return reads
            # Until a byte has come free, or no write is left that could free any.
            resident_bytes = self.accounting.counters.resident_bytes
            room = self.accounting.admit(1, resident_bytes)
            if room is not None or self.accounting.counters.resident_bytes < resident_bytes:
                return [] if room is None else room
            if (accelerator := accelerator_of(self.device)) is not None:
                accelerator.empty_cache()
            record.start_reads([record], self.device, urgent=True)
        return None

    def _make_room(self, record: SavedStorage) -> Latch | None:
        """Under a budget, evict what was brought up ahead before what is waited for comes; see :meth:`admit`."""
        cursor = None if record.home is None else record.home.cursor
        if cursor is None or cursor.limit_bytes is None:
            return None
        self.accounting.sweep_all()
        excess = self.accounting.counters.resident_bytes + record.nbytes - cursor.limit_bytes
        if excess <= 0:
            return None
        self._drop_ahead(excess)
        return self.admit(record.nbytes, cursor.limit_bytes, wanted=record)

    def admit(self, nbytes: int, limit_bytes: int, *, wanted: SavedStorage | None = None) -> Latch | None:
        """``None``: so much more fits under the limit, or nothing can make room. Else what to wait for, without the
        lock, before asking again. The lock is held.

        When no write is left, what was to stay is written too: a plan counts on having the budget for itself, and
        another pass may be alive.

        Args:
            nbytes: of what comes.
            limit_bytes: of all that is in memory.
            wanted: what comes, if it comes back.
        """
        if self.accounting.counters.resident_bytes + nbytes > limit_bytes:
            self._drop_consumed(wanted)
        room = self.accounting.admit(nbytes, limit_bytes)
        excess = self.accounting.counters.resident_bytes + nbytes - limit_bytes
        if room is None and excess > 0 and self._evict(excess, wanted):
            room = self.accounting.admit(nbytes, limit_bytes)
        return room

    def _drop_consumed(self, wanted: SavedStorage | None) -> None:
        """Let go of what every unpack has got: a user of it holds the memory by itself."""
        for record in self._consumed:
            if record is not wanted:
                record.drop_copy()
        self._consumed.clear()

    def _evict(self, nbytes: int, wanted: SavedStorage | None) -> bool:
        """Queue writes of storages that were to stay, until so many bytes will go. Returns whether there are any.

        Of other passes first; of each pass those first that backward wants last.
        """
        if self._tier is None or self.is_closed:
            return False
        home = None if wanted is None else wanted.home
        evicted = 0
        for current in sorted(self.passes, key=lambda one: one is home):
            for record in current.records:
                if evicted >= nbytes:
                    return True
                if isinstance(record, SavedStorage) and record.can_be_evicted:
                    # Not a mark of now: this thread may be on a stream that has not waited for its producer.
                    SavedStorage.queue_writes([record], self._tier)
                    evicted += record.nbytes
        return evicted > 0

    def _give_up(self) -> tuple[bool, list[Read]]:
        """Memory ran out: let go of what was brought up too early.

        Returns:
            Whether any memory was given back, and the reads that must end before theirs can be.
        """
        self.budget.out_of_memory()
        under_way = [
            record.read
            for current in self.passes
            for record in current.records
            if isinstance(record, SavedStorage) and record.ahead
            if record.state is READING and record.read is not None
        ]
        dropped = self._drop_ahead()
        _wait_until_gone(dropped)
        return bool(dropped), under_way

    def _drop_ahead(self, nbytes: int = sys.maxsize) -> list[SavedStorage]:
        """Let go of so many bytes that were brought up before they were asked for; return what had been."""
        dropped: list[SavedStorage] = []
        dropped_bytes = 0
        for current in self.passes:
            for record in reversed(current.records):
                if dropped_bytes >= nbytes:
                    return dropped
                if isinstance(record, SavedStorage) and record.ahead and record.state is RELOADED:
                    record.drop_copy()
                    record.asked_for()
                    current.step_back(record)
                    dropped.append(record)
                    dropped_bytes += record.nbytes
        return dropped

    def _raise_if_failed(self, record: SavedStorage) -> None:
        with self.accounting.lock:
            error, record.error = record.error, None
            if error is not None:
                # The traceback of what is raised holds the graph, and the graph holds the record: neither the record
                # nor we may hold the same exception.
                self.failure = copy_of(error)
                raise error


def _wait_until_gone(dropped: Sequence[SavedStorage]) -> None:
    """A worker holds what a copy has yet to reach. It lets go as soon as the device has got there."""
    marked = [(record, record.mark) for record in dropped]
    in_flight = [(record, mark) for record, mark in marked if mark is not None and not mark.query()]
    for _, mark in in_flight:
        mark.synchronize()
    deadline_s = time.monotonic() + _MAX_WAIT_S
    while any(record.key.alive() for record, _ in in_flight) and time.monotonic() < deadline_s:
        time.sleep(0.001)
