"""An optimizer whose states wait on SSDs: fetched, updated and flushed subgroup by subgroup, with the user's own step.

Source: MLP-Offload (arXiv 2509.02480): subgroups, several paths by their rates, alternating order so that what is still
in memory comes first. Beyond it: optimizers that treat each parameter by itself, the very bits of these, last good
copies that survive failed writes, and snapshots that cost no memory.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_ssd.common.compiler import compiler_is_at_work
from lightning_ssd.errors import ConfigError, OffloaderClosedError, StorageError
from lightning_ssd.optimizer.checkpoint.gather import full_nbytes, full_states
from lightning_ssd.optimizer.checkpoint.snapshot import Snapshot
from lightning_ssd.optimizer.checkpoint.state_dict import saved_states
from lightning_ssd.optimizer.live_states import LiveStates
from lightning_ssd.optimizer.paged_states import PagedStates, Updating, Visit
from lightning_ssd.optimizer.step.contract import (
    is_known,
    leads_to_optimizer,
    refuse_by_kind,
    refuse_differentiable,
    refuse_own_step,
    refuse_undeclared,
)
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
"""For who trains without having offloaded one, or steps the one that was given instead of what came back."""
_OF_WRAPPER = ("inner", "grad_scale", "found_inf")
"""Attributes of the wrapper that its class does not have. ``GradScaler`` sets two, which a step hands on."""


class OffloadedOptimizer(Optimizer):
    """Wraps an optimizer; its ``param_groups``, schedulers and hooks stay what they are.

    Between steps the states are on SSD, except for the subgroups that the step visited last, which it visits first next
    time. A step takes the closure, then visits the subgroups: while one is updated, the next ones are read and the last
    ones are written. Only parameters with gradients cost anything.

    Args:
        optimizer: one that treats each parameter by itself. States that it has already are taken over.
        files: where to; closed by :meth:`close`.
        master_weights: float32 copies of half-precision parameters are updated, and wait with the states.
        declared: names of classes of optimizers that the user promises to update each parameter by itself.
        events: where waiting is noted.
        updating: entered around the update of some parameters, with these and those that are next.

    Raises:
        ConfigError: the optimizer couples its parameters.
        OutOfSpaceError: the directories have no room for its states.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        files: StateFiles,
        *,
        master_weights: bool = False,
        declared: Collection[str] = (),
        events: EventLog | None = None,
        updating: Updating | None = None,
    ) -> None:
        # Not Optimizer.__init__: groups, defaults and hooks are the inner one's.
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
            **({} if updating is None else {"updating": updating}),
        )
        self._live = LiveStates(self._states)
        self._num_steps = 0
        self._step_s = 0.0
        self._pid = os.getpid()
        self._is_closed = False
        self._stepping_thread: int | None = None
        self._broken: str | None = None
        self._last: Snapshot | None = None
        self._last_stats: OptimizerStats | None = None
        self._states.register(self.param_groups)
        try:
            self._look_for_others()
            self._live.settle()
        except BaseException:
            if vars(self.inner)["state"] is self._live:  # else they have not been taken over
                self.inner.state = self._live.copy()
            raise
        self._refusal = self._refuse_asking_inner()

    def _refuse_asking_inner(self) -> RemovableHandle | None:
        """In the middle of a step, who asks the inner optimizer gets no states of some parameters for those of all."""
        if "_optimizer_state_dict_pre_hooks" not in vars(self.inner):
            return None  # made without Optimizer.__init__, it cannot save itself either
        return self.inner.register_state_dict_pre_hook(lambda _: self._check_between_steps("state_dict()"))

    # -- the user's optimizer ------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> Optimizer:
        """The inner optimizer, under the name by which Lightning's callbacks look into a wrapper."""
        return self.inner

    @property
    def is_bypassed(self) -> bool:
        """Whether this one was never stepped, and the inner one, which has made states of its own, was."""
        return not self._num_steps and any(self._states.lent.values())

    @property
    def is_incomplete(self) -> bool:
        """Whether a step was broken off, so that weights and states are partly new: further steps are refused."""
        return self._broken is not None or self._stepping_thread is not None

    @property
    def is_stepping_here(self) -> bool:
        """Whether this thread has begun a step and not ended it, so that a signal handler or a finalizer asks."""
        return self._stepping_thread == threading.get_ident()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's own."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's own."""
        return self.inner.defaults

    @property  # type: ignore[override]
    def state(self) -> MutableMapping[Any, Any]:
        """The states, by parameter. Reading one brings it up, and what is written to it is what steps go on with.

        Raises:
            RuntimeError: a signal handler asks in the middle of a step.
        """
        self._check_between_steps("state")
        self._look_for_others()
        return self._live

    @state.setter
    def state(self, states: MutableMapping[Any, Any]) -> None:
        vars(self.inner)["state"] = states

    def __getattr__(self, name: str) -> Any:
        # Hooks, and what optimizers have of their own (schedule-free ones switch by train() and eval()).
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # What the inner optimizer's step reads, it has to find there.
        if self._keeps(name) or (leads_to_optimizer(value) and not _has(self.inner, name)):
            super().__setattr__(name, value)
        else:
            setattr(self.inner, name, value)
            vars(self).pop(name, None)  # what could not go on before

    def __delattr__(self, name: str) -> None:
        if self._keeps(name) or name in vars(self):
            super().__delattr__(name)
        else:
            delattr(self.inner, name)

    def _keeps(self, name: str) -> bool:
        """Whether an attribute is the wrapper's own, or one that a framework sets on it for us to see."""
        return name.startswith("_") or name in _OF_WRAPPER or hasattr(type(self), name)

    def __repr__(self) -> str:
        return f"OffloadedOptimizer({self.inner!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an OffloadedOptimizer cannot be pickled or copied: its states are in files; use state_dict()")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the inner optimizer does it."""
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """More parameters, whose states are offloaded too."""
        self._check_open()
        self._check_between_steps("add_param_group()")
        self.inner.add_param_group(param_group)
        self._states.register(self.param_groups)

    # -- a step --------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters: the very bits that the inner optimizer's own step would give.

        Args:
            closure: evaluates the model; called once, before anything is fetched.

        Raises:
            StorageError: states cannot be read. The step is incomplete, and later ones are refused: resume from a
                checkpoint. States that cannot be *written* stay in memory, with one warning.
            ConfigError: the optimizer turns out to couple its parameters, two of them share memory, or
                ``torch.compile`` compiles what calls this.
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
            return self._visit_all(closure, loss)
        finally:
            own["_stepping_thread"] = None  # without a call, at which an interrupt could come

    def _visit_all(self, closure: Callable[[], Any] | None, loss: Any) -> Any:
        self._prepare()
        whole = None
        if not self._states.is_known:
            whole = WholeStep(self.inner, None if closure is None else lambda: loss, self._states.shared)
        with self._live.in_step():
            visits = self._states.plan_visits(self.param_groups, self._num_steps)
            begin_s = time.perf_counter()
            try:
                self._update(visits, whole)
                if whole is not None:
                    whole.apply()
                    self._states.lent.update(whole.shared)
            except BaseException as error:
                self._broken = f"{type(error).__name__}: {error}"
                raise
        self._live.note_order(p for group in self.param_groups for p in group["params"])
        self.inner._opt_called = True  # type: ignore[attr-defined]  # by this schedulers check the order of calls
        self._num_steps += 1
        self._step_s += time.perf_counter() - begin_s
        self._states.rebalance()
        for warning in self._states.take_warnings():
            warnings.warn(warning, stacklevel=4)  # who calls step(), behind its hooks
        return loss if whole is None else whole.result(loss)

    def _prepare(self) -> None:
        """Before a step touches anything: what has become of the groups, the states and the optimizer."""
        refuse_own_step(self.inner)
        refuse_differentiable(self.inner)
        if is_known(self.inner) is not self._states.is_known or not self._inner_step.is_of(type(self.inner)):
            raise ConfigError(
                f"the class {type(self.inner).__name__} was changed after offload_optimizer(): its step, or a method "
                "that step calls, is another one. Nothing was updated: change the class before"
            )
        self._look_for_others()
        self._states.register(self.param_groups)
        self._live.check()
        self._live.settle()

    def _look_for_others(self) -> None:
        """Somebody may have given the inner optimizer other states, by assignment or by loading them into it."""
        states: Any = self.inner.state
        if states is not self._live and not self._inner_step.is_lending:
            self._live.take_over(states)
            self.state = self._live  # not before: interrupted, they would be nowhere

    def _update(self, visits: Sequence[Visit], whole: WholeStep | None) -> None:
        """Fused optimizers unscale gradients themselves: ``GradScaler`` sets attributes on what it takes for them."""
        own, told = vars(self.inner), vars(self)
        try:
            if "grad_scale" in told:
                own["grad_scale"] = told["grad_scale"]
            if "found_inf" in told:
                own["found_inf"] = told["found_inf"]
            self._states.update(visits, whole)
            if whole is not None:
                # In a group without gradients there may be something to count all the same.
                idle = set(range(len(self.param_groups))).difference(*(visit.groups for visit in visits))
                self._inner_step.run_idle(idle, whole)
        finally:
            # Without a call, at which an interrupt could come.
            if "grad_scale" in told and "grad_scale" in own:
                del own["grad_scale"]
            if "found_inf" in told and "found_inf" in own:
                del own["found_inf"]

    def _check_open(self) -> None:
        if self._is_closed:
            raise OffloaderClosedError("this optimizer's files are closed; load its state_dict() into another one")
        if os.getpid() != self._pid:  # no worker has come along: whoever waits for one waits for ever
            raise StorageError(f"this optimizer's files are those of process {self._pid}; make it after the fork")

    def _check_between_steps(self, name: str) -> None:
        """Some states are of this step and some of the last one, and some are lent to the user's optimizer."""
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

    def _snapshot(self) -> Snapshot:
        if self._last is not None:
            self._look_for_others()
            return self._last
        self._check_open()
        self._look_for_others()
        self._live.settle()
        return self._states.snapshot()

    def state_dict(self) -> dict[str, Any]:
        """Return what the inner optimizer's gives, readable by it. Its tensors cost no memory: their pages come from
        the drive as they are read, and stay as they are now while training goes on. Objects that are no tensors are
        those of the training, as in a plain one.

        Raises:
            RuntimeError: a step is incomplete, or a signal handler asks in the middle of one.
            StorageError: what is ahead of its drive cannot be written.
        """
        self._check_whole("state_dict()")
        return saved_states(self.inner, self._inner_step, lambda: self._live.saved(self._snapshot()))

    def full_state_dict(self, *, receive: bool) -> dict[str, Any]:
        """As :meth:`state_dict`, with whole tensors where parameters are sharded. All processes call it together.

        One tensor at a time is whole in memory. It goes to this process' drives, beside the states, and its pages come
        when they are read; where the drives have no room, it stays in memory, with a warning.

        Args:
            receive: whether this process gets the states. Another one helps, and gets an empty dictionary.

        Raises:
            RuntimeError: a step is incomplete.
        """
        parts = self.state_dict()
        if not receive:
            full_states(parts["state"], None)
            return {}
        spool = self._states.spool(full_nbytes(parts["state"]))
        states = full_states(parts["state"], spool.put)
        if (warning := spool.take_warning()) is not None:
            warnings.warn(warning, stacklevel=2)
        return {**parts, "state": states}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what this or the inner optimizer's class has saved, subgroup by subgroup."""
        self._check_open()
        self._check_between_steps("load_state_dict()")
        self._look_for_others()
        if self._loads_by_itself:
            self.inner.load_state_dict(dict(state_dict))  # once, whatever it does beside
            self._broken = None
            return
        self._states.register(self.param_groups)  # groups may have been put into param_groups since the last step
        # From the options of the groups to the last subgroup, it is that of no training.
        before, groups = self._broken, self.param_groups
        self._broken = "load_state_dict has not ended"
        try:
            loaded = self._states.load(state_dict, self._replace, self._live.__setitem__)
        except BaseException as error:
            # Other groups come first of all.
            self._broken = before if self.inner.param_groups is groups else f"{type(error).__name__}: {error}"
            raise
        self._broken = None
        self._live.put_in_order(loaded)

    @property
    def _loads_by_itself(self) -> bool:
        """Whether the inner optimizer's class loads in a way of its own, which nobody knows to be one by parameter."""
        return type(self.inner).load_state_dict is not Optimizer.load_state_dict and not self._states.has_masters

    def _replace(self, index: int, states: Sequence[State]) -> None:
        """Other states for a subgroup."""
        if index == 0:
            self._live.clear()
        self._states.replace(index, states)

    # -- the end -------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> OptimizerStats:
        """Return the counters since the beginning. Takes no lock, so that a signal handler may ask."""
        if self._last_stats is not None:
            return self._last_stats
        return replace(self._states.stats(), num_steps=self._num_steps, step_s=self._step_s)

    def flush(self) -> None:
        """Wait until everything is on its drive. Training never needs it."""
        if not self._is_closed:
            self._states.flush()

    def close(self) -> None:
        """End of training: files and threads go; ``state_dict`` still works, and keeps the disk space. Idempotent.

        Raises:
            StorageError: some states could not be handed back; all others were, and everything is closed.
        """
        if self._is_closed:
            return
        if os.getpid() != self._pid:  # a fork: files and threads are the parent's
            self._is_closed = True
            return
        failures: Mapping[Any, Exception] = {}
        try:
            if self._broken is None and self._stepping_thread is None:
                failures = self._hand_back()
        finally:
            self._is_closed = True
            try:
                self._last_stats = self.stats
                if self._refusal is not None:
                    self._refusal.remove()
            finally:
                self._states.close()
        if failures:
            first = next(iter(failures.values()))
            raise StorageError(
                f"the optimizer states of {len(failures)} parameters were lost as their files were closed "
                f"({type(first).__name__}: {first}); all others are in optimizer.state. Load a checkpoint"
            ) from first

    def _hand_back(self) -> Mapping[Any, Exception]:
        """Let what the drives have be seen in ``state`` without files; return what cannot be, by parameter."""
        self._look_for_others()
        with contextlib.suppress(StorageError):  # what is lent stays in memory, and is handed back from there
            self._live.settle()
        snapshot = self._states.snapshot()
        failures = snapshot.map_all()
        self._last = snapshot
        self._live.keep(snapshot)
        return failures


def _has(optimizer: Optimizer, name: str) -> bool:
    return name in vars(optimizer) or hasattr(type(optimizer), name)
