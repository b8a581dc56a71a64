"""The saved-tensor hooks: pack on the way forward, unpack on the way back.

Parameters and buffers are skipped by storage, whatever view they come in; small tensors and everything that is
not a plain dense tensor of our device are kept; the rest goes to the tier once per storage and version. See
``saved_storage.py`` for the life of one storage, ``saved_pass.py`` for what one pass teaches the next, and
``prefetcher.py`` for what is brought up ahead.
"""

from __future__ import annotations

import copy
import os
import time
import warnings
import weakref
from collections import deque
from dataclasses import replace
from typing import Any

import torch

from lightning_ssd.errors import OffloaderClosedError, StorageError
from lightning_ssd.events import EventLog, PlacementEvent, StallEvent
from lightning_ssd.inplace import Origin, VersionProbe, inplace_error, pytorch_wording
from lightning_ssd.parameters import ParameterStorages
from lightning_ssd.planning.passes import ProfileBook
from lightning_ssd.prefetcher import Prefetcher, is_out_of_memory
from lightning_ssd.saved_pass import SavedPass
from lightning_ssd.saved_storage import Lease, Ledger, SavedStorage, SavedTensor, State
from lightning_ssd.stats import OffloadStats
from lightning_ssd.storage.streams import Copies
from lightning_ssd.storage.tiers import SsdTier
from lightning_ssd.storage.transfer import Transfer
from lightning_ssd.tensors import PLAIN_TYPES, TensorSpec

__all__ = ["TensorCache"]

# A kept tensor goes back to autograd as a bare tuple: tensor, version, and the fields of its Origin if it has one.
# This is the hot path of small tensors, and a class of its own would cost as much as all the rest of it.
_Kept = tuple[Any, ...]
_MAX_PASSES = 256
# Reloaded storages that everybody has unpacked stay for so many more: the operation that asked is still running.
# With retain_graph the graph goes on holding them; then their memory goes, and the file still has them.
_NUM_CONSUMED = 8


