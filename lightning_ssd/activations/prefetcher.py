"""Brings storages up ahead of their use, within a byte budget, in the order that earlier passes recorded."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import torch

from lightning_ssd.activations.accounting import MemoryAccounting
from lightning_ssd.activations.live_passes import LivePasses
from lightning_ssd.activations.saved_pass import SavedPass
from lightning_ssd.activations.saved_storage import SavedStorage
from lightning_ssd.activations.storage_state import READY, State
from lightning_ssd.memory.readings import is_out_of_memory
from lightning_ssd.scheduling.pass_profile import PrefetchBudget
from lightning_ssd.tiers.jobs import Read

__all__ = ["Prefetcher"]


_NOT_AWAY = (*READY, State.READING, State.FREED)
_GROUP_STORAGES = 16
_GROUP_BYTES = 16 << 20
"""Most that come back in one job, which costs as much Python as a small read takes. It is as long as one chunk, so that
an urgent read waits no longer."""
_MAX_WAIT_S = 1.0
"""Lets a worker let go of memory, unless the program holds it."""
_SHARE = 4
"""One part in so many of what is free when backward begins may be brought up ahead."""


class Prefetcher:
    """Walks the expected order. The accounting lock is held by every caller.

    Bytes count as *ahead* from the moment their memory is taken (or, for a write that is taken back, given up)
    until an unpack asks for them.
    """

    def __init__(
        self, accounting: MemoryAccounting, passes: LivePasses, budget: PrefetchBudget, device: torch.device
    ) -> None:
        self._budget = budget
        self._most_bytes = sys.maxsize
        self._accounting = accounting
        self._passes = passes
        self._device = device

    def begin_backward(self) -> None:
        """Look at what memory there is: gradients and temporaries are to come, and know nothing of us."""
        available_bytes = self._passes.available()
        self._most_bytes = sys.maxsize if available_bytes is None else available_bytes // _SHARE

    def advance(self, current: SavedPass) -> None:
        """Look ahead from where ``current`` has got to; then, while the budget lasts, into earlier passes."""
        if self._accounting.has_no_memory:
            self._accounting.has_no_memory = False
            self._budget.out_of_memory()
        if not self._walk(current):
            return
        earlier = False
        for other in reversed(self._passes):
            if earlier and not self._walk(other):
                return
            earlier = earlier or other is current

    def _walk(self, current: SavedPass) -> bool:
        """Return False when the budget is used up."""
        order, records, cursor = current.expected_order(self._passes.book), current.records, current.cursor
        group, group_bytes, accounting = list[SavedStorage](), 0, self._accounting
        known = None if cursor is None else cursor.followed
        budget = min(max(self._budget.nbytes, 0 if known is None else known.plan.ahead_bytes), self._most_bytes)
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
                self._read(current, group, position)
                return False
            if state is not State.ON_DISK and record.forward():  # else its memory has gone for certain
                record.hold_ahead()
                continue
            is_full = group_bytes + nbytes > _GROUP_BYTES or len(group) == _GROUP_STORAGES
            if group and (is_full or record.tier is not group[0].tier):
                if not self._read(current, group, position):
                    return False
                group, group_bytes = [], 0
            group.append(record)
            group_bytes += nbytes
        return self._read(current, group, len(order))

    def _fits(self, nbytes: int, limit_bytes: int) -> bool:
        """Return whether so much may come under a limit of what is in memory."""
        if self._accounting.counters.resident_bytes + nbytes > limit_bytes:
            self._accounting.sweep_all()
        return self._accounting.counters.resident_bytes + nbytes <= limit_bytes

    def _read(self, current: SavedPass, group: Sequence[SavedStorage], position: int) -> bool:
        """Queue the reads of storages that are wanted one after the other, as one job, and go on at a position.

        Returns:
            Whether there was memory for them.
        """
        if group:
            try:
                SavedStorage.start_reads(group, self._device, urgent=False)
            except (RuntimeError, MemoryError, OSError) as error:
                if not is_out_of_memory(error):
                    raise
                # No unpack waits for these yet: look less far ahead, and let the unpack ask for them.
                self._budget.out_of_memory()
                return False
            for record in group:
                record.hold_ahead()
        current.next_ahead = position
        return True

    def give_up(self) -> tuple[bool, list[Read]]:
        """Memory ran out: let go of what was brought up too early.

        Returns:
            Whether any memory was given back, and the reads that must end before theirs can be.
        """
        self._budget.out_of_memory()
        under_way = [
            record.read
            for current in self._passes
            for record in current.records
            if isinstance(record, SavedStorage) and record.ahead
            if record.state is State.READING and record.read is not None
        ]
        dropped = self.drop_ahead()
        _wait_until_gone(dropped)
        return bool(dropped), under_way

    def drop_ahead(self, nbytes: int = sys.maxsize) -> list[SavedStorage]:
        """Let go of so many bytes that were brought up before they were asked for; return what had been."""
        dropped: list[SavedStorage] = []
        dropped_bytes = 0
        for current in self._passes:
            for record in reversed(current.records):
                if dropped_bytes >= nbytes:
                    return dropped
                if isinstance(record, SavedStorage) and record.ahead and record.state is State.RELOADED:
                    record.drop_copy()
                    record.asked_for()
                    current.step_back(record)
                    dropped.append(record)
                    dropped_bytes += record.nbytes
        return dropped


def _wait_until_gone(dropped: Sequence[SavedStorage]) -> None:
    """A worker holds what a copy has yet to reach. It lets go as soon as the device has got there."""
    marked = [(record, record.mark) for record in dropped]
    in_flight = [(record, mark) for record, mark in marked if mark is not None and not mark.query()]
    for _, mark in in_flight:
        mark.synchronize()
    deadline_s = time.monotonic() + _MAX_WAIT_S
    while any(record.key.alive() for record, _ in in_flight) and time.monotonic() < deadline_s:
        time.sleep(0.001)
