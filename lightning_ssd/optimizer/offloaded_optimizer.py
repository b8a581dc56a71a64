"""An optimizer whose states are on SSDs: fetched, updated and flushed subgroup by subgroup, with the user's own step.

Source: MLP-Offload (arXiv 2509.02480): subgroups, several paths by their rates, and an alternating order, so that a
step begins with the subgroups that are still in memory. Beyond it: any optimizer that updates each parameter by itself,
bit for bit; last good copies that survive failed writes; and snapshots that cost no memory.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_ssd.common.compiler import compiler_is_at_work
from lightning_ssd.common.forks import OwnProcess
from lightning_ssd.errors import ConfigError, OffloaderClosedError, StorageError
from lightning_ssd.optimizer.checkpoint.loading import load_states
from lightning_ssd.optimizer.checkpoint.state_dict import saved_states
from lightning_ssd.optimizer.live_states import LiveStates
from lightning_ssd.optimizer.paged_states import PagedStates, Updating
from lightning_ssd.optimizer.step.contract import (
    is_known,
    refuse_by_kind,
    refuse_differentiable,
    refuse_own_step,
    refuse_undeclared,
)
from lightning_ssd.optimizer.step.copies import copied
from lightning_ssd.optimizer.step.rehearsal import rehearse
from lightning_ssd.optimizer.step.stepper import SubgroupStepper, WholeStep
from lightning_ssd.optimizer.step.types import WITHIN_STEP, State
from lightning_ssd.optimizer.store.files import StateFiles
from lightning_ssd.telemetry.events import EventLog
from lightning_ssd.telemetry.stats import OptimizerStats

__all__ = ["NO_OPTIMIZER", "OffloadedOptimizer"]

NO_OPTIMIZER = (
    'optimizer_states="offload" moved nothing, because no optimizer that the Offloader returned was stepped; write '
    "optimizer = offloader.offload_optimizer(optimizer) before the first step, and use what it returns"
)
"""Warning for a program that offloads no optimizer, or steps the optimizer that it passed to ``offload_optimizer``."""


class OffloadedOptimizer(Optimizer):
    """Wraps an optimizer and offloads its states. ``param_groups``, schedulers and hooks stay those of the optimizer.

    Between steps the states are on SSD, except for the subgroups that the step visited last. The next step visits these
    first. A step evaluates the closure, then visits the subgroups: while one is updated, the next ones are read and the
    last ones are written. Parameters without gradients cost nothing.

    Args:
        optimizer: an optimizer that updates each parameter by itself. Existing states are taken over.
        files: files for the states; :meth:`close` closes them.
        master_weights: the optimizer updates float32 copies of half-precision parameters, offloaded with the states.
        declared: names of classes of optimizers that the user promises to update each parameter by itself.
        events: log that stalls are added to.
        updating: returns a context for the update of a subgroup, given its parameters and those of the next subgroup.

    Raises:
        ConfigError: the optimizer couples its parameters.
        OutOfSpaceError: the directories have no room for its states.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        files: StateFiles,
        *,
        master_weights: bool,
        declared: Collection[str],
        events: EventLog,
        updating: Updating,
    ) -> None:
        # Not Optimizer.__init__: groups, defaults and hooks are those of the inner optimizer.
        if isinstance(optimizer, OffloadedOptimizer):
            raise ConfigError("this optimizer's states are offloaded already; pass the optimizer that it wraps")
        refuse_by_kind(optimizer)
        refuse_differentiable(optimizer)
        refuse_undeclared(optimizer, declared)
        self._closure_refusal = "" if is_known(optimizer) else rehearse(optimizer, master_weights=master_weights)
        self.inner = optimizer
        self._patch_step_function()
        self._inner_step = SubgroupStepper(optimizer)
        self._states = PagedStates(
            self._inner_step,
            optimizer,
            files,
            master_weights=master_weights,
            events=events,
            updating=updating,
        )
        self._live = LiveStates(self._states)
        self._num_steps = 0
        self._step_s = 0.0
        self._process = OwnProcess()
        self._is_closed = self._is_handed_back = False
        self._stepping_thread: int | None = None
        self._broken: str | None = None
        self._last_stats: OptimizerStats | None = None
        try:
            self._look_for_others()
            self._states.register(self.param_groups)
            self._live.settle()
        except BaseException:
            if vars(self.inner)["state"] is self._live:  # else the states have not been taken over
                self.inner.state = self._live.copy()
            raise
        # During a step the inner optimizer has only some of its states.
        self._refusal: RemovableHandle | None = None
        if "_optimizer_state_dict_pre_hooks" in vars(self.inner):  # else its state_dict() raises anyway
            self._refusal = self.inner.register_state_dict_pre_hook(lambda _: self._check_between_steps("state_dict()"))

    # -- the user's optimizer ------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> Optimizer:
        """The inner optimizer. Lightning's callbacks unwrap optimizers by this name."""
        return self.inner

    @property
    def is_bypassed(self) -> bool:
        """Whether the program has stepped the inner optimizer, which has made its own states, and never this one."""
        return not self._num_steps and any(self._states.lent.values())

    @property
    def is_incomplete(self) -> bool:
        """Whether a step was interrupted, so that only some weights and states are new. Further steps are refused."""
        return self._broken is not None or self._stepping_thread is not None

    @property
    def is_stepping_here(self) -> bool:
        """Whether this thread is inside a step. The caller is then a signal handler or a finalizer."""
        return self._stepping_thread == threading.get_ident()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    @property  # type: ignore[override]
    def state(self) -> MutableMapping[Any, Any]:
        """The states, by parameter. Reading one loads it into memory, and later steps use what is written to it."""
        self._check_between_steps("state")
        self._look_for_others()
        return self._live

    @state.setter
    def state(self, states: MutableMapping[Any, Any]) -> None:
        vars(self.inner)["state"] = states

    def __getattr__(self, name: str) -> Any:
        # Hooks, and attributes of the optimizer's own class (schedule-free ones have train() and eval()).
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # The inner optimizer's step reads its own attributes.
        # Nor does it get other wrappers, which it would seem to own.
        if self._keeps(name) or isinstance(value, OffloadedOptimizer):
            super().__setattr__(name, value)
        else:
            setattr(self.inner, name, value)

    def __delattr__(self, name: str) -> None:
        if self._keeps(name) or name in vars(self):
            super().__delattr__(name)
        else:
            delattr(self.inner, name)

    def _keeps(self, name: str) -> bool:
        """Return whether an attribute belongs to the wrapper, or a framework sets it there for the wrapper to read."""
        return name.startswith("_") or name == "inner" or hasattr(type(self), name)

    def __repr__(self) -> str:
        return f"OffloadedOptimizer({self.inner!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an OffloadedOptimizer cannot be pickled or copied: its states are in files; use state_dict()")

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._check_open()
        self._check_between_steps("add_param_group()")
        self.inner.add_param_group(param_group)
        self._states.register(self.param_groups)

    # -- a step --------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, bit for bit as the inner optimizer's own step would.

        Args:
            closure: evaluates the model; called once, before any state is fetched.

        Raises:
            StorageError: states cannot be read. The step is incomplete, and later ones are refused: resume from a
                checkpoint. States that cannot be *written* stay in memory, with one warning.
            ConfigError: the optimizer turns out to couple its parameters, two parameters share memory, or
                ``torch.compile`` compiles the caller.
        """
        if compiler_is_at_work():
            raise ConfigError(
                f"the step of {type(self.inner).__name__} runs under torch.compile, and OffloadPolicy.optimizer_states="
                "'offload' updates some of the states at a time, so that other code would be compiled, with other "
                "bits. Compile the model's blocks (block.compile()) and call step() outside of compiled functions, or "
                "use optimizer_states='keep'"
            )
        self._check_open()
        self._check_whole("step()")
        if closure is not None and self._closure_refusal:
            raise ConfigError(self._closure_refusal)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        own, thread = vars(self), threading.get_ident()
        try:
            own["_stepping_thread"] = thread
            refuse_own_step(self.inner)
            refuse_differentiable(self.inner)
            if is_known(self.inner) is not self._states.is_known or not self._inner_step.is_of(type(self.inner)):
                raise ConfigError(
                    f"the class {type(self.inner).__name__} was changed after offload_optimizer(): its step, or a "
                    "method that step calls, is another one. Nothing was updated: change the class before"
                )
            self._look_for_others()
            self._states.register(self.param_groups)
            self._live.check()
            self._live.settle()
            whole = None
            if not self._states.is_known:
                whole = WholeStep(self.inner, None if closure is None else lambda: loss, self._states.shared)
            visits = self._states.plan_visits(self.param_groups, self._num_steps)
            begin_s = time.perf_counter()
            try:
                self._live.is_in_step = True
                self._states.update(visits, whole, self.param_groups)
                if whole is not None:
                    whole.apply()
                    self._states.lent.update(whole.shared)
                self._live.note_keys(p for group in self.param_groups for p in group["params"])
            except BaseException as error:
                self._broken = f"{type(error).__name__}: {error}"
                raise
            finally:
                self._live.is_in_step = False
            self.inner._opt_called = True  # type: ignore[attr-defined]  # schedulers check the order of calls by it
            self._num_steps += 1
            self._step_s += time.perf_counter() - begin_s
            if (warning := self._states.store.take_warning()) is not None:
                warnings.warn(warning, stacklevel=3)  # the caller of step(), above its hooks
            return loss if whole is None else whole.returned[0]
        finally:
            own["_stepping_thread"] = None  # without a call, at which an interrupt could come

    def _look_for_others(self) -> None:
        """Take over other states if the program has assigned them to the inner optimizer, or loaded them into it."""
        states: Any = self.inner.state
        if states is not self._live and not self._inner_step.is_lending:
            self._live.take_over(states)
            self.state = self._live  # not before: an interrupt in between would lose the states

    def _check_open(self) -> None:
        if self._is_closed:
            raise OffloaderClosedError("this optimizer's files are closed; load its state_dict() into another one")
        if not self._process.is_here:  # a fork has no worker threads, so that a wait for one would never end
            raise StorageError(
                f"this optimizer's files are those of process {self._process.pid}; make it after the fork"
            )

    def _check_between_steps(self, name: str) -> None:
        """Raise during a step: some states are of this step, some of the last one, and the optimizer holds others."""
        if self._stepping_thread is not None:
            raise RuntimeError(f"{name} {WITHIN_STEP}")

    def _check_whole(self, name: str) -> None:
        self._check_between_steps(name)
        if self._broken is not None:
            raise RuntimeError(
                f"an earlier step of this optimizer is incomplete ({self._broken}); load a checkpoint, or the weights "
                "would be those of no training"
            )

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state dictionary of the inner optimizer, which that optimizer can load.

        Its tensors cost no memory: their pages are read from the drive on access, and do not change while training goes
        on. Objects that are no tensors are not copied, as in a plain optimizer.

        Raises:
            RuntimeError: a step is incomplete, or a signal handler calls this in the middle of one.
            StorageError: states in memory that are newer than the drive's copy cannot be written.
        """
        self._check_whole("state_dict()")
        if self._is_handed_back:
            self._look_for_others()
            return saved_states(self.inner, self._inner_step, lambda: dict(self._live))
        self._check_open()
        return saved_states(self.inner, self._inner_step, self._saved)

    def _saved(self) -> dict[Any, State]:
        """Return all states, those on a drive as mapped memory; :func:`copied` says which objects are not copied."""
        self._look_for_others()
        self._live.settle()
        snapshot, lent = self._states.snapshot(), self._states.lent
        memo: dict[int, Any] = {}  # one for all, so that tensors that share memory still do
        return {
            key: copied(lent[key], memo) if key in lent else snapshot.state_of(key, lambda value: copied(value, memo))
            for key in self._live
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dictionary of this class or of the inner optimizer's class, subgroup by subgroup."""
        self._check_open()
        self._check_between_steps("load_state_dict()")
        self._look_for_others()
        if self._loads_by_itself:
            self.inner.load_state_dict(dict(state_dict))  # once, since it may have side effects
            self._broken = None
            return
        self._states.register(self.param_groups)  # the program may have added groups since the last step
        # Until the last subgroup is loaded, options and states belong to two trainings.
        before, groups = self._broken, self.param_groups
        self._broken = "load_state_dict has not ended"
        try:
            states = self._states
            load_states(
                self.inner, state_dict, states.partition, self._live, states.replace, has_master=states.has_master
            )
        except BaseException as error:
            # A load replaces the groups first. If they are the old ones, no state has changed.
            self._broken = before if self.inner.param_groups is groups else f"{type(error).__name__}: {error}"
            raise
        self._broken = None

    @property
    def _loads_by_itself(self) -> bool:
        """Whether the inner optimizer's class has its own ``load_state_dict``, perhaps not parameter by parameter."""
        return type(self.inner).load_state_dict is not Optimizer.load_state_dict and not self._states.master_weights

    # -- the end -------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> OptimizerStats:
        """Return the counters since the beginning. Takes no lock, so that a signal handler may read them."""
        if self._last_stats is not None:
            return self._last_stats
        return replace(self._states.stats(), num_steps=self._num_steps, step_s=self._step_s)

    def flush(self) -> None:
        """Write all states to their drives, and wait for it. Training never needs it."""
        if not self._is_closed:
            self._states.store.flush()

    def close(self) -> None:
        """Close files and threads at the end of training. Idempotent.

        ``state`` and ``state_dict`` still work; their tensors keep the disk space.

        Raises:
            StorageError: some states could not be handed back; all others were, and everything is closed.
        """
        if self._is_closed:
            return
        if not self._process.is_here:  # a fork: files and threads are the parent's
            self._is_closed = True
            return
        try:
            if self._broken is None and self._stepping_thread is None:
                self._look_for_others()
                with contextlib.suppress(StorageError):  # lent states stay in memory, and are handed back from there
                    self._live.settle()
                self._states.hand_back()
                self._is_handed_back = True
        finally:
            self._is_closed = True
            try:
                self._last_stats = self.stats
                if self._refusal is not None:
                    self._refusal.remove()
            finally:
                self._states.close()
        if self._states.lost:
            first = next(iter(self._states.lost.values()))
            raise StorageError(
                f"the optimizer states of {len(self._states.lost)} parameters were lost as their files were closed "
                f"({type(first).__name__}: {first}); all others are in optimizer.state. Load a checkpoint"
            ) from first
