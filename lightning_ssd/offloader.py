"""Build and own all parts that move tensors in one process; the API for plain PyTorch."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType

import torch
from torch.optim import Optimizer

from lightning_ssd._assembly import NOTHING, Components, assemble, open_state_files, open_wear_meter
from lightning_ssd._environment import Environment, host_budget_for
from lightning_ssd.activations.parameter_filter import device_of
from lightning_ssd.activations.tensor_cache import TensorCache
from lightning_ssd.common.accelerators import accelerator_of, with_index
from lightning_ssd.common.collectives import AllReduceMin, have_same
from lightning_ssd.common.dtensor import local_of
from lightning_ssd.common.exit_guard import close_at_exit
from lightning_ssd.common.interrupts import deferring_interrupts
from lightning_ssd.common.status_line import StatusLine
from lightning_ssd.common.validation import expect
from lightning_ssd.config import HardwareProfile, OffloadPolicy
from lightning_ssd.errors import ConfigError, OffloaderClosedError
from lightning_ssd.memory.host_budget import HostMemoryBudget
from lightning_ssd.memory.readings import read_memory
from lightning_ssd.optimizer.offloaded_optimizer import NO_OPTIMIZER, OffloadedOptimizer
from lightning_ssd.planning.plan import Machine, TierRates
from lightning_ssd.planning.trace import Trace
from lightning_ssd.recompute.block_discovery import compiled_modules, find_blocks
from lightning_ssd.recompute.blocks import Blocks
from lightning_ssd.scheduling.plan_report import PlanReport
from lightning_ssd.storage.backend import Backend
from lightning_ssd.telemetry import metrics
from lightning_ssd.telemetry.events import EventLog
from lightning_ssd.telemetry.stats import OffloadStats, OptimizerStats, SavedBytes
from lightning_ssd.telemetry.step_record import PhaseName, StepRecord, StepRecorder
from lightning_ssd.tiers.bandwidth_meter import BandwidthMeter
from lightning_ssd.tiers.host import HostTier
from lightning_ssd.tiers.streams import CopyEngine, HostCopies, StreamCopies
from lightning_ssd.wear.meter import WearMeter

__all__ = ["Offloader"]

_NUMBERS_S, _PATIENCE_S = 0.05, 60.0
"""Limits of waits for a lock, for calls that read numbers, and for calls that end or await the offloader's work."""