class TensorCache:
    """Owns the saved storages of one device in one process.

    Args:
        tier: where storages go; ``None`` keeps and counts everything.
        device: only tensors of this device are moved.
        min_tensor_nbytes: storages below this size are kept.
        events: gets placements and stalls.
        copies: the device's copy streams; ``None`` on CPU, where work is done when a call returns.
    """

    def __init__(
        self,
        tier: SsdTier | None,
        *,
        device: torch.device,
        min_tensor_nbytes: int,
        events: EventLog,
        copies: Copies | None = None,
    ) -> None:
        pytorch_wording()  # learnt now, because it needs a backward without hooks
        self.ledger = Ledger(tier)
        self._counters = self.ledger.counters
        self._tier = tier
        self._device = device
        self._min_nbytes = max(min_tensor_nbytes, 1)
        self._events = events
        self._copies = copies
        self.parameters = ParameterStorages()
        self._parameter_keys = self.parameters.keys
        self._warned_of_writes = False
        self._closed = False
        self._pid = os.getpid()
        # All of the following are guarded by the ledger's lock.
        self._by_storage: dict[int, SavedStorage] = {}
        self._passes: deque[SavedPass] = deque(maxlen=_MAX_PASSES)
        self._consumed: deque[SavedStorage] = deque()
        self._book = ProfileBook()
        self._prefetcher = Prefetcher(self.ledger, self._book, device)
        self._failure: BaseException | None = None

    # -- passes --------------------------------------------------------------------------------------------------

    def new_pass(self) -> SavedPass:
        """One forward and the backward that follows; used as a context manager around the forward."""
        return SavedPass(self._enter, self._pack, self._unpack)

    def _enter(self, current: SavedPass) -> None:
        self._check_process()
        if self._closed:
            raise OffloaderClosedError("the offloader is closed; open it again before the next forward")
        self.parameters.refresh()
        with self.ledger.lock:
            self.ledger.settle()
            self._prune()
            self._passes.append(current)

    def end_backward(self) -> None:
        """A backward is over: learn from it, tell of failed writes. A missed call costs time only."""
        self._check_process()
        with self.ledger.lock:
            self.ledger.settle()
            if self._tier is not None:
                write_rate, read_rate = self._tier.sample_rates()
                profiles = [p.profile(write_rate=write_rate, read_rate=read_rate) for p in self._passes if p.order]
                for profile in profiles:
                    self._book.add(profile)
                self._prefetcher.budget.pass_ended(profiles, self.ledger.counters.saved_peak_bytes)
            self._prune()
        self._warn_of_writes()

    def _check_process(self) -> None:
        """Before any lock: in a forked child no worker runs, and a lock may be held for ever."""
        if self.is_foreign:
            raise OffloaderClosedError(
                f"this offloader was opened in process {self._pid}, and this is its fork {os.getpid()}; "
                "open one after forking"
            )

    def _prune(self) -> None:
        """Forget passes and storages whose graphs are gone."""
        live = [p for p in self._passes if any(r.state is not State.FREED for r in p.records)]
        self._passes.clear()
        self._passes.extend(live)
        self._by_storage = {c: r for c, r in self._by_storage.items() if r.state is not State.FREED}
        self._consumed = deque(r for r in self._consumed if r.state is not State.FREED)

    def _warn_of_writes(self) -> None:
        failure = self.ledger.write_failure
        if failure is not None and not self._warned_of_writes:
            self._warned_of_writes = True
            warnings.warn(
                f"offloading failed ({failure}); the tensors concerned stay in memory, results are not affected. "
                "Further failures are only counted (stats.failures)",
                stacklevel=3,
            )

    def cancel_writes(self) -> None:
        """Keep everything whose write has not begun: the step has failed, or the tier is closing."""
        with self.ledger.lock:
            self.ledger.settle()
            for record in self._by_storage.values():
                if record.state is State.QUEUED:
                    record.forward()

    def abort(self) -> None:
        """A step has failed: keep what is queued, and raise nothing at close over the error that is under way."""
        self.cancel_writes()
        self._failure = None
        self._warned_of_writes = True

    def snapshot(self, *, disk_bytes: int, busy_s: tuple[float, float], num_retries: int) -> OffloadStats:
        """The counters, completed with what only the tier knows."""
        with self.ledger.lock:
            self.ledger.settle()
            self.ledger.sweep_all()
            stats = self.ledger.counters.snapshot()
        return replace(
            stats,
            disk_bytes=disk_bytes,
            write_busy_s=busy_s[0],
            read_busy_s=busy_s[1],
            failures=stats.failures + num_retries,
            fallbacks=stats.fallbacks + num_retries,
        )

    def reset_peaks(self) -> None:
        """Start the peaks anew at what is in memory now."""
        with self.ledger.lock:
            self.ledger.settle()
            self.ledger.sweep_all()
            counters = self.ledger.counters
            counters.resident_peak_bytes = counters.resident_bytes
            counters.saved_peak_bytes = self.ledger.saved_bytes

    @property
    def is_foreign(self) -> bool:
        """Whether this is a fork of the process that opened us."""
        return os.getpid() != self._pid

    def close(self) -> BaseException | None:
        """No more passes. Returns the last read that failed for good, to be raised once more."""
        self._closed = True
        self.cancel_writes()
        self._warn_of_writes()
        return self._failure

    # -- pack ----------------------------------------------------------------------------------------------------

    def _pack(self, current: SavedPass, tensor: torch.Tensor) -> _Kept | SavedTensor:
        """What autograd gets to hold in place of ``tensor``."""
        if type(tensor) in PLAIN_TYPES:
            try:
                storage = tensor.untyped_storage()
            except (NotImplementedError, RuntimeError):  # sparse, opaque and functorch tensors have no storage
                self._counters.num_kept_foreign += 1
                return self._keep(tensor)
            nbytes = storage.nbytes()
            if nbytes < self._min_nbytes:
                self._counters.num_kept_small += 1
                return self._keep(tensor)
            if storage._cdata in self._parameter_keys:
                self._counters.num_kept_parameters += 1
                return self._keep(tensor)
            if self._is_ours(tensor):
                if not self.parameters.recognise(tensor, storage):
                    return self._pack_storage(current, tensor, storage, nbytes)
                self._counters.num_kept_parameters += 1
                return self._keep(tensor)
        self._counters.num_kept_foreign += 1
        return self._keep(tensor)

    @staticmethod
    def _keep(tensor: torch.Tensor) -> _Kept:
        node = tensor.grad_fn
        if node is None:
            # A leaf may be held itself. Held undetached, the result of an operation would own its own graph: a leak.
            return tensor, tensor._version
        # The fields of an Origin, which is only made of them when there is an error to report.
        origin = node.name(), node._sequence_nr(), tensor.output_nr, tensor._is_view(), weakref.ref(tensor)
        return tensor.detach(), tensor._version, *origin

    def _is_ours(self, tensor: torch.Tensor) -> bool:
        if tensor.nbytes < tensor.untyped_storage().nbytes() and not tensor._is_view():
            # A part with a version counter of its own (``unsafe_chunk``): its siblings may be edited, unseen by it,
            # while the storage that they share is written.
            return False
        return (
            tensor.device == self._device
            and tensor.layout is torch.strided
            and not tensor.is_quantized
            and not tensor.is_nested
            and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        )

    def _pack_storage(
        self, current: SavedPass, tensor: torch.Tensor, storage: torch.UntypedStorage, nbytes: int
    ) -> SavedTensor:
        probe = VersionProbe(tensor)
        with self.ledger.lock:
            self.ledger.settle()
            record = self._by_storage.get(storage._cdata)
            lease = record.lease() if record is not None and record.lease is not None else None
            if record is None or lease is None or not record.is_same_value(probe.saved, tensor):
                lease = self._open(current, storage, nbytes, probe)
            lease.record.num_tensors += 1
        if self._copies is not None:
            self._copies.protect(tensor)
        return SavedTensor(lease, TensorSpec.of(tensor), probe, Origin.of(tensor))

    def _open(self, current: SavedPass, storage: torch.UntypedStorage, nbytes: int, probe: VersionProbe) -> Lease:
        """A storage seen for the first time in this version: keep it, or queue its write."""
        record = SavedStorage(self.ledger, storage, nbytes, probe, index=len(current.records))
        lease = Lease(record)
        record.lease = weakref.ref(lease)
        self._by_storage[record.key.cdata] = record
        record.home = current
        keep = current.expects_keep(self._book, nbytes)
        current.add(record)
        self.ledger.opened(record)
        if keep or self._tier is None:
            self.ledger.counters.bytes_kept += nbytes
            self._events.append(PlacementEvent("keep", nbytes, "wanted at once" if keep else "policy", record.packed_s))
        else:
            record.state = State.QUEUED
            self._prefetcher.budget.observe(nbytes, self.ledger.counters.saved_peak_bytes)
            after = None if self._copies is None else self._copies.mark()
            self._tier.write(record, nbytes, after, label=f"saved storage {record.index}")
            self._events.append(PlacementEvent("ssd", nbytes, "large enough", record.packed_s))
        return lease

    # -- unpack --------------------------------------------------------------------------------------------------

    def _unpack(self, packed: _Kept | SavedTensor) -> torch.Tensor:
        """Give autograd its tensor back, waiting for the drive if it must."""
        if not isinstance(packed, SavedTensor):
            tensor: torch.Tensor = packed[0]
            if tensor._version != packed[1]:
                description = tensor.dtype, tensor.device, tensor.size()
                origin = Origin(*packed[2:]) if len(packed) > 2 else None
                raise inplace_error(description, origin, version=tensor._version, expected=packed[1])
            return tensor
        lease, spec, probe, origin = packed
        if probe.version != probe.saved:
            with self.ledger.lock:  # where versions may be moved for a moment, see VersionProbe.shares_counter
                version = probe.version
            if version != probe.saved:
                description = spec.dtype, self._device, spec.size
                raise inplace_error(description, origin, version=version, expected=probe.saved)
        tensor = probe.rebuild(spec, self._fetch(lease.record))
        if self._copies is not None:
            self._copies.protect(tensor)
        return tensor

    def _fetch(self, record: SavedStorage) -> torch.UntypedStorage:
        """The storage's bytes, in memory and visible to the current stream."""
        self._note(record)
        stall_start = 0.0
        while True:
            with self.ledger.lock:
                reads = self._bring_up(record)
                storage, mark = record.storage, record.mark
            if storage is not None:
                break
            stall_start = stall_start or time.perf_counter()
            for read in reads:
                read.wait()
            self._raise_if_failed(record)
        if stall_start:
            self._note_stall(record.nbytes, stall_start)
        if mark is not None and self._copies is not None:
            self._copies.wait_on_current_stream(mark)
        return storage

    def _note(self, record: SavedStorage) -> None:
        """Somebody asks for this storage; what everybody has had by now need not stay."""
        self._check_process()
        with self.ledger.lock:
            self.ledger.settle()
            record.asked_for()
            record.num_unpacked += 1
            if record.home is not None:
                record.home.asked_for(record, time.perf_counter(), self._book)
            if record.num_unpacked >= record.num_tensors:
                self._consumed.append(record)
            while len(self._consumed) > _NUM_CONSUMED:
                consumed = self._consumed.popleft()
                if consumed is not record:
                    consumed.drop_copy()

    def _bring_up(self, record: SavedStorage) -> list[Transfer]:
        """Make the storage come, urgently; then look ahead. Returns the reads to wait for before trying again."""
        if not record.forward():
            if self._closed:
                raise OffloaderClosedError(
                    "backward asked for a saved tensor after the offloader was closed; run backward before closing"
                )
            if record.state is State.READING and record.read is not None and self._tier is not None:
                self._tier.promote(record.read)
            elif record.state is State.ON_DISK:
                try:
                    record.start_read(self._device, urgent=True)
                except (RuntimeError, MemoryError, OSError) as error:
                    if not is_out_of_memory(error):
                        raise
                    dropped, reads = self._prefetcher.give_up(self._passes)
                    if not dropped and not reads:
                        raise
                    return reads
        if record.home is not None:
            self._prefetcher.advance(record.home, self._passes)
        return [] if record.read is None else [record.read]

    def _raise_if_failed(self, record: SavedStorage) -> None:
        with self.ledger.lock:
            error, record.error = record.error, None
            if error is not None:
                # The traceback of what is raised holds the graph, and the graph holds the record: neither the record
                # nor we may hold the same exception.
                self._failure = _copy_of(error)
                raise error

    def _note_stall(self, nbytes: int, start_s: float) -> None:
        end_s = time.perf_counter()
        self._events.append(StallEvent(nbytes, start_s, end_s))
        with self.ledger.lock:
            self.ledger.counters.stall_s += end_s - start_s
            self._prefetcher.budget.stalled()


def _copy_of(error: BaseException) -> BaseException:
    """The same error to be raised once more, without its traceback."""
    try:
        return copy.copy(error)
    except TypeError:  # an exception whose constructor wants other arguments than it keeps
        return StorageError(f"reading a saved tensor back failed: {error!r}")
