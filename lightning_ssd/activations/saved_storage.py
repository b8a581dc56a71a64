"""The life of one saved storage, from pack to the death of the graph that saved it.

Its states are drawn in ``storage_state.py``.

Who holds what: autograd's graph holds :class:`SavedTensor` objects, these share one :class:`Lease`, and the lease
holds the :class:`SavedStorage`. When the last of them dies, the bytes can be asked for no more. Nothing here
depends on steps, modules or stack traces.

Note: What happens when a lease dies
    A lease can die anywhere: in autograd's thread, in a worker, or inside the garbage collector while the same
    thread holds any lock of ours; and Ctrl-C that fell into Python code that runs then would be lost. So none of ours
    does. The lease holds the memory, which goes with it. The record refers to it weakly, and its death puts the
    record into a queue, in C,
    which the :class:`~lightning_ssd.activations.accounting.MemoryAccounting` works off at the next regular operation.

Note: A storage that is saved in parts
    PyTorch's own operations count a version when they write into a storage. A kernel from elsewhere (Triton, an
    extension, NumPy on a CPU) does not: it may fill the second half of a buffer when the first half has been saved, or
    even written. So what is saved later is there behind a mark taken *then*, and no copy that was made before is used
    for it. The program holds until then what will be saved later, so that writing it earlier would free nothing.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from lightning_ssd.activations.accounting import MemoryAccounting, Watched
from lightning_ssd.activations.operation import Operation
from lightning_ssd.activations.storage_state import (
    AWAY,
    FREED,
    KEPT,
    LEAVING,
    ON_DISK,
    QUEUED,
    READING,
    READY,
    RELOADED,
    TAKEN_BACK,
    WRITING,
    State,
)
from lightning_ssd.common.inplace_edits import Probe, probed
from lightning_ssd.common.tensors import StorageKey, TensorSpec, is_released, new_tuple
from lightning_ssd.errors import OffloaderClosedError
from lightning_ssd.tiers.base import NoMemoryToReadError, ReadEnd, ReadRequest, StoredBytes, WriteEnd, WriteRequest
from lightning_ssd.tiers.jobs import Read
from lightning_ssd.tiers.streams import PASSED, StreamEvent
from lightning_ssd.tiers.tier import Tier

if TYPE_CHECKING:
    from lightning_ssd.activations.saved_pass import SavedPass

__all__ = ["Lease", "SavedStorage", "SavedTensor", "begin_saved", "open_saved", "shows_all"]


@dataclass(init=False, repr=False, eq=False, slots=True)
class SavedStorage(Watched, Probe):
    """One storage that autograd saved, whatever number of tensors over it; the probe of the first one.

    A weak reference to its lease, which it returns as long as that lives. :func:`open_saved` begins it.
    """

    stays = False
    accounting: MemoryAccounting
    alias: torch.Tensor
    ahead: bool  # whether it was brought up, or held back, before it was asked for
    cdata: int  # number of the storage that was saved
    error: BaseException | None  # error of the last read, until it is raised
    home: SavedPass | None  # the pass that saw it first
    identity: StorageKey
    """Key of the storage that was saved. Held as long as the cache finds this record by its number: ``key`` changes
    when reloaded memory is dropped, and without this one the number would be recycled and name another storage."""
    index: int
    is_on_host: bool  # whether it goes to host memory, and so to no drive
    key: StorageKey  # of the memory that was let go last
    mark: StreamEvent | None
    """The memory that was read last is there once this has passed. The mark stays when the memory is dropped, which may
    be found alive (a tier holds it until its copy has passed) and handed out."""
    nbytes: int
    num_tensors: int
    num_unpacked: int
    operation: Operation | None  # the operation that may fill it after having saved it
    is_whole: bool  # whether the first saved tensor showed all of it
    owner: weakref.ref[torch.Tensor]
    produced: StreamEvent  # passes when the packed bytes are there
    read: Read | None  # the read that is under way, with others in it
    saved: int
    state: State
    stored: StoredBytes | None  # the bytes on a tier, from the end of their write until the storage is freed
    tier: Tier | None  # tier that it was sent to

    @property
    def storage(self) -> torch.UntypedStorage | None:
        """The memory, while we hold it; ``None`` too once the lease is dead, even if the program holds it."""
        lease = self()
        return None if lease is None else lease.storage

    @storage.setter
    def storage(self, storage: torch.UntypedStorage | None) -> None:
        lease = self()
        if lease is not None:
            lease.storage = storage

    # -- callers of the following hold the accounting lock ---------------------------------------------------------

    def is_same_value(self, version: int, tensor: torch.Tensor) -> bool:
        """Whether a tensor over our storage, now at ``version``, still has the bytes that we saved."""
        return version == self.saved == self.alias._version and self.shares_counter(tensor)

    def shares_with_others(self, mark: Callable[[], StreamEvent]) -> bool:
        """Whether a tensor with the value that we saved may be saved with it. See the note above on parts."""
        if self.is_whole:
            return True
        if self.state is not KEPT and self.state is not TAKEN_BACK:
            return False
        self.produced = mark()
        return True

    @property
    def is_in_memory(self) -> bool:
        """Whether bringing it up takes no more memory."""
        return self.state in (QUEUED, WRITING, LEAVING)

    @property
    def is_resident(self) -> bool:
        """Whether its memory counts."""
        return self.state is not ON_DISK and self.state is not FREED

    @property
    def can_be_evicted(self) -> bool:
        """Whether it was to stay, has never been sent anywhere, and no thread is about to unpack it once more."""
        if self.state is not KEPT or 0 < self.num_unpacked < self.num_tensors:
            return False
        lease = self()
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
        return self.is_whole or is_released(self.identity)

    @staticmethod
    def queue_writes(records: Sequence[SavedStorage], tier: Tier) -> None:
        """KEPT -> QUEUED, in one job of the tier. Where the tier has no room nothing changes."""
        # After an interrupt they may be in the queue: they stay, and no other tier gets them.
        stay, state = records, TAKEN_BACK
        try:
            for record in records:
                record.tier, record.is_on_host, record.state = tier, tier.name == "host", QUEUED
                record.accounting.writes.add(record)
            have_room = tier.write_all(
                [
                    new_tuple(WriteRequest, (one, one.nbytes, one.produced, f"saved storage {one.index}"))
                    for one in records
                ]
            )
            stay, state = [one for one, has_room in zip(records, have_room, strict=True) if not has_room], KEPT
        finally:
            for record in stay:
                if state is KEPT:
                    record.tier, record.is_on_host = None, False
                record.state = state
            if stay:
                stay[0].accounting.writes_gone(stay)

    def forward(self) -> bool:
        """Hand the bytes over without a read, if they are in memory in any way. Afterwards the state is in READY."""
        state = self.state
        if state is QUEUED or state is WRITING:
            if state is QUEUED:
                self.accounting.counters.writes_cancelled_bytes += self.nbytes
                self.accounting.writes_gone([self])
            self.state = TAKEN_BACK
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
            if state is ON_DISK:  # else it is still counted
                self.accounting.occupy(self)
            self.state = RELOADED
        else:
            return state in READY
        self.accounting.counters.bytes_forwarded += self.nbytes
        return True

    @staticmethod
    def start_reads(records: Sequence[SavedStorage], device: torch.device, *, urgent: bool) -> None:
        """AWAY -> READING, in one job of the tier that has them. On a device, and where it is urgent, allocates in the
        calling thread, on its current stream.

        Out of memory changes nothing.
        """
        before_it, requests = [record.state for record in records], list[ReadRequest]()
        for record in records:
            if record.stored is None:
                raise RuntimeError(f"saved storage {record.index} is {record.state.value}, but nowhere; report it")
            requests.append(new_tuple(ReadRequest, (record, record.stored, None, None)))
        try:
            for record in records:
                record.error, record.state = None, READING  # before a worker can end it
            read = requests[0].stored.tier.read_all(requests, device, urgent=urgent)
            for record in records:
                record.read = read
        except BaseException:
            for record, before in zip(records, before_it, strict=True):
                record.state = before
            raise
        accounting = records[0].accounting
        # Of those that were leaving the former memory has gone, only they were not looked at yet.
        accounting.vacate(*[one for one, before in zip(records, before_it, strict=True) if before is LEAVING])
        accounting.occupy(*records)

    def drop_copy(self) -> None:
        """RELOADED -> LEAVING: the tier still has the bytes."""
        lease = self()
        storage = None if lease is None else lease.storage
        if self.state is RELOADED and lease is not None and storage is not None:
            if self.key.cdata != storage._cdata:  # that was read, and not yet dropped before
                self.key = StorageKey(storage)
            self._leave(lease)

    def _leave(self, lease: Lease) -> None:
        """Let go of the memory. It counts until the program holds it no more, either."""
        self.accounting.leaving.append(self)
        self.state = LEAVING
        lease.storage = None

    @staticmethod
    def hold_ahead(records: Sequence[SavedStorage]) -> None:
        """Count these towards the prefetch budget until they are asked for."""
        for record in records:
            if not record.ahead:
                record.ahead = True
                record.accounting.ahead_bytes += record.nbytes

    def asked_for(self) -> None:
        """Count the memory as in use from now on, not as ahead: autograd unpacks."""
        if self.ahead:
            self.ahead = False
            self.accounting.ahead_bytes -= self.nbytes

    def free(self) -> bool:
        """Free the storage, whose lease is dead, so that no unpack asks again; return whether its memory counts.

        A transfer under way frees the extent when it ends. Once more after it was interrupted: does the rest.
        """
        state, home = self.state, self.home
        if self.ahead:
            self.ahead = False
            self.accounting.ahead_bytes -= self.nbytes
        if state is QUEUED:
            self.accounting.writes_gone([self])
        if home is not None and home.recorder is not None:
            home.freed(self)
        self.home = None
        if home is not None:
            home.num_freed += 1
        self.produced, self.mark = PASSED, None
        self.state = FREED
        if self.stored is not None and self.read is None:
            self.accounting.unwanted.append(self.stored)
            self.stored = None
        return state is not ON_DISK and state is not FREED

    # -- called by the tier's workers ----------------------------------------------------------------------------

    @staticmethod
    def all_begin(records: Sequence[SavedStorage]) -> list[torch.UntypedStorage | None]:
        """QUEUED -> WRITING, unless it was taken back meanwhile."""
        storages = list[torch.UntypedStorage | None]()
        with records[0].accounting.lock:
            for record in records:
                # Asked once: the lease may die between two questions, and the receiver of a storage ends its write.
                lease = record()
                storage: torch.UntypedStorage | None = None if lease is None else lease.storage
                if record.state is QUEUED and storage is not None:
                    record.state = WRITING
                else:
                    storage = None
                storages.append(storage)
        return storages

    def is_wanted(self) -> bool:
        return self.state is WRITING

    @staticmethod
    def all_written(ends: Sequence[WriteEnd]) -> None:
        """WRITING -> LEAVING, where memory returns; or, after a failure, TAKEN_BACK: kept, with nothing lost.

        A failure may come before the write has begun (a device that is lost while its stream is waited for): from
        QUEUED, or after it was taken back.
        """
        accounting: MemoryAccounting = ends[0][0].accounting
        counters, held = accounting.counters, list[object]()
        try:
            with accounting.lock:
                accounting.settle()
                for record, stored, error in ends:
                    if error is not None:
                        record._note_failure(error)
                    if stored is None:
                        continue
                    if record.is_on_host:
                        counters.bytes_host += stored.body_nbytes
                    else:
                        counters.bytes_written += stored.body_nbytes
                    lease = record()
                    storage = None if lease is None else lease.storage
                    held.append((lease, storage))
                    if (
                        lease is not None
                        and storage is not None
                        and record.state is WRITING
                        and not stored.missing_nbytes
                    ):
                        record.stored = stored
                        record._leave(lease)
                    else:  # forwarded or freed meanwhile
                        accounting.unwanted.append(stored)
                accounting.free_unwanted()
        finally:
            # The memory goes here, outside of the lock: unmapping it can take milliseconds.
            lease = storage = None
            held.clear()
            with accounting.lock:  # last, and always: a budget waits for this, and then finds the memory gone
                accounting.writes_gone([record for record, _, _ in ends])
        accounting.returned(counters.bytes_come)

    def _note_failure(self, error: BaseException) -> None:
        self.accounting.counters.failures += 1
        self.accounting.counters.fallbacks += 1
        self.accounting.counters.bytes_kept += self.nbytes
        self.accounting.write_failure = self.accounting.write_failure or str(error) or repr(error)
        if self.state in (QUEUED, WRITING):
            self.state = TAKEN_BACK

    @staticmethod
    def all_read(ends: Sequence[ReadEnd]) -> None:
        """READING -> RELOADED, or back to ON_DISK with the error for the thread that waits."""
        accounting: MemoryAccounting = ends[0][0].accounting
        with accounting.lock:
            accounting.settle()
            for record, storage, mark, error in ends:
                lease, stored, record.read = record(), record.stored, None
                if error is not None:
                    record._read_failed(error)
                elif stored is not None and storage is not None:  # else it was freed, after an interrupt
                    accounting.counters.bytes_read += 0 if record.is_on_host else stored.body_nbytes
                    if record.state is READING:
                        record.mark = mark
                        if lease is not None:
                            lease.storage = storage
                        record.state = RELOADED
                if stored is not None and record.state is FREED:  # the lease died while we read
                    accounting.unwanted.append(stored)
                    record.stored = None
            accounting.free_unwanted()
        accounting.returned(accounting.counters.bytes_come)

    def _read_failed(self, error: BaseException) -> None:
        # The thread that waits asks again then, with memory of its own.
        is_refused = isinstance(error, NoMemoryToReadError)
        self.accounting.counters.failures += not (is_refused or isinstance(error, OffloaderClosedError))
        if self.stored is not None:
            self.error = None if is_refused else error
        if self.stored is None or self.state is not READING:
            return  # or an interrupt came while it was asked for, and the thread that asked knows of no read
        self.state = ON_DISK
        self.accounting.vacate(self)
        self.asked_for()
        if is_refused and self.home is not None:
            self.accounting.has_no_memory = True
            self.home.step_back(self)


class Lease:
    """Held by every saved tensor over one storage; its death frees the storage's memory and extent.

    It holds the memory, when it is there, on behalf of the record: a write under way does so itself.
    """

    __slots__ = ("__weakref__", "record", "storage")

    record: SavedStorage
    storage: torch.UntypedStorage | None


def begin_saved(accounting: MemoryAccounting, tensor: torch.Tensor) -> Lease:
    """Watch a tensor whose storage may move. Counts nowhere before :func:`open_saved`.

    Args:
        accounting: of all saved storages.
        tensor: the first saved one over its storage.
    """
    lease = Lease()
    lease.record = record = SavedStorage(lease, accounting.note)
    record.alias, record.owner, record.saved = probed(tensor)
    return lease


def open_saved(
    accounting: MemoryAccounting,
    current: SavedPass,
    lease: Lease,
    storage: torch.UntypedStorage,
    nbytes: int,
    is_whole: bool,
    produced: StreamEvent = PASSED,
    operation: Operation | None = None,
) -> SavedStorage:
    """Add a storage that may move to its pass, and return its record. Takes no lock: settling counts it.

    Args:
        accounting: of all saved storages.
        current: the pass that saves it.
        lease: held by the saved tensors over it.
        storage: with the bytes.
        nbytes: of the storage.
        is_whole: whether the tensor shows all of it.
        produced: its bytes are there once this has passed.
        operation: that may fill it.
    """
    record = lease.record
    record.accounting = accounting
    record.key = record.identity = key = StorageKey(storage)
    record.cdata = key.cdata
    record.nbytes = nbytes
    record.is_whole = is_whole
    record.produced = produced
    record.index = len(current.records)
    record.operation = operation
    record.tier = record.stored = record.read = record.error = record.mark = None
    record.is_on_host = record.ahead = False
    record.num_tensors = record.num_unpacked = 0
    lease.storage, record.home = storage, current
    record.state = KEPT  # right before: no interrupt comes in between
    current.records.append(record)
    current.sizes.append(nbytes)
    if current.recorder is not None:
        current.recorder.packed(nbytes, record.identity, accounting.counters.resident_bytes)
    current.packed_s.append(time.perf_counter())  # last: a pass with lists of several lengths was interrupted
    accounting.by_storage[record.cdata] = record
    accounting.notes.append(record)
    return record


def shows_all(tensor: torch.Tensor, nbytes: int) -> bool:
    """Return whether a tensor shows each byte of a storage, in whatever order of its dimensions.

    Args:
        tensor: over the storage.
        nbytes: of the storage.
    """
    if tensor.nbytes != nbytes or tensor.is_contiguous():
        return tensor.nbytes == nbytes
    dense = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1 and stride != dense:
            return False
        dense *= size
    return True


class SavedTensor(NamedTuple):
    """Stands in autograd for a tensor: how to rebuild it, and its share in the storage.

    Flat, because the garbage collector looks at every object that lives as long as a graph.
    """

    lease: Lease
    probe: Probe
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool
    is_leaf: bool
    """Whether no operation made it."""

    @classmethod
    def of(cls, tensor: torch.Tensor, lease: Lease, probe: Probe) -> SavedTensor:
        """Describe a tensor over the storage of a lease."""
        made: SavedTensor = new_tuple(
            cls,
            (
                lease,
                probe,
                tensor.dtype,
                tensor.size(),
                tensor.stride(),
                tensor.storage_offset(),
                tensor.is_conj(),
                tensor.is_neg(),
                tensor.is_leaf,
            ),
        )
        return made

    @property
    def spec(self) -> TensorSpec:
        """How it is rebuilt over its storage."""
        return TensorSpec(self.dtype, self.size, self.stride, self.offset, self.is_conj, self.is_neg)