class Offloader:
    """Offloads the saved activations of one process and one device to SSD.

    Nothing is opened before :meth:`open` (or ``with``), so that an offloader may be built before processes are
    spawned or forked. Forward runs inside :meth:`saved_tensors`, and :meth:`end_backward` follows each backward.
    Saved tensors leave memory while forward still runs, and are read back just before backward needs them.

    Example::

        with lightning_ssd.Offloader(device=next(model.parameters()).device) as offloader:
            offloader.register_module(model)
            for batch in data:
                with offloader.saved_tensors():
                    loss = model(batch)
                loss.backward()
                offloader.end_backward()
                optimizer.step()
                optimizer.zero_grad()
                print(offloader.drain_metrics())

    Args:
        policy: says what is offloaded; default: ``OffloadPolicy()``.
        hardware: says where to; default: ``HardwareProfile()``.
        device: device of the tensors; default: that of the modules given to :meth:`open`, else (as under ``with``) the
            CPU.
        default_directory: used when neither ``hardware.paths`` nor ``$LIGHTNING_SSD_PATHS`` names a directory.
        agree: for processes that train together: returns the smallest of each number over all processes, so that they
            make equal plans. Called after the 1st, 2nd, 4th ... backward (and every 1,024th with ``wear_budget``), by
            :meth:`offload_optimizer`, and by :meth:`register_module` if blocks are recomputed.
        is_sharded: processes have shards of the model (FSDP2). Else processes with ``agree`` are assumed to train
            copies of the whole model with ``DistributedDataParallel``, which holds the trained weights.
        num_local_processes: number of this run's processes on this machine, which share its memory, its drives and
            their wear; default: ``$LOCAL_WORLD_SIZE``, which torchrun sets, else 1.
        local_rank: number of this process among them, so that each begins with another directory; default:
            ``$LOCAL_RANK``, which torchrun sets, else 0.
    """

    def __init__(
        self,
        policy: OffloadPolicy | None = None,
        *,
        hardware: HardwareProfile | None = None,
        device: torch.device | str | None = None,
        default_directory: str | os.PathLike[str] | None = None,
        agree: AllReduceMin | None = None,
        is_sharded: bool = False,
        num_local_processes: int | None = None,
        local_rank: int | None = None,
        _wrap_backend: Callable[[Backend], Backend] | None = None,
        _copies: CopyEngine | None = None,
    ) -> None:
        policy = OffloadPolicy() if policy is None else policy
        hardware = HardwareProfile() if hardware is None else hardware
        example = 'OffloadPolicy(activations="offload"). In Hydra write lightning_ssd/offload=ssd'
        self.policy = expect("policy", policy, OffloadPolicy, example)
        self.hardware = expect("hardware", hardware, HardwareProfile, 'HardwareProfile(paths=["/my/ssd"])')
        self._device = None if device is None else torch.device(device)
        self._default_directory = default_directory
        self._agree = agree
        self._is_sharded = is_sharded
        self._num_local = num_local_processes or max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
        self._local_rank = int(os.environ.get("LOCAL_RANK", "0")) if local_rank is None else local_rank
        self._wrap_backend = _wrap_backend
        self._copies = _copies
        self._events = EventLog()
        self._resources: ExitStack | None = None
        self._cache: TensorCache | None = None
        self._parts: Components = NOTHING
        self._wear: WearMeter | None = None
        self._host_budget = HostMemoryBudget(0)
        self._num_drives = 1
        self._optimizers: list[OffloadedOptimizer] = []
        self._last_optimizer_stats: tuple[OptimizerStats, ...] = ()
        self._last_stats = self._known_stats = self._sampled = OffloadStats()
        self._recorder: StepRecorder | None = None
        self._awaits_optimizer = self.policy.optimizer_states == "offload"  # else the program cannot forget one
        self._has_trained = self._has_failed = False
        self.description = "closed"

    # -- opening and closing -------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether it is between :meth:`open` and :meth:`close`."""
        return self._resources is not None

    def open(self, *modules: torch.nn.Module) -> Offloader:
        """Open files and threads, and register modules. A further call while it is open only registers modules.

        Raises:
            StorageError: a directory cannot serve (:class:`UnsuitablePathError`) or is full.
            ConfigError: two of ``hardware.paths`` are one directory, or tensors of the device cannot be moved.
            BackendUnavailableError: ``hardware.backend`` names one that does not work here.
        """
        if not self.is_open:
            stack = ExitStack()
            try:
                with _undisturbed("Opening spill files"):
                    self._open(stack, self._device or device_of(modules))
                    self._finalizer = close_at_exit(self, stack)
                    self._resources = stack
            except BaseException:
                with deferring_interrupts():
                    self._cache, self._parts, self._resources = None, NOTHING, None
                    stack.close()
                raise
        for module in modules:
            self.register_module(module)
        return self

    def _open(self, stack: ExitStack, device: torch.device) -> None:
        device = with_index(device)
        self._host_budget = HostMemoryBudget(0)
        environment = self._environment(device, self._copies)
        self._num_drives = len(environment.paths)
        self._parts = parts = assemble(stack, self.policy, environment)
        self.description, self._wear, self._last_optimizer_stats = parts.description, parts.wear, ()
        ssd = parts.tiers.ssd
        self._cache = TensorCache(
            parts.tiers,
            device=device,
            min_tensor_nbytes=self.policy.min_tensor_nbytes,
            events=self._events,
            copies=environment.copies,
            scheduler=parts.scheduler,
            recompute=self.policy.activations in ("recompute", "recompute_offload"),
            heap_policy=parts.heap_policy,
            weights=parts.parameters.pager,
            cpu=parts.cpu,
            meter=None if ssd is None else BandwidthMeter(ssd, expected=environment.expected_rates),
        )
        stack.callback(self._cache.close)
        self._last_stats = self._known_stats = self._sampled = OffloadStats()
        self._has_trained = self._has_failed = False

    def _environment(self, device: torch.device, copies: CopyEngine | None) -> Environment:
        accelerator = accelerator_of(device)
        if not self._host_budget.total_bytes:  # until a device makes it more than nothing
            self._host_budget = host_budget_for(device, self.hardware, self._num_local)
        if copies is None:
            copies = HostCopies() if accelerator is None else StreamCopies(accelerator)
        return Environment(
            hardware=self.hardware,
            device=device,
            copies=copies,
            events=self._events,
            default_directory=self._default_directory,
            agree=self._agree,
            is_sharded=self._is_sharded,
            num_local_processes=self._num_local,
            local_rank=self._local_rank,
            host_budget=self._host_budget,
            wrap_backend=self._wrap_backend,
        )

    def close(self) -> None:
        """Join the threads, close the files, restore malloc. Idempotent.

        Raises:
            StorageError: a read had failed for good; the thread that waited for it has seen the same error.
            RuntimeError: a signal handler calls it while this thread holds a lock of the offloader. Nothing is closed.
        """
        if self._cache is not None and not self._is_foreign:
            if any(optimizer.is_stepping_here for optimizer in self._optimizers):
                raise RuntimeError(
                    "close() was called in the middle of a step of an offloaded optimizer, by a signal handler or a "
                    "hook. Nothing was done. Set a flag there, and close the offloader after optimizer.step()"
                )
            _refuse_within("close", self._cache)
        resources, cache = self._resources, self._cache
        if resources is None or cache is None:
            return
        if not cache.process.is_here:  # a fork: files and threads are the parent's
            self._resources = self._cache = None
            self._parts = NOTHING
            self._finalizer.detach()
            resources.pop_all()
            return
        with _undisturbed("Closing spill files"):
            failure, is_bypassed = self._close(resources, cache)
        if failure is not None:
            raise failure
        if not self._has_failed and (is_bypassed or (self._awaits_optimizer and self._has_trained)):
            self._awaits_optimizer = False
            warnings.warn(NO_OPTIMIZER, stacklevel=2)

    def _close(self, resources: ExitStack, cache: TensorCache) -> tuple[BaseException | None, bool]:
        """Close all parts; return the error of a failed read, and whether an optimizer was bypassed."""
        is_bypassed = any(optimizer.is_bypassed for optimizer in self._optimizers)  # closing writes lent states back
        try:
            try:
                self.end_record()
            finally:
                failure = cache.close()
        finally:
            try:
                self._last_stats = self._snapshot()
            finally:  # a broken device may raise in _snapshot()
                self._resources = self._cache = None
                self._finalizer.detach()
                try:
                    resources.close()
                finally:
                    self._last_optimizer_stats = self.optimizer_stats
                    self._optimizers, self.description = [], "closed"
        return failure, is_bypassed

    def abort(self) -> None:
        """Drop queued work after a failed step, so that :meth:`close` raises nothing in addition to its error."""
        self._has_failed = True
        if self._cache is not None and not self._is_foreign:
            self._cache.abort()

    def __enter__(self) -> Offloader:
        return self.open()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc is not None:
            self.abort()
        self.close()

    # -- in the training loop ------------------------------------------------------------------------------------

    def streamed_init(self) -> AbstractContextManager[None]:
        """Return a context for building a model, in which offloaded weights leave memory as soon as they are made.

        With ``parameters="auto"`` they leave when memory is short. So the model is never whole in memory, and still
        gets the same weights from the same random numbers. :meth:`register_module` has to follow, which brings trained
        weights back to memory.
        """
        self._opened()
        return self._parts.parameters.streamed_init()

    def register_module(self, module: torch.nn.Module) -> None:
        """Register the parameters and buffers of ``module``, which are not offloaded as saved activations.

        If the policy offloads parameters, frozen ones are written to the drive now, and stay there between their uses.
        With ``parameters="auto"`` it is decided now how many of them.

        Blocks that ``policy.recompute_modules`` lets run again get another ``forward`` until :meth:`close`. So do the
        repeated blocks with ``activations="recompute"`` and ``"recompute_offload"``.

        Raises:
            ConfigError: the module has no block of the classes that ``policy.recompute_modules`` names; or it is on
                another device, and the offloader was opened for the CPU.
            BudgetError: ``memory_budget`` has no room for tensors that cannot be offloaded, with ``parameters="auto"``.
            StorageError: weights cannot be written: the drive is full (:class:`OutOfSpaceError`) or refuses.
        """
        cache, resources = self._opened(), self._resources
        kind = device_of([module]).type
        if kind not in ("cpu", "meta") and cache.device.type == "cpu":
            raise ConfigError(
                f"{type(module).__name__} is on a device of type {kind!r}, and this Offloader was opened for the CPU, "
                "so that nothing would move. Write Offloader(device=next(model.parameters()).device), or open(model)"
            )
        # Before the blocks' patches, so that a recomputed forward also goes through the patches of weights.
        self._parts.parameters.register_module(module)
        classes = self.policy.recomputable_classes
        if classes is not None and resources is not None:
            blocks = find_blocks(module, classes)
            is_agreed = self._is_agreed(blocks)
            new = {name: block for name, block in blocks.items() if not any(block in known for known in cache.blocks)}
            if new:  # a module that is registered again, or within another one, must not be measured twice
                is_full = self.policy.verify == "full"
                cache.blocks.append(resources.enter_context(Blocks(new, full=is_full, is_agreed=is_agreed)))
            elif not blocks and self.policy.activations != "auto":
                name, wish, compiled = type(module).__name__, self.policy.activations, compiled_modules(module)
                if compiled:
                    raise ConfigError(
                        f"activations={wish!r} finds no blocks in {name} but compiled or scripted ones ({compiled}), "
                        "which cannot be recomputed. Compile modules within each block instead, such as "
                        "block.attention.compile(), or use activations='offload'"
                    )
                raise ConfigError(
                    f"{name} has no repeated blocks, which activations={wish!r} would recompute; name their classes in "
                    "OffloadPolicy.recompute_modules, or use 'offload'"
                )
        cache.parameters.register_module(module)
        self._parts.parameters.tell()

    def _is_agreed(self, blocks: Iterable[str]) -> bool:
        """Return whether all processes recompute exactly these blocks; false with "auto", where each follows its plans.

        Only then may a recomputed block communicate, because it waits for the same block in the other processes.

        Raises:
            ConfigError: the processes would recompute different blocks.
        """
        if self._agree is None or self.policy.activations == "auto":
            return False
        if not have_same(blocks, self._agree):
            raise ConfigError(
                "the processes of this run would recompute different blocks, and have to recompute the same ones. Give "
                f"each the same model and OffloadPolicy.recompute_modules. Here: {', '.join(sorted(blocks)) or 'none'}"
            )
        return True

    def move_in(self, module: torch.nn.Module) -> None:
        """Before a module is moved to a device, move the weights to offload one by one, and offload each at once.

        So the device never has to hold all of them. Does nothing if no weights are offloaded.

        Raises:
            StorageError: weights cannot be written.
        """
        self._opened()
        self._parts.parameters.move_in(module)

    def host_copies(self) -> AbstractContextManager[None]:
        """Return a context for ``module.state_dict()`` in which offloaded weights of a device are copied to the host.

        The device need not have room for all of them.
        """
        return self._parts.parameters.host_copies()

    def send_out_weights(self) -> None:
        """Offload again the weights that were read outside of the model's forward and backward, such as by a save.

        Each :meth:`end_backward` does so, too.
        """
        if not self._is_foreign:
            self._parts.parameters.send_out()

    def offload_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Offload the states of ``optimizer`` to SSD, and return the optimizer to use in its place.

        If the policy keeps the states, or the optimizer has no parameters, return ``optimizer`` itself. Schedulers,
        hooks and groups of ``optimizer`` remain valid. The files live until :meth:`close`; ``state_dict`` also works
        afterwards.

        Raises:
            ConfigError: it is no optimizer, or it couples its parameters, so that it cannot update a part of them.
            StorageError: a directory cannot serve, or is full.
        """
        self._opened()
        expect("optimizer", optimizer, Optimizer, "torch.optim.AdamW(model.parameters())")
        self._awaits_optimizer = False
        resources = self._resources
        parameter = next((p for group in optimizer.param_groups for p in group["params"]), None)
        if self.policy.optimizer_states == "keep" or resources is None or parameter is None:
            return optimizer
        environment = self._environment(parameter.device, copies=None)
        with ExitStack() as undo:
            with _undisturbed("Opening and trying the files of optimizer states"):
                files = open_state_files(self.policy, environment)
                undo.callback(files.close)
            offloaded = OffloadedOptimizer(
                optimizer,
                files,
                master_weights=self.policy.master_weights,
                declared=self.policy.per_parameter_optimizers,
                events=self._events,
                updating=self._parts.parameters.updating,
            )
            resources.callback(offloaded.close)
            undo.pop_all()
        self._optimizers.append(offloaded)
        self._parts.parameters.will_be_updated(offloaded)
        if self._wear is None:
            self._wear = open_wear_meter(self.policy, environment)
        self._wear.watch("optimizer states", files.tier.written_bytes)
        return offloaded

    def expect_no_optimizer(self) -> None:
        """Let :meth:`close` not warn that no optimizer was offloaded, because the strategy offloads all optimizers."""
        self._awaits_optimizer = False

    def saved_tensors(self, *, signature: Hashable = None) -> AbstractContextManager[None]:
        """Return a context for a forward, whose saved tensors are offloaded. Costs nothing under ``no_grad``.

        Args:
            signature: names the kind of step, for example the shapes of its batch. Steps of one kind share a plan.
                Without it they are distinguished by the sizes of their saved tensors.

        Raises:
            BudgetError: on entry: a budget of the policy cannot be kept by any plan for this model and batch.
        """
        cache = self._opened()
        current = cache.new_pass(signature)
        self._parts.parameters.begin_pass()
        current.keep_until_over(self)  # or the offloader might be dropped, and closed, meanwhile
        return current

    def end_backward(self) -> None:
        """After a backward, record its order and times, make and apply plans, and give spare memory back.

        Raises:
            BudgetError: a budget of the policy cannot be kept by any plan for this model and batch.
            StorageError: the drive has refused changed weights or gradients, which may be lost.
        """
        cache, wear = self._opened(), self._wear
        self._has_trained = True
        recorder = self._recorder  # once, here and below: another thread may end the record meanwhile
        if recorder is not None and (gradient_bytes := cache.gradient_bytes) is not None:
            recorder.sized(gradient_bytes=gradient_bytes)
        has_counted = cache.end_backward()
        self._parts.parameters.border()
        if self._parts.reload is not None:
            self._parts.reload.release()
        self._parts.heap_policy.border()
        if wear is not None and (warning := wear.border()) is not None:
            warnings.warn(warning, stacklevel=2)
        if has_counted:
            self._snapshot()  # for a signal handler that reads the numbers while the lock is held

    def wait_for_plan(self) -> None:
        """Block until the plan under way has been made; the next step follows it. Training never needs it.

        Raises:
            BudgetError: a budget of the policy cannot be kept by any plan for this model and batch.
            RuntimeError: a signal handler calls it while this thread holds a lock of the offloader.
        """
        if self._parts.scheduler is not None and self.is_open:
            _refuse_within("wait_for_plan", self._opened())
            self._parts.scheduler.wait()

    def flush(self) -> None:
        """Wait until all queued writes have ended. Training never needs it; tests and measurements do.

        Raises:
            RuntimeError: a signal handler calls it while this thread holds a lock of the offloader.
        """
        if self.is_open:
            cache = self._opened()
            _refuse_within("flush", cache)
            cache.flush()

    def _opened(self) -> TensorCache:
        if self._cache is None:
            raise OffloaderClosedError("this Offloader is not open (any more); use its with block, or call open()")
        self._cache.process.check()
        return self._cache

    @property
    def _is_foreign(self) -> bool:
        """Whether this process was forked. Its copies of locks may be held for ever, so that it must not take one."""
        return self._cache is not None and not self._cache.process.is_here

    # -- numbers -------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> OffloadStats:
        """Counters since :meth:`open`; after :meth:`close` the final ones. A fork has none of its own.

        If a lock is not free within 50 ms, because a signal handler has interrupted its holder, they are those of the
        last backward.
        """
        return self._snapshot() if self.is_open else self._last_stats

    @property
    def optimizer_stats(self) -> tuple[OptimizerStats, ...]:
        """Counters of each offloaded optimizer; after :meth:`close` the final ones."""
        own = () if self._is_foreign else tuple(optimizer.stats for optimizer in self._optimizers)
        return self._last_optimizer_stats + own

    def _moved(self) -> OffloadStats:
        return sum((optimizer.moved for optimizer in self.optimizer_stats), start=self.stats)

    def _snapshot(self) -> OffloadStats:
        if self._cache is None or self._is_foreign:
            return self._last_stats
        if not self._cache.is_free_within(_NUMBERS_S):
            return self._known_stats
        known = self._known_stats
        stats = self._parts.parameters.added_to(self._cache.snapshot())
        if self._known_stats is known:  # else a signal handler has read later numbers meanwhile
            self._known_stats = stats
        return stats

    def begin_record(self, step: int = 0, *, expected_s: float = 1.0, optimizers: Iterable[Optimizer] = ()) -> bool:
        """Record memory, moves and stalls of one step, from now on until :meth:`end_record`.

        A thread reads the memory in use some hundred times; each saved storage costs a few microseconds more.

        Args:
            step: number of the step, for the record.
            expected_s: approximate duration of the step in seconds.
            optimizers: optimizers whose states are counted, besides the offloaded ones.

        Returns:
            Whether the record has begun; false if another caller's record is under way.

        Raises:
            ConfigError: ``expected_s`` is no duration.
        """
        if not 0 < expected_s < math.inf:
            raise ConfigError(f"begin_record(expected_s={expected_s!r}) is no duration; give seconds above 0")
        cache = self._opened()
        if self._recorder is not None:
            return False
        self._recorder = recorder = cache.begin_record(step, expected_s=expected_s)
        recorder.sized(
            weight_bytes=cache.parameters.weight_bytes,
            state_bytes=sum(states.resident_bytes for states in self.optimizer_stats) + _state_bytes(optimizers),
        )
        if (gradient_bytes := cache.gradient_bytes) is not None:
            recorder.sized(gradient_bytes=gradient_bytes)
        return True

    def mark_record(self, phase: PhaseName) -> None:
        """Name the phase that the training thread is in from now on, for a step that is being recorded.

        A loop calls it for phases that only the loop knows, such as ``"data"`` between the batches of one step.
        """
        recorder = self._recorder
        if recorder is not None:
            recorder.mark(phase)

    def end_record(self) -> StepRecord | None:
        """End the record that :meth:`begin_record` began, and return it; ``None``: none had begun."""
        recorder = self._recorder
        if recorder is None:
            return None
        recorder.stop()
        try:
            if self._cache is not None and not self._is_foreign:
                self._cache.end_record()
        finally:
            self._recorder = None
        recorder.happened(self._events.peek())
        return recorder.finish()

    def reset_peaks(self) -> None:
        """Reset all peaks to the memory in use now."""
        self._opened().reset_peaks()
        self._parts.parameters.reset_peak()

    @property
    def plan_report(self) -> PlanReport | None:
        """Predicted and measured numbers of the plan in force; ``None`` before a pass has followed a plan."""
        scheduler = self._parts.scheduler
        return None if scheduler is None else scheduler.report()

    @property
    def unusable(self) -> str | None:
        """Reason why plans move nothing to a drive; ``None``: they can, or no plan has been made yet."""
        return None if self._parts.scheduler is None else self._parts.scheduler.unusable

    @property
    def trace(self) -> Trace | None:
        """The latest profiled pass; ``None`` before there is one. It has the blocks that may be recomputed."""
        return None if self._parts.scheduler is None else self._parts.scheduler.trace

    @property
    def machine(self) -> Machine | None:
        """The tiers' rates that plans are made with; ``None`` without a planner. May measure the drives."""
        scheduler = self._parts.scheduler
        if scheduler is None or not self.is_open or self._is_foreign:
            return None
        return scheduler.machine

    @property
    def drive_rates(self) -> TierRates | None:
        """Rates of all drives together in bytes per second; ``None``: nothing moves to drives. Measures nothing.

        Once there is a plan, they are the rates that plans use, else those that the run has shown.
        """
        if self._cache is None or self._is_foreign:
            return None
        return self._cache.drive_rates if self.plan_report is None else (self.machine or Machine()).ssd

    def drain_metrics(self, *, step_s: float | None = None) -> dict[str, float]:
        """Return the metrics since the last call, under the keys of :data:`lightning_ssd.telemetry.metrics.METRICS`.

        Args:
            step_s: duration of the last step in seconds, if the caller has measured it.
        """
        while True:
            before, now = self._sampled, self._moved()
            if before is self._sampled:  # else a signal handler has drained meanwhile, and has reported these numbers
                break
        self._sampled = now
        scheduler, wear, host = self._parts.scheduler, self._wear, self._parts.tiers.host
        events = self._events.drain()
        recorder = self._recorder
        if recorder is not None:
            recorder.happened(events)
        return metrics.compute(
            events,
            stats_before=before,
            stats_now=now,
            readings=read_memory(self._device if self._cache is None else self._cache.device),
            plan=None if scheduler is None else scheduler.readings(),
            drive_life_days={} if wear is None else wear.life_days(),
            step_s=step_s,
            states_bytes=sum(one.resident_bytes for one in self.optimizer_stats) if self._optimizers else None,
            host_tier_bytes=host.memory_bytes if isinstance(host, HostTier) and not self._is_foreign else None,
            num_drives=self._num_drives,
            worst=self._take_worst(),
        )

    def _take_worst(self) -> SavedBytes | None:
        if self._cache is None or self._is_foreign or not self._cache.is_free_within(_NUMBERS_S):
            return None
        return self._cache.take_worst()


