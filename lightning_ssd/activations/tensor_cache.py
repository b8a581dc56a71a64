"""The saved-tensor hooks: pack on the way forward, unpack on the way back.

Parameters and buffers are skipped by storage, whatever view they come in; small tensors and everything that is
not a plain dense tensor of our device are kept; the rest goes to the tier once per storage and version, but for parts
that are saved again when they have left. See ``saved_storage.py`` for the life of one storage, ``saved_pass.py`` for
what one pass teaches the next, and ``fetcher.py`` for what is brought up ahead.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from lightning_ssd.activations.accounting import MemoryAccounting
from lightning_ssd.activations.fetcher import Fetcher
from lightning_ssd.activations.graph_memory import GraphMemory
from lightning_ssd.activations.handed_out import HandedOut
from lightning_ssd.activations.kept_storage import KeptStorage, Share, open_kept
from lightning_ssd.activations.kept_tensor import Kept, give_back, keep
from lightning_ssd.activations.live_passes import LivePasses
from lightning_ssd.activations.operation import Operation
from lightning_ssd.activations.parameter_filter import ParameterStorages
from lightning_ssd.activations.replay import DATA_PARTS, MIN_DATA_BYTES, hooks_of
from lightning_ssd.activations.run_ahead import RunAhead
from lightning_ssd.activations.saved_pass import SavedPass
from lightning_ssd.activations.saved_storage import (
    Lease,
    SavedStorage,
    SavedTensor,
    begin_saved,
    open_saved,
    shows_all,
)
from lightning_ssd.activations.storage_state import KEPT, QUEUED
from lightning_ssd.activations.write_group import WriteGroup
from lightning_ssd.common.forks import FORKS
from lightning_ssd.common.formatting import format_sizes
from lightning_ssd.common.inplace_edits import (
    VersionProbe,
    inplace_error,
    owner_of,
    resized_error,
)
from lightning_ssd.common.tensors import PLAIN_TYPES, storage_of
from lightning_ssd.common.waiting import Latch, is_free_within
from lightning_ssd.errors import OffloaderClosedError
from lightning_ssd.memory.heap_policy import HeapMode, HeapPolicy
from lightning_ssd.memory.readings import available_bytes, level_bytes, peak_bytes
from lightning_ssd.parameters.guard.guard import is_guarded
from lightning_ssd.parameters.pager import Pager, SavedElsewhere, Unit
from lightning_ssd.planning.placement import Placement
from lightning_ssd.planning.plan import TierRates
from lightning_ssd.recompute.blocks import Blocks
from lightning_ssd.scheduling.clock import clock_of
from lightning_ssd.scheduling.overhead import CpuCosts
from lightning_ssd.scheduling.pass_profile import PrefetchBudget
from lightning_ssd.scheduling.plan_cursor import KEEPS_ALL, NOTHING_KNOWN, PassProgram
from lightning_ssd.scheduling.scheduler import Scheduler
from lightning_ssd.scheduling.stalls import Stalls
from lightning_ssd.telemetry.events import EventLog
from lightning_ssd.telemetry.stats import OffloadStats, SavedBytes
from lightning_ssd.telemetry.step_record import StepRecorder
from lightning_ssd.tiers.bandwidth_meter import BandwidthMeter
from lightning_ssd.tiers.host import HostTier
from lightning_ssd.tiers.ssd import SsdTier
from lightning_ssd.tiers.streams import PASSED, CopyEngine, StreamEvent

__all__ = ["TensorCache", "Tiers"]


@dataclass(frozen=True, slots=True)
class Tiers:
    """Where storages may go."""

    ssd: SsdTier | None = None
    host: HostTier | None = None


class SavedWeight(NamedTuple):
    """A saved weight that waits on a drive between its uses. Its use tells how far backward has got."""

    held: Kept | SavedElsewhere
    """The former where it stays the tensor that it is."""
    unit: Unit[Any]


_Packed = Kept | SavedTensor | SavedWeight
"""Types that autograd holds in place of a saved tensor."""


class TensorCache:
    """Owns the saved storages of one device in one process.

    Args:
        tiers: where storages may go; without an SSD tier everything is kept and counted.
        device: only tensors of this device are moved.
        min_tensor_nbytes: storages below this size are kept.
        events: gets placements and stalls.
        copies: between the device and the host.
        scheduler: plans what goes where; ``None``: whatever is large enough goes to host memory, then to SSD.
        recompute: recompute every block, whatever is planned.
        heap_policy: told what becomes of freed memory: before each pass, and when one finds too little room.
        weights: told when backward asks for one that waits on a drive between its uses.
        meter: of the rates of the drives; ``None``: there are none.
        cpu: what workers and page faults take from the computation; ``None``: nothing.
    """

    def __init__(
        self,
        tiers: Tiers,
        *,
        device: torch.device,
        min_tensor_nbytes: int,
        events: EventLog,
        copies: CopyEngine,
        scheduler: Scheduler | None = None,
        recompute: bool = False,
        heap_policy: HeapPolicy | None = None,
        weights: Pager[Any] | None = None,
        meter: BandwidthMeter | None = None,
        cpu: CpuCosts | None = None,
    ) -> None:
        self._heap_policy = heap_policy or HeapPolicy()
        self.accounting = MemoryAccounting(self._heap_policy.look)
        self._counters = self.accounting.counters
        self._tiers = tiers
        self._meter = meter
        self.device = device
        """Only tensors of this device are moved."""
        self.min_nbytes = max(min_tensor_nbytes, 1)
        """Smaller storages stay, and are not counted one by one."""
        self.copies = copies
        # Meanwhile no thread may ask a device how it is doing, and nothing has an end that a worker could wait for.
        self.is_capturing = copies.is_capturing
        self.graph_memory = GraphMemory(device)
        self.handed_out = HandedOut()
        self._recompute = recompute
        self.blocks: list[Blocks] = []
        self.parameters = ParameterStorages()
        self._parameter_keys = self.parameters.keys
        self._weights = weights
        self.has_pager = weights is not None
        self._warned_of_writes = self._warned_of_graphs = False
        self._num_plain = 0
        self._pid, self._num_forks = os.getpid(), len(FORKS)
        self._threads: dict[int, threading.Thread] = {}  # those that have begun a pass, by their numbers
        # All of the following are guarded by the accounting lock.
        self._group = WriteGroup()
        self._run_ahead = RunAhead()
        self._clock = clock_of(device)
        self._passes = LivePasses(
            self.accounting,
            self._clock,
            level=self._level_bytes,
            highest=partial(peak_bytes, device),
            available=self._available_bytes,
            runs_late=copies.is_asynchronous,
            scheduler=scheduler,
            heap_policy=self._heap_policy,
            keeps_all=tiers.ssd is None and not recompute,
            wants_hooks=self._has_weights,
            cpu=cpu,
            worker_s=self._worker_s,
        )
        self._known_available_bytes: int | None = None
        self.budget = PrefetchBudget()
        self._stalls = Stalls(self._clock, self._counters, events, self.budget.stalled)
        self.fetcher = Fetcher(
            self.accounting,
            self._passes,
            budget=self.budget,
            stalls=self._stalls,
            device=device,
            clock=self._clock,
            copies=copies,
            tier=tiers.ssd,
        )

    def _worker_s(self) -> float:
        """Return the CPU time of the drives' workers."""
        return 0.0 if self._tiers.ssd is None else self._tiers.ssd.cpu_s

    def _has_weights(self) -> bool:
        """Whether any weight waits on a drive."""
        return self._weights is not None and bool(self._weights.by_storage)

    # -- memory --------------------------------------------------------------------------------------------------

    def _level_bytes(self) -> int:
        """In use, as if all weights were in memory that may be there at a time: they come and go, and a plan that was
        made without them would need their room.
        """
        return level_bytes(self.device) + self._weights_to_come_bytes

    def _available_bytes(self) -> int | None:
        """That could still be had besides these weights; ``None``: unknown."""
        if self.is_capturing():
            return None
        with suppress(OSError):  # out of file descriptors, say: it is as it was when it was last known
            self._known_available_bytes = available_bytes(self.device)
        available = self._known_available_bytes
        return None if available is None else max(available - self._weights_to_come_bytes, 0)

    @property
    def _weights_to_come_bytes(self) -> int:
        return 0 if self._weights is None else self._weights.to_come_bytes

    # -- passes --------------------------------------------------------------------------------------------------

    def new_pass(self, signature: Hashable = None) -> SavedPass:
        """One forward and the backward that follows; used as a context manager around the forward."""
        return SavedPass(self, blocks=self.blocks, signature=signature, recompute_all=self._recompute)

    def enter(self, current: SavedPass) -> None:
        self.check_process()
        self._threads[threading.get_ident()] = threading.current_thread()
        if self.fetcher.is_closed:
            raise OffloaderClosedError("the offloader is closed; open it again before the next forward")
        self._passes.warn_of_forgotten_ends()
        is_graphed = self._is_graphed(current)
        with self.accounting.lock:
            if is_graphed:
                self._passes.enter_plain(current)
                return
            if self.accounting.recorder is not None:
                self.accounting.recorder.forward_begins(alone=not self._passes.num_open)
            self.accounting.settle()
            self.accounting.recount()
            self.fetcher.prune()
            self._passes.enter(current)
        if not current.is_plain:
            num_plain, self._num_plain = self._num_plain, self._counters.num_plain_passes
            self.parameters.refresh(now=self._has_weights() or num_plain != self._num_plain)

    def _is_graphed(self, current: SavedPass) -> bool:
        """Whether a forward that begins now is one of the compiler's CUDA graphs; says so once. Not under the lock."""
        if not self.graph_memory.wants_no_hooks or current.begin is not None or current.is_finished:
            return False
        if self._has_weights():  # they go by what backward asks for
            return False
        if not self._warned_of_graphs:
            self._warned_of_graphs = True
            warnings.warn(
                "torch.compile has made CUDA graphs of a backward, which PyTorch may refuse to replay where hooks hold "
                "their memory: from now on passes run without hooks, and all that they save stays in memory, "
                "uncounted. To move activations, "
                'compile with mode="default" or "max-autotune-no-cudagraphs"',
                stacklevel=4,
            )
        return True

    def hooks_of(self, current: SavedPass) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
        """Return what packs and what unpacks the saved tensors of a pass."""
        limit = None if current.cursor is not None or current.limit_bytes is None else current.limit_bytes // 2
        with self.accounting.lock:
            current.follows = current.follows and current.is_over
            known = self._known_of(current)
        return hooks_of(self, current, known, limit_bytes=limit)

    def _known_of(self, current: SavedPass) -> PassProgram:
        """Return what is known of a pass that begins now.

        Nothing is certain of storages that are traced, shown in a record of the step, or under a limit that may have
        them leave later.
        """
        if current.recorder is not None or self.accounting.recorder is not None:
            return NOTHING_KNOWN
        if self._tiers.ssd is None:
            return KEEPS_ALL
        if current.cursor is not None:
            return NOTHING_KNOWN if current.cursor.limit_bytes is not None else current.cursor.program
        latest = self._passes.book.latest
        return (
            NOTHING_KNOWN
            if latest is None
            else PassProgram(latest.sizes, bytes(i in latest.keep for i in range(len(latest.sizes))))
        )

    def leave(self, current: SavedPass) -> None:
        """A forward is over."""
        if not self.is_foreign:
            with self.accounting.lock:
                if current.cursor is not None:
                    current.cursor.skip(current.sizes)
                self.accounting.settle()
                self._send_group(is_over=True)
                if self.accounting.recorder is not None:
                    self.accounting.recorder.forward_left()

    def end_backward(self) -> bool:
        """A backward is over: learn from it, plan, tell of failed writes. A missed call costs time only.

        Returns:
            Whether a pass had hooks, so that there is more to count.

        Raises:
            BudgetError: the policy's budget cannot be kept by any plan.
        """
        self.check_process()
        with self.accounting.lock:
            are_plain = self._passes.are_plain
            if not are_plain:
                self.accounting.settle()
                self.fetcher.note_given()
                self._settle_stalls()
            if self.accounting.recorder is not None:
                self.accounting.recorder.mark("update")
            rates = None if are_plain or self._meter is None else self._meter.machine().ssd
            if rates is None:
                self._passes.finish(all_freed=False)
            else:
                self.budget.pass_ended(
                    self._passes.end_backward(rates.write_bytes_per_s, rates.read_bytes_per_s),
                    self.accounting.most_saved_bytes,
                )
        if self._tiers.host is not None and not are_plain:
            self._tiers.host.lock_ahead(self.accounting.most_saved_bytes)
        self._passes.learn()
        with self.accounting.lock:
            self._passes.prune()
            if not are_plain:
                self.fetcher.prune()
        self._warn_of_writes()
        return not are_plain

    def recomputed(self, current: SavedPass, sizes: Iterable[int]) -> None:
        """A block of the pass has run again, and has saved storages of these sizes."""
        if self.is_foreign:  # a fork may go on with a graph of ours, and may take no lock
            return
        with self.accounting.lock:
            current.recomputed_bytes += sum(nbytes for nbytes in sizes if nbytes >= self.min_nbytes)
            self.accounting.recomputed(current.recomputed_bytes)

    def _settle_stalls(self) -> None:
        if not self.is_capturing():
            self._stalls.settle()

    def check_process(self) -> None:
        """Before any lock: in a forked child no worker runs, and a lock may be held for ever.

        Raises:
            OffloaderClosedError: this is a fork.
        """
        if self.is_foreign:
            raise OffloaderClosedError(
                f"this offloader was opened in process {self._pid}, and this is its fork {os.getpid()}; "
                "open one after forking"
            )

    def _warn_of_writes(self) -> None:
        failure = self.accounting.write_failure
        if failure is not None and not self._warned_of_writes:
            self._warned_of_writes = True
            (saved,) = format_sizes(self.accounting.most_saved_bytes)
            warnings.warn(
                f"offloading failed ({failure}); the tensors concerned stay in memory, results are not affected. "
                f"A pass saves up to {saved} so far. Further failures are only counted (stats.failures)",
                stacklevel=3,
            )

    def cancel_writes(self) -> None:
        """Keep everything whose write has not begun: the step has failed, or the tier is closing."""
        with self.accounting.lock:
            self.accounting.settle()
            self._group.drop()
            for record in list(self.accounting.writes):
                if record.state is QUEUED:
                    record.forward()

    def abort(self) -> None:
        """A step has failed: keep what is queued, and raise nothing at close over the error that is under way."""
        self.cancel_writes()
        self.fetcher.failure = None  # another error is under way
        self._warned_of_writes = True

    def is_free_within(self, timeout_s: float) -> bool:
        """Wait for the accounting lock, but no longer than this; return whether it is free."""
        return is_free_within(timeout_s, self.accounting.lock)

    def snapshot(self) -> OffloadStats:
        """Return the counters, completed with what only the tier knows."""
        with self.accounting.lock:
            self.accounting.settle()
            self.accounting.sweep_all()
            self._settle_stalls()
            stats = self.accounting.counters.snapshot()
        if (ssd := self._tiers.ssd) is None:
            return stats
        progress = ssd.progress()
        return stats + OffloadStats(
            disk_bytes=ssd.disk_bytes,
            write_busy_s=progress.write_busy_s,
            read_busy_s=progress.read_busy_s,
            failures=ssd.num_retries,
            fallbacks=ssd.num_retries,
        )

    @property
    def drive_rates(self) -> TierRates | None:
        """Rates of the drives, as the run has shown them; ``None``: there are none. Measures nothing."""
        return None if self._meter is None else self._meter.machine().ssd

    def take_worst(self) -> SavedBytes | None:
        """Where saved activations were when most were saved since the last call; ``None``: none was."""
        with self.accounting.lock:
            return self.accounting.take_worst()

    def begin_record(self, step: int, *, expected_s: float) -> StepRecorder:
        """Have what happens to saved storages recorded. The passes of the step have hooks, whatever they move."""
        with self.accounting.lock:
            self.accounting.settle()
            self.accounting.sweep_all()
            self._passes.count_again()
            self.accounting.recorder = recorder = StepRecorder(
                step,
                partial(level_bytes, self.device),
                expected_s=expected_s,
                resident_bytes=self.accounting.counters.resident_bytes,
                saved_bytes=self.accounting.saved_bytes,
                gradient_bytes=self._gradient_bytes,
                modules=self.parameters.modules,
            )
        return recorder

    def _gradient_bytes(self) -> int | None:
        """Return bytes of gradients now, for a thread of backward.

        ``None``: looking might bring in a weight, or meet another thread that computes some.
        """
        if self._has_weights() or self._passes.num_open > 1 or len(self._training_threads()) > 1:
            return None
        return self.parameters.gradient_bytes_on(self.device)

    def _training_threads(self) -> list[threading.Thread]:
        return [thread for thread in list(self._threads.values()) if thread.is_alive()]

    @property
    def gradient_bytes(self) -> int | None:
        """Return bytes of gradients now, where this thread computes none; ``None``: another one may.

        Autograd sets them without the GIL: a thread that looked meanwhile would hold what it has freed.
        """
        here = threading.current_thread()
        are_others = any(thread is not here for thread in self._training_threads())
        return None if are_others else self.parameters.gradient_bytes

    def end_record(self) -> None:
        """End the recording. What is dead by now has been told."""
        with self.accounting.lock:
            try:
                self.accounting.settle()
                self.accounting.sweep_all()
                self._settle_stalls()
            finally:  # whatever a broken device or an interrupt says
                self.accounting.recorder = None

    def reset_peaks(self) -> None:
        """Start the peaks anew at what is in memory now."""
        with self.accounting.lock:
            self.accounting.settle()
            self.accounting.sweep_all()
            self.accounting.reset_peaks()
            self._passes.count_again()

    def flush(self) -> None:
        """Block until every queued write has ended."""
        with self.accounting.lock:
            self._send_group(is_over=True)
        for tier in (self._tiers.ssd, self._tiers.host):
            if tier is not None:
                tier.flush()

    @property
    def is_foreign(self) -> bool:
        """Whether this is a fork of the process that opened us."""
        return len(FORKS) != self._num_forks

    def close(self) -> BaseException | None:
        """No more passes. Returns the last read that failed for good, to be raised once more."""
        recorder, self.accounting.recorder = self.accounting.recorder, None
        if recorder is not None:
            recorder.stop()
        failure = self.fetcher.close()
        self._threads.clear()
        self.cancel_writes()
        self._warn_of_writes()
        return failure

    # -- pack ----------------------------------------------------------------------------------------------------

    def pack(self, current: SavedPass, tensor: torch.Tensor, moves: bool = False) -> _Packed:
        """Return what autograd gets to hold in place of a tensor.

        Args:
            current: the pass that saves it.
            tensor: is saved.
            moves: it is the first one over its storage, and what is known of the pass says that this moves.
        """
        if self.is_foreign:  # a fork goes on with a forward of ours, and may take no lock
            return keep(tensor)
        if type(tensor) in PLAIN_TYPES:
            try:
                storage = tensor.untyped_storage()
            except (NotImplementedError, RuntimeError):  # sparse, opaque and functorch tensors have no storage
                self._counters.num_kept_foreign += 1
                return keep(tensor)
            nbytes = storage.nbytes()
            if nbytes < self.min_nbytes:
                self._counters.num_kept_small += 1
                return keep(tensor)
            if storage._cdata in self._parameter_keys:
                self._counters.num_kept_parameters += 1
                return self._saved_weight(tensor, storage) or keep(tensor)
            if self._is_ours(tensor, storage, nbytes):
                if not self.parameters.recognise(tensor, storage):
                    return self._pack_storage(current, tensor, storage, nbytes, moves)
                self._counters.num_kept_parameters += 1
                return keep(tensor)
        elif is_guarded(tensor) and (weight := self._saved_weight(tensor, storage_of(tensor))) is not None:
            self._counters.num_kept_parameters += 1
            return weight  # itself, as custom functions and checkpoints save it: kept, it might have no memory later
        self._counters.num_kept_foreign += 1
        return keep(tensor)

    def _saved_weight(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> SavedWeight | None:
        """Return what stands for a weight that waits; ``None``: it is none."""
        unit = None if self._weights is None else self._weights.by_storage.get(storage._cdata)
        if self._weights is None or unit is None:
            return None
        return SavedWeight(self._weights.save(tensor, unit) or keep(tensor), unit)

    def _is_ours(self, tensor: torch.Tensor, storage: torch.UntypedStorage, storage_nbytes: int) -> bool:
        if tensor.nbytes < storage_nbytes and not tensor._is_view():
            # A part with a version counter of its own (``unsafe_chunk``): its siblings may be edited, unseen by it,
            # while the storage that they share is written.
            return False
        if storage_nbytes >= max(MIN_DATA_BYTES, DATA_PARTS * tensor.nbytes) and not tensor.requires_grad:
            # A batch that is a slice of the data: all of it would be written, and it stays in memory anyway.
            return False
        if not tensor.requires_grad and tensor.__dict__:
            # Of a constant, backward gets the very object, and what the program has noted on it.
            return False
        if self.is_capturing():
            return False
        return (
            tensor.device == self.device
            and tensor.layout is torch.strided
            and not tensor.is_quantized
            and not tensor.is_nested
            and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
            # Forward-mode differentiation has tensors with a size and no memory, which must not be read.
            and not tensor._is_zerotensor()
            and not self.graph_memory.holds(storage.data_ptr())
        )

    def _pack_storage(
        self, current: SavedPass, tensor: torch.Tensor, storage: torch.UntypedStorage, nbytes: int, moves: bool
    ) -> Kept | SavedTensor:
        if self.fetcher.is_closed:  # hooks that are there still: an interrupt came when their pass was to remove them
            return keep(tensor)
        begin_s, waited_s = time.perf_counter(), self._stalls.waited_s
        placement = None
        if not moves:
            with self.accounting.lock:
                self.accounting.settle()
                share, placement = self._stay(current, tensor, storage, nbytes)
            if share is not None:
                packed = *keep(tensor), share
                self._heap_policy.look(self.accounting.counters.bytes_come)
                if self.device.type == "cpu":  # the work that a device has queued hides so short a time
                    self._count_hook(begin_s, waited_s, None)
                return packed
        # All that PyTorch is asked for comes first: it lets go of the GIL, which a worker that has just been told of a
        # write would hold while this thread, and the cores that compute for it, wait.
        new = begin_saved(self.accounting, tensor)
        while True:
            with self.accounting.lock:
                self.accounting.settle()
                lease = self._find(tensor, storage, nbytes, new.record.saved)
                room = self._admit(current, nbytes) if lease is None else None
                if room is None:
                    if lease is None:
                        lease = new
                        self._open(current, tensor, storage, new, placement)
                    lease.record.num_tensors += 1
                    break
            if not self.fetcher.wait_for_room(nbytes, room):
                return keep(tensor)
        self._heap_policy.look(self.accounting.counters.bytes_come)
        self._run_ahead.wait()
        self.copies.protect(tensor)
        self._count_hook(begin_s, waited_s, lease.record.produced)
        probe = lease.record if lease.record.alias.dtype == tensor.dtype else VersionProbe(tensor)
        return SavedTensor.of(tensor, lease, probe)

    def pack_moved(
        self, current: SavedPass, tensor: torch.Tensor, storage: torch.UntypedStorage, placement: Placement
    ) -> SavedTensor:
        """Have a storage leave, of which this is certain: a plain one of our device that was not saved before. Takes no
        lock but for the group that it leaves with.

        Args:
            current: the pass that saves it.
            tensor: is saved.
            storage: of the tensor.
            placement: where it goes.
        """
        begin_s, waited_s, nbytes = time.perf_counter(), self._stalls.waited_s, storage.nbytes()
        lease = begin_saved(self.accounting, tensor)
        mark = self.copies.mark() if self.copies.is_asynchronous else PASSED
        operation = None if tensor.requires_grad else Operation.current()
        # Asked here first: a call takes as long as the answer.
        is_whole = (tensor.nbytes == nbytes and tensor.is_contiguous()) or shows_all(tensor, nbytes)
        record = open_saved(self.accounting, current, lease, storage, nbytes, is_whole, mark, operation)
        record.num_tensors = 1
        if self._group.add(record, placement, self.accounting.most_saved_bytes):
            with self.accounting.lock:
                self.accounting.settle()
                self._send_group()
            self._heap_policy.look(self.accounting.counters.bytes_come)
        if mark is PASSED:
            self._counters.hook_s += time.perf_counter() - begin_s
        else:
            with self.accounting.lock:
                self._run_ahead.add(mark, nbytes, self.accounting.most_saved_bytes)
            self._run_ahead.wait()
            self.copies.protect(tensor)
            self._count_hook(begin_s, waited_s, mark)
        return SavedTensor.of(tensor, lease, record)

    def pack_again(self, record: SavedStorage, tensor: torch.Tensor) -> SavedTensor | None:
        """Return what stands for a tensor over a storage that leaves, if it may be saved with those before.

        Args:
            record: of the storage.
            tensor: is saved, and a gradient goes to it.
        """
        lease = record()
        if lease is None or not record.is_same_value(tensor._version, tensor) or record.alias.dtype != tensor.dtype:
            return None
        if not record.is_whole:
            with self.accounting.lock:
                if not record.shares_with_others(self._mark):
                    return None
        record.num_tensors += 1
        self.copies.protect(tensor)
        return SavedTensor.of(tensor, lease, record)

    def _count_hook(self, begin_s: float, waited_s: float, mark: StreamEvent | None) -> None:
        """Count the time since the hook began, without its waits.

        Args:
            begin_s: by ``time.perf_counter``.
            waited_s: of the stalls by then.
            mark: in the stream, from when the hook ran; a device that has not passed it yet has missed nothing.
        """
        if mark is None or mark is PASSED or mark.query():
            hook_s = time.perf_counter() - begin_s - (self._stalls.waited_s - waited_s)
            self._counters.hook_s += max(hook_s, 0.0)

    def _find(self, tensor: torch.Tensor, storage: torch.UntypedStorage, nbytes: int, version: int) -> Lease | None:
        """Return the lease of a storage that was saved before, in this version, with all that the tensor shows."""
        record = self.accounting.by_storage.get(storage._cdata)
        lease = record() if isinstance(record, SavedStorage) else None
        if not isinstance(record, SavedStorage) or lease is None or record.nbytes != nbytes:
            return None
        is_same = record.is_same_value(version, tensor) and record.shares_with_others(self._mark)
        return lease if is_same else None

    def _stay(
        self, current: SavedPass, tensor: torch.Tensor, storage: torch.UntypedStorage, nbytes: int
    ) -> tuple[Share | None, Placement | None]:
        """Count a storage that stays for certain.

        Nothing is certain of a storage that is traced, shown in a record of the step, or under a limit that may have it
        leave later.

        Returns:
            Its share, or ``None`` if it needs a full record; and where it goes, if that was asked for.
        """
        record = self.accounting.by_storage.get(storage._cdata)
        if isinstance(record, KeptStorage):
            share = record()
            if share is not None and record.nbytes == nbytes and record.is_same_value(tensor):
                return share, None
        elif record is not None and record() is not None:
            return None, None  # saved before: in which version, a probe tells
        limit = self._limit_of(current)
        # Below half of the limit of passes that are not planned, nothing has to leave: the other half can.
        is_limited = limit is not None and (
            current.cursor is not None or self._counters.resident_bytes + nbytes > limit // 2
        )
        if is_limited or current.recorder is not None or self.accounting.recorder is not None:
            return None, None
        placement = self._place(current, nbytes)
        if placement is not Placement.KEEP:
            return None, placement
        share = open_kept(self.accounting, current, owner_of(tensor), storage._cdata, nbytes, time.perf_counter())
        self.accounting.settle()
        return share, placement

    def _open(
        self,
        current: SavedPass,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        lease: Lease,
        placement: Placement | None,
    ) -> None:
        """A storage seen for the first time in this version: keep it, or have it written."""
        nbytes = storage.nbytes()
        if placement is None:
            placement = self._place(current, nbytes)
        operation = None if tensor.requires_grad else Operation.current()
        record = open_saved(
            self.accounting, current, lease, storage, nbytes, shows_all(tensor, nbytes), operation=operation
        )
        self.accounting.settle()
        # What stays may have to go later, when another stream is the current one.
        record.produced = self._mark()
        if placement is Placement.KEEP:
            self.accounting.counters.bytes_kept += nbytes
            return
        most_saved_bytes = self.accounting.most_saved_bytes
        self._run_ahead.add(record.produced, nbytes, most_saved_bytes)
        if self._group.add(record, placement, most_saved_bytes) or self._limit_of(current) is not None:
            self._send_group()

    def _mark(self) -> StreamEvent:
        return PASSED if self._tiers.ssd is None else self.copies.mark()  # where all stays, no thread waits

    def _send_group(self, *, is_over: bool = False) -> None:
        """Queue the writes of what leaves together. The lock is held.

        Args:
            is_over: of all that is to leave, because the forward is over or memory is short.
        """
        if self.fetcher.is_closed:
            self._group.drop()
            return
        self.fetcher.note_given()  # what is in use stays
        ssd, host, group = self._tiers.ssd, self._tiers.host, self._group.taken(is_over=is_over)
        if host is not None:
            SavedStorage.queue_writes([record for record, place in group if place is Placement.HOST], host)
        to_drives = [record for record, _ in group if record.state is KEPT]
        if ssd is not None and to_drives:
            self.budget.observe(max([record.nbytes for record in to_drives]), self.accounting.most_saved_bytes)
            SavedStorage.queue_writes(to_drives, ssd)

    def _admit(self, current: SavedPass, nbytes: int) -> Latch | None:
        """Under a budget, what to wait for before the next storage fits."""
        limit = self._limit_of(current)
        if limit is None or self.accounting.counters.resident_bytes + nbytes <= limit:
            return None
        self._send_group(is_over=True)
        return self.fetcher.admit(nbytes, limit)

    @staticmethod
    def _limit_of(current: SavedPass) -> int | None:
        return current.limit_bytes if current.cursor is None else current.cursor.limit_bytes

    def _place(self, current: SavedPass, nbytes: int) -> Placement:
        """Return where a storage goes. Host memory stands for the first tier that has room."""
        if self._tiers.ssd is None:
            return Placement.KEEP
        if current.cursor is not None:
            current.cursor.skip(current.sizes)
            had_room = not current.cursor.ran_out and current.cursor.limit_bytes is None
            placement = current.cursor.place(nbytes)
            if had_room and current.cursor.ran_out:
                self._heap_policy.enter(HeapMode.MAP_EACH)  # as this pass did not expect
            return placement
        if current.expects_keep(self._passes.book, nbytes):
            return Placement.KEEP  # wanted at once
        return Placement.HOST

    # -- unpack --------------------------------------------------------------------------------------------------

    def unpack(self, packed: SavedTensor | SavedWeight) -> torch.Tensor:
        """Give autograd a tensor back that is not simply kept, waiting for the drive if it must.

        Raises:
            RuntimeError: it was edited in place since, or its memory is gone.
            StorageError: the drive refuses.
        """
        if isinstance(packed, SavedWeight):
            if self._weights is not None:
                self._weights.wanted(packed.unit)
            return give_back(packed.held) if isinstance(packed.held, tuple) else packed.held.tensor()
        self.check_process()
        lease, probe = packed.lease, packed.probe
        if (version := probe.version) != probe.saved:
            raise inplace_error((packed.dtype, self.device, packed.size), version=version, expected=probe.saved)
        begin_s, waited_s = time.perf_counter(), self._stalls.waited_s
        storage = self.fetcher.fetch(lease.record)
        if storage.nbytes() < lease.record.nbytes:
            raise resized_error(lease.record.nbytes, storage.nbytes())
        tensor: torch.Tensor = probe.rebuild(packed.spec, storage)
        self.copies.protect(tensor)
        tensor = self.handed_out.give(tensor, lease.record if packed.is_leaf else None)
        self.fetcher.look_ahead(lease.record)  # last: workers that are told of reads want the GIL
        self._count_hook(begin_s, waited_s, None)
        return tensor
