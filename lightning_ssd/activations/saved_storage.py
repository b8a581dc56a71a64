"""The life of one saved storage, from pack to the death of the graph that saved it.

::

    pack --> QUEUED --> WRITING --> ON_DISK --> READING --> READY --> FREED
               |           |           ^------------------'   ^
               '-----------'----------------------------------'   forwarded: wanted back before the write ended
    pack --> READY                                                kept by decision

Who holds what: autograd's graph holds :class:`SavedTensor` objects, these share one :class:`Lease`, and the lease
holds the :class:`SavedStorage`. When the last of them dies, nobody can ask for the bytes again. Nothing here
depends on steps, modules or stack traces.

Note: What happens when a lease dies
    A lease can die anywhere: in autograd's thread, in a worker, or inside the garbage collector while the same
    thread holds any lock of ours; and Ctrl-C that fell into Python code that runs then would be lost. So none of ours
    does. The lease is what holds the memory, which goes with it; its weak reference puts a note into a queue, in C,
    which the :class:`~lightning_ssd.activations.accounting.MemoryAccounting` works off at the next regular operation.
"""

from __future__ import annotations

import enum
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from lightning_ssd.activations.accounting import MemoryAccounting
from lightning_ssd.activations.operation import Operation
from lightning_ssd.activations.saved_parts import SavedParts
from lightning_ssd.common.inplace_edits import Origin, VersionProbe
from lightning_ssd.common.tensors import StorageKey, TensorSpec
from lightning_ssd.errors import OffloaderClosedError
from lightning_ssd.tiers.base import StoredBytes, Tier
from lightning_ssd.tiers.streams import PASSED, StreamEvent
from lightning_ssd.tiers.transfer_queue import Transfer

if TYPE_CHECKING:
    from lightning_ssd.activations.saved_pass import SavedPass

__all__ = ["Lease", "SavedStorage", "SavedTensor", "State"]


class State(enum.Enum):
    """Where the bytes are. The accounting lock guards every change."""

    QUEUED = "queued"  # in memory, a write is queued
    WRITING = "writing"  # in memory, a worker writes it
    ON_DISK = "on disk"  # we hold no memory
    READING = "reading"  # a worker fills new memory
    READY = "ready"  # in memory: kept, forwarded or reloaded
    FREED = "freed"  # the graph let go


