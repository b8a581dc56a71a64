"""Owns the saved storages of one device: begins and ends passes, learns from them, counts, and closes.

The hooks of the passes are in ``hooks.py``.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Hashable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from lightning_ssd.activations.accounting import MemoryAccounting
from lightning_ssd.activations.fetcher import Fetcher
from lightning_ssd.activations.hooks import SavedTensorHooks, Tiers
from lightning_ssd.activations.live_passes import LivePasses
from lightning_ssd.activations.saved_pass import SavedPass
from lightning_ssd.activations.storage_state import QUEUED
from lightning_ssd.common.formatting import format_sizes
from lightning_ssd.common.waiting import is_free_within
from lightning_ssd.errors import OffloaderClosedError
from lightning_ssd.memory.heap_policy import HeapPolicy
from lightning_ssd.memory.readings import available_bytes, level_bytes, peak_bytes
from lightning_ssd.parameters.pager import Pager
from lightning_ssd.planning.plan import TierRates
from lightning_ssd.recompute.blocks import Blocks
from lightning_ssd.scheduling.clock import clock_of
from lightning_ssd.scheduling.overhead import CpuCosts
from lightning_ssd.scheduling.pass_profile import PrefetchBudget
from lightning_ssd.scheduling.scheduler import Scheduler
from lightning_ssd.scheduling.stalls import Stalls
from lightning_ssd.telemetry.events import EventLog
from lightning_ssd.telemetry.stats import OffloadStats, SavedBytes
from lightning_ssd.telemetry.step_record import StepRecorder
from lightning_ssd.tiers.bandwidth_meter import BandwidthMeter
from lightning_ssd.tiers.streams import CopyEngine

__all__ = ["TensorCache"]


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
        self._min_nbytes = max(min_tensor_nbytes, 1)
        self._is_capturing = copies.is_capturing
        self._recompute = recompute
        self.blocks: list[Blocks] = []
        self._weights = weights
        self._warned_of_writes = self._warned_of_graphs = False
        self._num_plain = 0
        self._threads: dict[int, threading.Thread] = {}  # those that have begun a pass, by their numbers
        # All of the following are guarded by the accounting lock.
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
        self._budget = PrefetchBudget()
        self._stalls = Stalls(self._clock, self._counters, events, self._budget.stalled)
        self.fetcher = Fetcher(
            self.accounting,
            self._passes,
            budget=self._budget,
            stalls=self._stalls,
            device=device,
            clock=self._clock,
            copies=copies,
            tier=tiers.ssd,
        )
        self.hooks = SavedTensorHooks(
            tiers, self.fetcher, min_nbytes=self._min_nbytes, weights=weights, heap_policy=self._heap_policy
        )
        self.parameters, self.process = self.hooks.parameters, self.hooks.process

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
        if self._is_capturing():
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
        self.process.check()
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
        if not self.hooks.graph_memory.wants_no_hooks or current.begin is not None or current.is_finished:
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

    def leave(self, current: SavedPass) -> None:
        """A forward is over."""
        if self.process.is_here:
            with self.accounting.lock:
                if current.cursor is not None:
                    current.cursor.skip(current.sizes)
                self.accounting.settle()
                self.hooks.send_group(is_over=True)
                if self.accounting.recorder is not None:
                    self.accounting.recorder.forward_left()

    def end_backward(self) -> bool:
        """A backward is over: learn from it, plan, tell of failed writes. A missed call costs time only.

        Returns:
            Whether a pass had hooks, so that there is more to count.

        Raises:
            BudgetError: the policy's budget cannot be kept by any plan.
        """
        self.process.check()
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
                self._budget.pass_ended(
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
        if not self.process.is_here:  # a fork may go on with a graph of ours, and may take no lock
            return
        with self.accounting.lock:
            current.recomputed_bytes += sum(nbytes for nbytes in sizes if nbytes >= self._min_nbytes)
            self.accounting.recomputed(current.recomputed_bytes)

    def _settle_stalls(self) -> None:
        if not self._is_capturing():
            self._stalls.settle()

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
            self.hooks.drop_group()
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
            self.hooks.send_group(is_over=True)
        for tier in (self._tiers.ssd, self._tiers.host):
            if tier is not None:
                tier.flush()

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