@contextmanager
def _undisturbed(doing: str) -> Iterator[None]:
    """Show a line while files are opened or closed, defer Ctrl-C to the end, and make no inference tensors."""
    with StatusLine(doing, delay_s=0), deferring_interrupts(), torch.inference_mode(False):
        yield


def _refuse_within(name: str, cache: TensorCache) -> None:
    """Refuse a call that would wait for ever: a signal handler has interrupted this thread while it holds a lock."""
    if not cache.is_free_within(_PATIENCE_S):
        raise RuntimeError(
            f"{name}() has waited {_PATIENCE_S:g} s for a lock that this thread seems to hold itself: a signal handler "
            f"has interrupted our own work. Nothing was done. Set a flag there, and call {name}() in the training "
            "loop; or raise an exception that ends the loop"
        )


def _state_bytes(optimizers: Iterable[Optimizer]) -> int:
    """Return the bytes of states that stay in memory. An offloaded optimizer counts its own without fetching them."""
    states = [o.state for o in optimizers if not isinstance(o, OffloadedOptimizer)]
    values = [value for state in states for held in state.values() if isinstance(held, dict) for value in held.values()]
    tensors = [local_of(value) for value in values if isinstance(value, torch.Tensor)]
    dense = [value for value in tensors if type(value) is torch.Tensor and value.layout is torch.strided]
    storages = {value.untyped_storage()._cdata: value.untyped_storage() for value in dense}
    return sum(storage.nbytes() for storage in storages.values())
