"""The state that all saved storages of one cache share: one lock, the counters, and the sums of bytes in memory.

Dying leases leave notes here, which the next regular operation works off; a budget's wait for room is here too.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from lightning_ssd.activations.storage_state import FREED, LEAVING, ON_DISK
from lightning_ssd.common.waiting import Changes, Latch
from lightning_ssd.telemetry.stats import OffloadStats, SavedBytes
from lightning_ssd.telemetry.step_record import StepRecorder

if TYPE_CHECKING:
    from lightning_ssd.activations.kept_storage import KeptStorage
    from lightning_ssd.activations.saved_storage import SavedStorage
    from lightning_ssd.tiers.base import StoredBytes

__all__ = ["MemoryAccounting", "Watched"]

_MAX_PEAKS = 64


class MemoryAccounting:
    """Holds what all saved storages of one cache share: the lock, the counters, and the sums of bytes in memory.

    Args:
        returned: called by workers when a transfer has ended, and memory that it gives back has gone; with the bytes
            that were saved and brought back in the whole run.
    """

    def __init__(self, returned: Callable[[int], None] = lambda saved_bytes: None) -> None:
        self.returned = returned
        self.counters = OffloadStats()
        # Guards every SavedStorage and the sums below. Order: this lock may be held while taking the locks of
        # storage/ (queue, arena, pools); those never call back into us with theirs held. A lease takes none.
        self.lock = threading.Lock()
        self._write_ended = Changes(self.lock)
        self.write_failure: str | None = None  # the first one; a text, since the error's frames hold tensors
        self.ahead_bytes = 0
        self.has_no_memory = False  # a worker has found none for what is brought up ahead
        self.saved_bytes = 0
        self.most_saved_bytes = 0  # of these, in the whole run: peaks that begin anew leave it
        self.writes: set[SavedStorage] = set()  # queued or under way
        self.window_peak_bytes = 0  # of resident bytes, since it was set back
        self._peaks: deque[int] = deque(maxlen=_MAX_PEAKS)  # of the latest passes
        self._num_passes = 0
        self._away_on_host_bytes = 0
        self._worst = SavedBytes()  # since it was taken
        self.recorder: StepRecorder | None = None  # of the step under way; none: no one is recorded
        self.leaving: deque[SavedStorage] = deque()
        """Records that have let go of their memory. It counts until the program holds it no more, either."""
        self.watched: dict[int, SavedStorage | KeptStorage] = {}
        """Records that count, by their ``id``."""
        self.by_storage: dict[int, SavedStorage | KeptStorage] = {}
        """The last record of each storage, by its ``cdata``. Hooks add to it without the lock."""
        self.unwanted: deque[StoredBytes] = deque()
        """Places on tiers that are to be freed."""
        self.notes: deque[KeptStorage | SavedStorage] = deque()
        """Hooks note what they save, and its death notes it again, without the lock. They count in this order."""
        self.note = self.notes.append  # the same object for all: each would be one more for the garbage collector

    # -- callers of the following hold the lock ------------------------------------------------------------------

    def admit(self, nbytes: int, limit_bytes: int) -> Latch | None:
        """``None``: so much more fits under the limit, or no write is left that could make room. Else what to wait for,
        without the lock and not for ever, before asking again: a graph that dies elsewhere makes room too, and its
        death is only noted.
        """
        self.settle()
        self.sweep_all()
        if self.counters.resident_bytes + nbytes <= limit_bytes or not self.writes:
            return None
        return self._write_ended.next()

    def writes_gone(self, records: Iterable[SavedStorage]) -> None:
        """Queued writes have ended, in whatever way, or are no longer wanted; one that was taken back does both."""
        self.writes.difference_update(records)
        self._write_ended.tell()

    def free_unwanted(self) -> None:
        """Free the places that no record wants any more."""
        while self.unwanted:
            tier, number = self.unwanted[0].tier, len(self.unwanted)
            tier.free_all([stored for stored in self.unwanted if stored.tier is tier])
            # Last: an interrupted call is made good by the next one.
            for _ in range(number):
                stored = self.unwanted.popleft()
                if stored.tier is not tier:
                    self.unwanted.append(stored)

    def recount(self) -> None:
        """Add up again what is there: an interrupt may have come between a change and its count."""
        live = list(self.watched.values())
        self.saved_bytes = sum(record.nbytes for record in live)
        self.ahead_bytes = sum(record.nbytes for record in live if record.ahead)
        self.counters.resident_bytes = sum(record.nbytes for record in live if record.is_resident)
        self._away_on_host_bytes = sum(r.nbytes for r in live if r.is_on_host and not r.is_resident)

    def recomputed(self, nbytes: int) -> None:
        """Blocks of one pass have saved so much again by now."""
        self._worst = replace(self._worst, recomputed_bytes=max(self._worst.recomputed_bytes, nbytes))
        self.counters.recomputed_bytes = max(self.counters.recomputed_bytes, nbytes)

    def take_worst(self) -> SavedBytes | None:
        """Where saved activations were when most were saved since the last call; ``None``: none was."""
        worst, self._worst = self._worst, SavedBytes()
        return worst if worst.saved_bytes else None

    def pass_ended(self, peak_bytes: int) -> None:
        """Note the peak of a pass whose backward has ended; 0: it has saved nothing."""
        if not peak_bytes:
            return
        self._peaks.append(peak_bytes)
        self._num_passes += 1
        latest = islice(reversed(self._peaks), (self._num_passes + 1) // 2)
        self.counters.settled_peak_bytes = max(latest)

    def reset_peaks(self) -> None:
        """Start the peaks anew at what is in memory now."""
        counters = self.counters
        counters.resident_peak_bytes, counters.saved_peak_bytes = counters.resident_bytes, self.saved_bytes
        counters.settled_peak_bytes = counters.recomputed_bytes = self._num_passes = 0
        self._peaks.clear()

    def occupy(self, *records: SavedStorage) -> None:
        """Memory was taken for saved storages."""
        counters = self.counters
        for record in records:
            counters.resident_bytes += record.nbytes
            self._away_on_host_bytes -= record.nbytes if record.is_on_host else 0
            if self.recorder is not None:
                self.recorder.entered(id(record), record.nbytes)
        self._note_peaks()

    def _note_peaks(self) -> None:
        """Note peaks: more is saved, or resident, than before."""
        counters, saved_bytes = self.counters, self.saved_bytes
        if counters.resident_bytes > counters.resident_peak_bytes or counters.resident_bytes > self.window_peak_bytes:
            self.sweep_all()  # what is leaving may have gone by now
            counters.resident_peak_bytes = max(counters.resident_peak_bytes, counters.resident_bytes)
            self.window_peak_bytes = max(self.window_peak_bytes, counters.resident_bytes)
        counters.saved_peak_bytes = max(counters.saved_peak_bytes, saved_bytes)
        self.most_saved_bytes = max(self.most_saved_bytes, saved_bytes)
        if saved_bytes >= self._worst.saved_bytes:
            resident, on_host = counters.resident_bytes, self._away_on_host_bytes
            self._worst = SavedBytes(saved_bytes, resident, on_host, self._worst.recomputed_bytes)

    def vacate(self, *records: SavedStorage) -> None:
        """Memory of saved storages has gone."""
        for record in records:
            self.counters.resident_bytes -= record.nbytes
            self._away_on_host_bytes += record.nbytes if record.is_on_host else 0
            if self.recorder is not None:
                self.recorder.left(id(record), record.nbytes)

    def sweep(self, num_records: int = 4) -> None:
        """Look at some of those that are leaving: has their memory gone by now?"""
        gone: list[SavedStorage] = []
        leaving, is_gone = self.leaving, torch.UntypedStorage._expired
        for _ in range(min(num_records, len(leaving))):
            record = leaving.popleft()
            if record.state is not LEAVING:
                continue
            if not is_gone(record.key.weak):
                leaving.append(record)
            else:
                record.state = ON_DISK
                gone.append(record)
        if gone:
            self.vacate(*gone)

    def sweep_all(self) -> None:
        """Look at all that are leaving."""
        self.sweep(len(self.leaving))

    def settle(self) -> None:
        """Work off the notes, in order: count what hooks have saved; free the extents of what is dead.

        Calls nothing for what is only counted: settling runs for each storage.
        """
        notes, watched, by_storage, recorder = self.notes, self.watched, self.by_storage, self.recorder
        counters, has_grown = self.counters, False
        while notes:
            record = notes[0]
            key = id(record)
            # One without a state was never opened: others had saved its storage, or an interrupt came.
            if key not in watched and getattr(record, "state", FREED) is not FREED:
                nbytes = record.nbytes
                counters.num_saved += 1
                counters.bytes_saved += nbytes
                counters.bytes_kept += nbytes if record.stays else 0
                counters.resident_bytes += nbytes
                self.saved_bytes += nbytes
                if recorder is not None:
                    recorder.saved(key, nbytes)
                    recorder.entered(key, nbytes)
                watched[key], has_grown = record, True
            if record() is None and key in watched:
                if has_grown:
                    self._note_peaks()
                    has_grown = False
                nbytes = record.nbytes
                if recorder is not None:  # first: that its memory goes is no journey
                    recorder.freed(key, nbytes, None if record.tier is None else record.tier.name)
                if record.free():
                    counters.resident_bytes -= nbytes
                    if recorder is not None:
                        recorder.left(key, nbytes)
                elif record.is_on_host:
                    self._away_on_host_bytes -= nbytes
                if by_storage.get(record.cdata) is record:
                    by_storage.pop(record.cdata, None)
                del watched[key]
                self.saved_bytes -= nbytes
            notes.popleft()  # last: an interrupted call is made good by the next one
        if has_grown:
            self._note_peaks()
        if self.unwanted:
            self.free_unwanted()
        if self.leaving:
            self.sweep()


class Watched(weakref.ref[Any]):
    """A saved storage, as a weak reference to what autograd holds of it, so that its death is noted in C.

    Held by us: one that dies together with what it refers to is never noted. See "What happens when a lease dies" in
    ``activations/saved_storage.py``. Two are equal only if they are the same: of weak references that is not so.
    Subclasses are dataclasses for their slots alone.
    """

    __slots__ = ()

    __eq__ = object.__eq__
    __hash__ = object.__hash__