class SavedStorage:
    """One storage that autograd saved, whatever number of tensors over it. See the module's drawing."""

    __slots__ = (
        "accounting",
        "ahead",
        "error",
        "held_elsewhere",
        "home",
        "identity",
        "index",
        "key",
        "lease",
        "leaving",
        "mark",
        "nbytes",
        "num_tensors",
        "num_unpacked",
        "operation",
        "packed_s",
        "parts",
        "probe",
        "produced",
        "read",
        "state",
        "stored",
        "tier",
        "wanted_s",
    )

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
        self.state = State.READY
        self.tier: Tier | None = None  # where it goes; None: it stays
        self.stored: StoredBytes | None = None
        self.read: Transfer | None = None
        self.mark: StreamEvent | None = None  # the reloaded bytes are there once this has passed
        self.error: BaseException | None = None
        self.ahead = False  # brought up, or held back, before it was asked for
        self.leaving = False
        self.held_elsewhere = False
        self.num_tensors = 0
        self.num_unpacked = 0
        self.packed_s = time.perf_counter()
        self.wanted_s: float | None = None
        self.lease: weakref.ref[Lease] | None = None
        self.home: SavedPass | None = None  # the pass that saw it first

    @property
    def storage(self) -> torch.UntypedStorage | None:
        """The memory, while we hold it; ``None`` too once the lease is dead, whoever else may hold it."""
        lease = None if self.lease is None else self.lease()
        return None if lease is None else lease.storage

    @storage.setter
    def storage(self, storage: torch.UntypedStorage | None) -> None:
        lease = None if self.lease is None else self.lease()
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
        if self.state is not State.READY or self.stored is not None:
            return False
        self.parts.add(tensor)
        self.produced = mark()
        return True

    @property
    def is_in_memory(self) -> bool:
        """Whether bringing it up takes no more memory."""
        return self.state in (State.QUEUED, State.WRITING) or self.leaving

    @property
    def is_resident(self) -> bool:
        """Whether its memory counts."""
        return self.leaving or self.state not in (State.ON_DISK, State.FREED)

    @property
    def can_be_evicted(self) -> bool:
        """Whether it was to stay, has never been sent anywhere, and nobody is about to unpack it once more."""
        in_use = 0 < self.num_unpacked < self.num_tensors
        may_go = self.state is State.READY and self.tier is None and self.storage is not None and not in_use
        return may_go and self.is_filled()

    def is_filled(self) -> bool:
        """Whether its bytes will be there when ``produced`` has passed; see the note in ``operation.py``."""
        if self.operation is None:
            return True
        if self.operation.may_run and self.home is not None and not self.home.is_over:
            return False
        self.operation = None
        self.produced = self.produced.again()
        return True

    def queue_write(self, tier: Tier, after: StreamEvent) -> bool:
        """READY -> QUEUED. Returns False, with nothing changed, when the tier has no room."""
        self.tier = tier
        queued = False
        try:
            self.state = State.QUEUED
            self.accounting.writes.add(self)
            queued = tier.write(self, self.nbytes, after, label=f"saved storage {self.index}")
            if not queued:
                self.tier = None
        finally:  # after an interrupt it may be in the queue: it stays, and no other tier gets it
            if not queued:
                self.state = State.READY
                self._write_gone()
        return queued

    def _write_gone(self) -> None:
        """Our write has ended or is no longer wanted; a worker may tell of the end of one that was taken back."""
        self.accounting.write_gone(self)

    def forward(self) -> bool:
        """Hand the bytes over without a read, if they are in memory in any way. Afterwards the state is READY."""
        if self.state is State.QUEUED or self.state is State.WRITING:
            if self.state is State.QUEUED:
                self.accounting.counters.writes_cancelled_bytes += self.nbytes
                self._write_gone()
        elif self.state is State.ON_DISK:
            storage = self.key.resolve()
            if storage is None or storage.nbytes() != self.nbytes:
                return False
            self.storage = storage
            self.held_elsewhere = True
            if self.leaving:
                self.leaving = False  # still counted
            else:
                self.accounting.occupy(self)
        else:
            return self.state is State.READY
        self.state = State.READY
        self.accounting.counters.bytes_forwarded += self.nbytes
        return True

    def start_read(self, device: torch.device, *, urgent: bool) -> None:
        """ON_DISK -> READING. Allocates in the calling thread, on its current stream; out of memory changes nothing."""
        tier, stored = self.tier, self.stored
        if tier is None or stored is None:
            raise RuntimeError(f"saved storage {self.index} is {self.state.value}, with nothing stored; report it")
        self.error = None
        self.state = State.READING  # before a worker can end it
        try:
            self.read = tier.read(self, stored, device, urgent=urgent)
        except BaseException:
            self.state = State.ON_DISK
            raise
        if self.leaving:  # its former memory has gone, only nobody had looked yet
            self.leaving = False
            self.accounting.vacate(self)
        self.accounting.occupy(self)

    def drop_copy(self) -> None:
        """READY -> ON_DISK for a reloaded storage: its bytes are still in the file."""
        if self.state is State.READY and self.stored is not None and self.storage is not None:
            # The mark stays: the memory may be found alive (a tier holds it until its copy has passed) and handed out.
            self.state = State.ON_DISK
            self.storage = None
            self.accounting.leave(self)

    def hold_ahead(self) -> None:
        """Count this towards the prefetch budget until it is asked for."""
        if not self.ahead:
            self.ahead = True
            self.accounting.ahead_bytes += self.nbytes

    def asked_for(self) -> None:
        """Somebody unpacks: from now on the memory is in use, not ahead."""
        if self.ahead:
            self.ahead = False
            self.accounting.ahead_bytes -= self.nbytes

    def free(self) -> None:
        """The lease is dead: nobody asks again. A transfer under way frees the extent when it ends.

        Once more after it was interrupted: does the rest.
        """
        state = self.state
        self.asked_for()
        if state is State.QUEUED:
            self._write_gone()
        if self.home is not None:
            self.home.freed(self)
        self.mark = self.home = None
        self.produced = PASSED
        if (state is not State.ON_DISK and state is not State.FREED) or self.leaving:
            self.leaving = False
            self.accounting.vacate(self)
        self.state = State.FREED
        if state is not State.READING:
            self._free_extent()

    def _free_extent(self) -> None:
        if self.stored is not None and self.tier is not None:
            self.tier.free(self.stored)
        self.stored = None

    # -- called by the tier's workers ----------------------------------------------------------------------------

    def write_begins(self) -> torch.UntypedStorage | None:
        """QUEUED -> WRITING, unless somebody took it back meanwhile."""
        with self.accounting.lock:
            # Asked once: the lease may die between two questions, and whoever gets a storage has to end its write.
            storage = self.storage
            if self.state is not State.QUEUED or storage is None:
                return None
            self.state = State.WRITING
            return storage

    def write_ended(self, stored: StoredBytes | None, error: BaseException | None) -> None:
        """WRITING -> ON_DISK, where memory returns; or, after a failure, back to READY: kept, with nothing lost.

        A failure may come before the write has begun (a device that is lost while its stream is waited for): from
        QUEUED, or after somebody has taken it back.
        """
        storage = None
        with self.accounting.lock:
            self.accounting.settle()
            self._write_gone()
            if stored is not None:
                self._count_written(stored.body_nbytes)
            if error is not None:
                self.accounting.counters.failures += 1
                self.accounting.counters.fallbacks += 1
                self.accounting.counters.bytes_kept += self.nbytes
                self.accounting.write_failure = self.accounting.write_failure or str(error) or repr(error)
                if self.state in (State.QUEUED, State.WRITING):
                    self.state = State.READY
            elif self.state is State.WRITING and (storage := self.storage) is not None:
                self.state, self.stored = State.ON_DISK, stored
                self.storage = None
                self.accounting.leave(self)
            elif stored is not None and self.tier is not None:  # forwarded or freed meanwhile
                self.tier.free(stored)
        # The memory goes here, outside of the lock: unmapping it can take milliseconds.
        del storage

    def _count_written(self, nbytes: int) -> None:
        if self.is_on_host:
            self.accounting.counters.bytes_host += nbytes
        else:
            self.accounting.counters.bytes_written += nbytes

    @property
    def is_on_host(self) -> bool:
        """Whether it goes to host memory, and so to no drive."""
        return self.tier is not None and self.tier.name == "host"

    def read_ended(
        self, storage: torch.UntypedStorage | None, mark: StreamEvent | None, error: BaseException | None
    ) -> None:
        """READING -> READY, or back to ON_DISK with the error for whoever waits."""
        with self.accounting.lock:
            self.accounting.settle()
            counters = self.accounting.counters
            self.read = None
            if error is not None:
                counters.failures += not isinstance(error, OffloaderClosedError)
                self.error = error
            elif self.stored is not None and not self.is_on_host:
                counters.bytes_read += self.stored.body_nbytes
            if self.state is State.FREED:
                self._free_extent()  # the lease died while we read
            elif self.state is not State.READING:
                pass  # an interrupt came while it was asked for, and whoever asked knows of no read
            elif storage is None:
                self.state = State.ON_DISK
                self.accounting.vacate(self)
                self.asked_for()
            else:
                self.storage, self.mark = storage, mark
                self.key = StorageKey(storage)
                self.state = State.READY


class Lease:
    """Held by every saved tensor over one storage; its death frees the storage's memory and extent.

    It holds the memory, when it is there, on behalf of the record: a write under way does so itself.
    """

    __slots__ = ("__weakref__", "record", "storage")

    def __init__(self, record: SavedStorage, storage: torch.UntypedStorage | None) -> None:
        self.record = record
        self.storage = storage
        record.lease = weakref.ref(self)
        record.accounting.watch(self, record)


class SavedTensor(NamedTuple):
    """What autograd holds in place of a tensor: how to rebuild it, and its share in the storage."""

    lease: Lease
    spec: TensorSpec
    probe: VersionProbe
    origin: Origin | None
