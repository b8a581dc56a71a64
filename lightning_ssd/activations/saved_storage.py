"""The life of one saved storage, from pack to the death of the graph that saved it.

Its states are drawn in ``storage_state.py``.

Who holds what: autograd's graph holds :class:`SavedTensor` objects, these share one :class:`Lease`, and the lease
holds the :class:`SavedStorage`. When the last of them dies, the bytes can be asked for no more. Nothing here
depends on steps, modules or stack traces.

Note: What happens when a lease dies
    A lease can die anywhere: in autograd's thread, in a worker, or inside the garbage collector while the same
    thread holds any lock of ours; and Ctrl-C that fell into Python code that runs then would be lost. So none of ours
    does. The lease is what holds the memory, which goes with it; its weak reference puts a note into a queue, in C,
    which the :class:`~lightning_ssd.activations.accounting.MemoryAccounting` works off at the next regular operation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from lightning_ssd.activations.accounting import NO_LEASE, Death, MemoryAccounting
from lightning_ssd.activations.operation import Operation
from lightning_ssd.activations.saved_parts import SavedParts
from lightning_ssd.activations.storage_state import AWAY, READY, State
from lightning_ssd.common.inplace_edits import Origin, VersionProbe
from lightning_ssd.common.tensors import StorageKey, TensorSpec, is_released
from lightning_ssd.errors import OffloaderClosedError
from lightning_ssd.tiers.base import NoMemoryToReadError, ReadRequest, StoredBytes, WriteRequest
from lightning_ssd.tiers.jobs import Read
from lightning_ssd.tiers.streams import PASSED, StreamEvent
from lightning_ssd.tiers.tier import Tier

if TYPE_CHECKING:
    from lightning_ssd.activations.saved_pass import SavedPass

__all__ = ["Lease", "SavedStorage", "SavedTensor", "TierCopy", "open_saved"]


class TierCopy:
    """The bytes on a tier, from the end of their write until the storage is freed, and what brings them back."""

    __slots__ = ("error", "mark", "read", "stored")

    def __init__(self, stored: StoredBytes) -> None:
        self.stored = stored
        self.read: Read | None = None  # under way
        self.error: BaseException | None = None  # of the last read, until it is raised
        # What was read last is there once this has passed. It stays when the memory is dropped: that may be found alive
        # (a tier holds it until its copy has passed) and handed out.
        self.mark: StreamEvent | None = None


class SavedStorage:
    """One storage that autograd saved, whatever number of tensors over it."""

    __slots__ = (
        "accounting",
        "ahead",
        "copy",
        "home",
        "identity",
        "index",
        "is_on_host",
        "key",
        "lease",
        "nbytes",
        "num_tensors",
        "num_unpacked",
        "operation",
        "parts",
        "probe",
        "produced",
        "state",
        "tier",
    )

    stays = False

    def __init__(
        self,
        accounting: MemoryAccounting,
        storage: torch.UntypedStorage,
        nbytes: int,
        probe: VersionProbe,
        parts: SavedParts,
        *,
        index: int,
    ) -> None:
        self.accounting = accounting
        self.key = StorageKey(storage)
        # Held as long as the cache finds this record by its `cdata`: `key` changes with each reload, and without this
        # one the cdata of the packed storage would be recycled and name another storage.
        self.identity = self.key
        self.nbytes = nbytes
        self.probe = probe
        self.parts = parts
        self.produced = PASSED  # what has passed when the packed bytes are there
        self.operation: Operation | None = None  # that may fill it after having saved it
        self.index = index
        self.state = State.KEPT
        self.tier: Tier | None = None  # where it was sent
        self.is_on_host = False
        """Whether it goes to host memory, and so to no drive."""
        self.copy: TierCopy | None = None  # from LEAVING on
        self.ahead = False  # brought up, or held back, before it was asked for
        self.num_tensors = 0
        self.num_unpacked = 0
        self.lease = NO_LEASE
        """Gives the lease, as long as it lives."""
        self.home: SavedPass | None = None  # the pass that saw it first

    @property
    def storage(self) -> torch.UntypedStorage | None:
        """The memory, while we hold it; ``None`` too once the lease is dead, even if the program holds it."""
        lease = self.lease()
        return None if lease is None else lease.storage

    @storage.setter
    def storage(self, storage: torch.UntypedStorage | None) -> None:
        lease = self.lease()
        if lease is not None:
            lease.storage = storage

    # -- callers of the following hold the accounting lock ---------------------------------------------------------

    def is_same_value(self, version: int, tensor: torch.Tensor) -> bool:
        """Whether a tensor over our storage, now at ``version``, still has the bytes that we saved."""
        return version == self.probe.saved == self.probe.version and self.probe.shares_counter(tensor)

    def shows(self, tensor: torch.Tensor, mark: Callable[[], StreamEvent]) -> bool:
        """Whether a tensor with the value that we saved may be saved with it: it shows bytes that we hold or have
        written. If it shows more, these are there when ``mark`` has passed, and no copy made before has them.
        """
        if self.parts.covers(tensor):
            return True
        if self.state is not State.KEPT and self.state is not State.TAKEN_BACK:
            return False
        self.parts.add(tensor)
        self.produced = mark()
        return True

    @property
    def is_in_memory(self) -> bool:
        """Whether bringing it up takes no more memory."""
        return self.state in (State.QUEUED, State.WRITING, State.LEAVING)

    @property
    def is_resident(self) -> bool:
        """Whether its memory counts."""
        return self.state is not State.ON_DISK and self.state is not State.FREED

    @property
    def can_be_evicted(self) -> bool:
        """Whether it was to stay, has never been sent anywhere, and no thread is about to unpack it once more."""
        if self.state is not State.KEPT or 0 < self.num_unpacked < self.num_tensors:
            return False
        lease = self.lease()
        return lease is not None and lease.storage is not None and (self.operation is None or self.is_filled())

    def is_filled(self) -> bool:
        """Whether its bytes will be there when ``produced`` has passed; see the note in ``operation.py``."""
        operation = self.operation  # once: a flush by a signal handler may find that it is over
        if operation is None:
            return True
        if operation.may_run and self.home is not None and not self.home.is_over:
            return False
        self.operation = None
        self.produced = self.produced.again()
        return True

    @property
    def is_saved_whole(self) -> bool:
        """Whether all that may be saved of it has been: all of it, or the program holds it no more."""
        return self.parts.is_whole or is_released(self.identity)

    @staticmethod
    def queue_writes(records: Sequence[SavedStorage], tier: Tier) -> None:
        """KEPT -> QUEUED, in one job of the tier. Where the tier has no room nothing changes."""
        # After an interrupt they may be in the queue: they stay, and no other tier gets them.
        stay, state = records, State.TAKEN_BACK
        try:
            for record in records:
                record.tier, record.is_on_host, record.state = tier, tier.name == "host", State.QUEUED
                record.accounting.writes.add(record)
            have_room = tier.write_all(
                [WriteRequest(one, one.nbytes, one.produced, f"saved storage {one.index}") for one in records]
            )
            stay, state = [one for one, has_room in zip(records, have_room, strict=True) if not has_room], State.KEPT
        finally:
            for record in stay:
                if state is State.KEPT:
                    record.tier, record.is_on_host = None, False
                record.state = state
                record._write_gone()

    def _write_gone(self) -> None:
        """Our write has ended or is no longer wanted; a worker may tell of the end of one that was taken back."""
        self.accounting.write_gone(self)

    def forward(self) -> bool:
        """Hand the bytes over without a read, if they are in memory in any way. Afterwards the state is in READY."""
        state = self.state
        if state is State.QUEUED or state is State.WRITING:
            if state is State.QUEUED:
                self.accounting.counters.writes_cancelled_bytes += self.nbytes
                self._write_gone()
            self.state = State.TAKEN_BACK
        elif state in AWAY:
            storage = self.key.resolve()
            if storage is None or storage.nbytes() != self.nbytes:
                return False
            self.storage = storage
            if self.home is not None:
                # What was read back may be found alive too, dropped by us while the operation that asked still runs.
                if self.key is self.identity and self.index not in self.home.stayed:
                    self.accounting.counters.bytes_held_elsewhere += self.nbytes
                self.home.stayed.add(self.index)
            if state is State.ON_DISK:  # else it is still counted
                self.accounting.occupy(self)
            self.state = State.RELOADED
        else:
            return state in READY
        self.accounting.counters.bytes_forwarded += self.nbytes
        return True

    def start_read(self, device: torch.device, *, urgent: bool) -> None:
        """AWAY -> READING; see :meth:`start_reads`."""
        self.start_reads([self], device, urgent=urgent)

    @staticmethod
    def start_reads(records: Sequence[SavedStorage], device: torch.device, *, urgent: bool) -> None:
        """AWAY -> READING, in one job of the tier that has them. On a device, and where it is urgent, allocates in the
        calling thread, on its current stream.

        Out of memory changes nothing.
        """
        going = list[tuple[SavedStorage, TierCopy, State]]()
        for record in records:
            copy, before = record.copy, record.state
            if copy is None:
                raise RuntimeError(f"saved storage {record.index} is {before.value}, with nothing stored; report it")
            going.append((record, copy, before))
        try:
            for record, copy, _ in going:
                copy.error, record.state = None, State.READING  # before a worker can end it
            requests = [ReadRequest(record, copy.stored) for record, copy, _ in going]
            read = requests[0].stored.tier.read_all(requests, device, urgent=urgent)
            for _, copy, _ in going:
                copy.read = read
        except BaseException:
            for record, _, before in going:
                record.state = before
            raise
        for record, _, before in going:
            if before is State.LEAVING:  # its former memory has gone, only it was not looked at yet
                record.accounting.vacate(record)
            record.accounting.occupy(record)

    @property
    def read(self) -> Read | None:
        """The read that is under way, with others in it."""
        return None if self.copy is None else self.copy.read

    def promote_read(self) -> None:
        """Make the read that is under way urgent: a thread waits for it."""
        if self.copy is not None and self.copy.read is not None:
            self.copy.stored.tier.promote(self.copy.read)

    def drop_copy(self) -> None:
        """RELOADED -> LEAVING: the tier still has the bytes."""
        if self.state is State.RELOADED and self.storage is not None:
            self._leave()

    def _leave(self) -> None:
        """Let go of the memory. It counts until the program holds it no more, either."""
        self.accounting.note_leaving(self)
        self.state = State.LEAVING
        self.storage = None

    def hold_ahead(self) -> None:
        """Count this towards the prefetch budget until it is asked for."""
        if not self.ahead:
            self.ahead = True
            self.accounting.ahead_bytes += self.nbytes

    def asked_for(self) -> None:
        """Count the memory as in use from now on, not as ahead: autograd unpacks."""
        if self.ahead:
            self.ahead = False
            self.accounting.ahead_bytes -= self.nbytes

    def free(self) -> None:
        """Free the storage: its lease is dead, and no unpack asks again.

        A transfer under way frees the extent when it ends.

        Once more after it was interrupted: does the rest.
        """
        state, home, copy = self.state, self.home, self.copy
        if self.ahead:
            self.asked_for()
        if state is State.QUEUED:
            self._write_gone()
        if home is not None and home.recorder is not None:
            home.freed(self)
        self.home = None
        self.produced = PASSED
        if state is not State.ON_DISK and state is not State.FREED:
            self.accounting.vacate(self)
        self.state = State.FREED
        self.lease = NO_LEASE
        if copy is not None and copy.read is None:
            self._free_extent()

    def _free_extent(self) -> None:
        if self.copy is not None and not self.copy.stored.is_freed:  # else an interrupt has come when it was freed
            self.copy.stored.tier.free(self.copy.stored)
        self.copy = None

    # -- called by the tier's workers ----------------------------------------------------------------------------

    def write_begins(self) -> torch.UntypedStorage | None:
        """QUEUED -> WRITING, unless it was taken back meanwhile."""
        with self.accounting.lock:
            # Asked once: the lease may die between two questions, and the receiver of a storage has to end its write.
            lease = self.lease()
            storage: torch.UntypedStorage | None = None if lease is None else lease.storage
            if self.state is not State.QUEUED or storage is None:
                return None
            self.state = State.WRITING
            return storage

    def is_wanted(self) -> bool:
        return self.state is State.WRITING

    def write_ended(self, stored: StoredBytes | None, error: BaseException | None) -> None:
        """WRITING -> LEAVING, where memory returns; or, after a failure, TAKEN_BACK: kept, with nothing lost.

        A failure may come before the write has begun (a device that is lost while its stream is waited for): from
        QUEUED, or after it was taken back.
        """
        accounting, counters = self.accounting, self.accounting.counters
        lease = storage = None
        try:
            with accounting.lock:
                accounting.settle()
                if error is not None:
                    self._note_failure(error)
                elif stored is not None:
                    counters.bytes_host += stored.body_nbytes if self.is_on_host else 0
                    counters.bytes_written += 0 if self.is_on_host else stored.body_nbytes
                    lease = self.lease()
                    storage = None if lease is None else lease.storage
                    if storage is not None and self.state is State.WRITING and stored.is_complete:
                        self.copy = TierCopy(stored)
                        self._leave()
                    else:  # forwarded or freed meanwhile
                        stored.tier.free(stored)
        finally:
            # The memory goes here, outside of the lock: unmapping it can take milliseconds.
            del lease, storage
            with accounting.lock:  # last, and always: a budget waits for this, and then finds the memory gone
                accounting.write_gone(self)
        accounting.returned(counters.bytes_come)

    def _note_failure(self, error: BaseException) -> None:
        self.accounting.counters.failures += 1
        self.accounting.counters.fallbacks += 1
        self.accounting.counters.bytes_kept += self.nbytes
        self.accounting.write_failure = self.accounting.write_failure or str(error) or repr(error)
        if self.state in (State.QUEUED, State.WRITING):
            self.state = State.TAKEN_BACK

    def read_ended(
        self, storage: torch.UntypedStorage | None, mark: StreamEvent | None, error: BaseException | None
    ) -> None:
        """READING -> RELOADED, or back to ON_DISK with the error for the thread that waits."""
        with self.accounting.lock:
            self.accounting.settle()
            counters, copy = self.accounting.counters, self.copy
            # The thread that waits asks again then, with memory of its own.
            is_refused = isinstance(error, NoMemoryToReadError)
            if error is not None:
                counters.failures += not (is_refused or isinstance(error, OffloaderClosedError))
            if copy is None:  # freed, after an interrupt
                return
            copy.read = None
            if error is not None:
                copy.error = None if is_refused else error
            elif not self.is_on_host:
                counters.bytes_read += copy.stored.body_nbytes
            if self.state is State.FREED:
                self._free_extent()  # the lease died while we read
            elif self.state is not State.READING:
                pass  # an interrupt came while it was asked for, and the thread that asked knows of no read
            elif storage is None:
                self.state = State.ON_DISK
                self.accounting.vacate(self)
                self.asked_for()
                if is_refused and self.home is not None:
                    self.accounting.has_no_memory = True
                    self.home.step_back(self)
            else:
                self.storage, copy.mark = storage, mark
                self.key = StorageKey(storage)
                self.state = State.RELOADED
        self.accounting.returned(self.accounting.counters.bytes_come)

    def take_error(self) -> BaseException | None:
        """Return why the last read has failed, to be raised."""
        if self.copy is None:
            return None
        error, self.copy.error = self.copy.error, None
        return error


class Lease:
    """Held by every saved tensor over one storage; its death frees the storage's memory and extent.

    It holds the memory, when it is there, on behalf of the record: a write under way does so itself.
    """

    __slots__ = ("__weakref__", "record", "storage")

    record: SavedStorage
    storage: torch.UntypedStorage | None


def open_saved(
    accounting: MemoryAccounting,
    current: SavedPass,
    storage: torch.UntypedStorage,
    nbytes: int,
    probe: VersionProbe,
    parts: SavedParts,
    produced: StreamEvent = PASSED,
) -> Lease:
    """Begin to watch a storage that may move, and add it to its pass. Takes no lock: settling counts it.

    Args:
        accounting: of all saved storages.
        current: the pass that saves it.
        storage: with the bytes.
        nbytes: of the storage.
        probe: of the first saved tensor over it.
        parts: that are saved of it.
        produced: its bytes are there once this has passed.
    """
    record, lease = SavedStorage(accounting, storage, nbytes, probe, parts, index=len(current.records)), Lease()
    record.home, record.produced = current, produced
    lease.record, lease.storage = record, storage
    record.lease = death = Death(lease, accounting.notes.append)
    death.record = record
    current.records.append(record)
    current.sizes.append(nbytes)
    if current.recorder is not None:
        current.recorder.packed(nbytes, record.identity, accounting.counters.resident_bytes)
    current.packed_s.append(time.perf_counter())  # last: a pass with lists of several lengths was interrupted
    accounting.notes.append(record)
    return lease


class SavedTensor(NamedTuple):
    """Stands in autograd for a tensor: how to rebuild it, and its share in the storage."""

    lease: Lease
    spec: TensorSpec
    probe: VersionProbe
    origin: Origin | None
