"""An optimizer whose states wait on SSDs: fetched, updated and flushed subgroup by subgroup, with the user's own step.

Source: MLP-Offload (arXiv 2509.02480): subgroups, several paths by their rates, alternating order so that what is still
in memory comes first. Beyond it: any optimizer that treats each parameter by itself, the very bits of it, last good
copies that survive failed writes, and snapshots that cost no memory.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_ssd.errors import ConfigError, OffloaderClosedError, StorageError
from lightning_ssd.events import EventLog, StallEvent
from lightning_ssd.inner_step import GroupChanges, InnerStep, State, refuse_coupling
from lightning_ssd.master_weights import lift, lower
from lightning_ssd.partition import Partition
from lightning_ssd.planning.subgroups import Part, half_duplex_rate, respread, spread, visit_order
from lightning_ssd.slicing import Trials
from lightning_ssd.state_files import StateFiles
from lightning_ssd.state_layout import Layout, owned
from lightning_ssd.state_loading import load_states
from lightning_ssd.state_snapshot import Snapshot
from lightning_ssd.state_store import StateStore
from lightning_ssd.stats import OptimizerStats

__all__ = ["OffloadedOptimizer"]

_NUM_SLOTS = 4
"""Subgroups in memory at a time: one is updated while others come and go."""
_NUM_SUBGROUPS = 64
_MIN_SUBGROUP_BYTES, _MAX_SUBGROUP_BYTES = 4 << 20, 256 << 20
_MAX_MOVES = 4


class OffloadedOptimizer(Optimizer):
    """Wraps an optimizer; its ``param_groups``, schedulers and hooks stay what they are.

    Between steps the states are on SSD, except for the subgroups that the step visited last, which it visits first next
    time. A step takes the closure, then visits the subgroups: while one is updated, the next ones are read and the last
    ones are written. Only parameters with gradients cost anything.

    Args:
        optimizer: any that treats each parameter by itself. States that it has already are taken over.
        files: where to; closed by :meth:`close`.
        cache_bytes: more states to keep in memory between steps.
        master_weights: float32 copies of half-precision parameters are updated, and wait with the states.
        events: where waiting is noted.

    Raises:
        ConfigError: the optimizer couples its parameters.
        OutOfSpaceError: the directories have no room for its states.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        files: StateFiles,
        *,
        cache_bytes: int = 0,
        master_weights: bool = False,
        events: EventLog | None = None,
    ) -> None:
        # Not Optimizer.__init__: groups, defaults and hooks are the inner one's.
        refuse_coupling(optimizer)
        if isinstance(optimizer, OffloadedOptimizer):
            raise ConfigError("this optimizer's states are offloaded already; pass the optimizer that it wraps")
        self.inner = optimizer
        self._patch_step_function()
        self._inner_step = InnerStep(optimizer)
        self._files = files
        self._events = events
        self._trials = Trials(self._inner_step, optimizer, master_weights=master_weights)
        self._partition = Partition(self._subgroup_bytes())
        num_slots = _NUM_SLOTS + cache_bytes // self._partition.max_bytes
        self._store = StateStore(
            files.tiers,
            files.mover,
            device=files.device,
            num_slots=num_slots,
            mark=files.mark,
            block_bytes=files.block_bytes,
        )
        self._rates: Sequence[float] = [half_duplex_rate(*pair) for pair in files.rates()]
        self._num_steps = 0
        self._update_s = self._step_s = 0.0
        self._pid = os.getpid()
        self._is_closed = False
        self._broken: str | None = None
        self._last: Snapshot | None = None
        self._last_stats: OptimizerStats | None = None
        self._register_new()
        self._take_over()

    # -- the user's optimizer ------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> Optimizer:
        """The inner optimizer, under the name by which Lightning's callbacks look into a wrapper."""
        return self.inner

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

    @property
    def state(self) -> Mapping[torch.Tensor, State]:  # type: ignore[override]
        """The states of all parameters, to read: each look at it is a snapshot. What is written to it is lost."""
        snapshot = self._snapshot()
        found = {p: snapshot.state_of(number) for number, p in enumerate(self._partition.parameters)}
        return {p: state for p, state in found.items() if state}

    def __getattr__(self, name: str) -> Any:
        # Hooks, and what optimizers have of their own (schedule-free ones switch by train() and eval()).
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return f"OffloadedOptimizer({self.inner!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an OffloadedOptimizer cannot be pickled or copied: its states are in files; use state_dict()")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the inner optimizer does it."""
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """More parameters, whose states are offloaded too."""
        self._check_inner()
        self.inner.add_param_group(param_group)
        self._register_new()
        self._take_over()

    def _register_new(self) -> None:
        """Take in parameters that have come into the groups, in whatever way."""
        groups = {id(p): number for number, group in enumerate(self.param_groups) for p in group["params"]}
        known = self._partition
        new = [p for group in self.param_groups for p in group["params"] if known.number_of(p) is None]
        if new:
            trials = self._trials
            num_made = known.extend(
                new,
                lambda p: trials.element_bytes(p, groups[id(p)]),
                lambda p: trials.may_slice(p, groups[id(p)]),
            )
            self._store.add(spread(num_made, self._rates))
            self._reserve()

    def _reserve(self) -> None:
        """Room for all states, and for the extents that a step's writes go to before the old ones are given back."""
        spare = self._store.num_slots * self._partition.max_bytes // len(self._files.tiers)
        needs = [spare] * len(self._files.tiers)
        for subgroup, path in zip(self._partition.subgroups, self._store.paths, strict=True):
            needs[path] += subgroup.expected_bytes
        self._files.reserve(needs)

    def _subgroup_bytes(self) -> int:
        nbytes: int = sum(
            p.numel() * self._trials.element_bytes(p, number)
            for number, group in enumerate(self.param_groups)
            for p in group["params"]
        )
        return min(max(nbytes // _NUM_SUBGROUPS, _MIN_SUBGROUP_BYTES), _MAX_SUBGROUP_BYTES)

    # -- a step --------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters: the very bits that the inner optimizer's own step would give.

        Args:
            closure: evaluates the model; called once, before anything is fetched.

        Raises:
            StorageError: states cannot be read. The step is incomplete, and later ones are refused: resume from a
                checkpoint. States that cannot be *written* stay in memory, with one warning.
            ConfigError: the optimizer turns out to couple its parameters.
        """
        self._check_usable()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._register_new()
        begin_s = time.perf_counter()
        changes = GroupChanges()
        try:
            with self._told_by_scaler():
                self._visit(changes)
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise
        changes.apply(self.param_groups)
        self.inner._opt_called = True  # type: ignore[attr-defined]  # by this schedulers check the order of calls
        self._num_steps += 1
        self._step_s += time.perf_counter() - begin_s
        self._rebalance()
        if (warning := self._store.take_warning()) is not None:
            warnings.warn(warning, stacklevel=2)
        return loss

    @contextlib.contextmanager
    def _told_by_scaler(self) -> Iterator[None]:
        """Fused optimizers unscale gradients themselves: ``GradScaler`` sets attributes on what it takes for them."""
        told: dict[str, Any] = {name: vars(self)[name] for name in ("grad_scale", "found_inf") if name in vars(self)}
        vars(self.inner).update(told)
        try:
            yield
        finally:
            for name in told:
                del vars(self.inner)[name]

    def _visit(self, changes: GroupChanges) -> None:
        """Fetch, update and flush every subgroup that has a gradient."""
        groups = {id(p): number for number, group in enumerate(self.param_groups) for p in group["params"]}
        todo = [
            (index, active)
            for index in visit_order(len(self._partition.subgroups), self._num_steps, self._files.first)
            if (active := list(self._active(index, groups)))
        ]
        order = [index for index, _ in todo]
        here = set(self._store.in_memory())
        self._store.evict(here - set(order[: self._store.num_slots]))
        self._store.prefetch(index for index in order if index not in here)
        for position, (index, active) in enumerate(todo):
            keep = position >= len(todo) - self._store.num_slots
            self._update(index, active, groups, changes, keep=keep)
        busy = {groups[id(self._partition.parameters[part.parameter])] for _, active in todo for _, part in active}
        self._inner_step.run_idle(set(groups.values()) - busy, changes)

    def _active(self, index: int, groups: Mapping[int, int]) -> Iterator[tuple[int, Part]]:
        for number, part in enumerate(self._partition.subgroups[index].parts):
            parameter = self._partition.parameters[part.parameter]
            if parameter.grad is not None and id(parameter) in groups:
                yield number, part

    def _update(
        self,
        index: int,
        active: Sequence[tuple[int, Part]],
        groups: Mapping[int, int],
        changes: GroupChanges,
        *,
        keep: bool,
    ) -> None:
        """One subgroup."""
        subgroup = self._partition.subgroups[index]
        asked_s = time.perf_counter()
        storage = self._store.take(index)
        begin_s = time.perf_counter()
        if self._events is not None and storage is not None:
            self._events.append(StallEvent(storage.nbytes(), asked_s, begin_s))
        states = list(map(dict, subgroup.templates))
        if storage is not None and subgroup.layout is not None:
            states = subgroup.layout.fill(states, storage)
        pieces = [self._partition.slice_of(part) for _, part in active]
        numbers = [groups[id(self._partition.parameters[part.parameter])] for _, part in active]
        before = [states[number] for number, _ in active]
        for (number, _), state in zip(active, self._run(pieces, numbers, before, changes), strict=True):
            states[number] = state
        self._update_s += time.perf_counter() - begin_s
        self._settle(index, states, storage, keep=keep)

    def _run(
        self, pieces: Sequence[torch.Tensor], groups: Sequence[int], states: Sequence[State], changes: GroupChanges
    ) -> list[State]:
        """Let the optimizer update the pieces, or the float32 copies of those that have one."""
        pairs = zip(pieces, states, strict=True)
        lifted = [lift(piece, state) if self._trials.has_master(piece) else (piece, state) for piece, state in pairs]
        tensors = [tensor for tensor, _ in lifted]
        after = self._inner_step.run(tensors, groups, [state for _, state in lifted], changes)
        return [
            state if tensor is piece else lower(piece, tensor, state)
            for piece, tensor, state in zip(pieces, tensors, after, strict=True)
        ]

    def _settle(self, index: int, states: Sequence[State], storage: torch.UntypedStorage | None, *, keep: bool) -> None:
        """Put states into the subgroup's memory, or into new memory if they have become others, and give it back."""
        subgroup = self._partition.subgroups[index]
        paged = [not self._partition.is_whole(part) for part in subgroup.parts]
        layout = Layout.of(states, self._files.device, self._store.block_bytes, paged)
        if layout != subgroup.layout or storage is None:
            storage = self._store.allocate(layout.nbytes) if layout.nbytes else None
            subgroup.layout = layout if layout.nbytes else None
        if storage is not None:
            layout.collect(states, storage)
        subgroup.templates = layout.templates(states)
        self._store.give(index, storage, is_dirty=True, keep=keep)

    def _take_over(self) -> None:
        """States that the optimizer has made before it was wrapped, or for a new group."""
        states, self.inner.state = self.inner.state, defaultdict(dict)
        try:
            self._put({p: dict(state) for p, state in states.items() if state})
        except BaseException:
            self.inner.state = states
            raise

    def _put(self, states: Mapping[torch.Tensor, State]) -> None:
        known = self._partition
        for index, subgroup in enumerate(known.subgroups):
            mine = [states.get(known.parameters[part.parameter], {}) for part in subgroup.parts]
            if any(mine):
                cut = [known.cut(part, state) for part, state in zip(subgroup.parts, mine, strict=True)]
                self._settle(index, cut, self._store.take(index), keep=False)

    def _rebalance(self) -> None:
        """Next writes go where the drives have turned out to be faster."""
        if len(self._store.tiers) > 1:
            self._rates = [half_duplex_rate(*pair) for pair in self._files.rates()]
            self._store.assign(respread(self._store.paths, self._rates, max_moves=_MAX_MOVES))

    def _check_usable(self) -> None:
        self._check_open()
        self._check_inner()
        self._check_whole()

    def _check_open(self) -> None:
        if self._is_closed:
            raise OffloaderClosedError("this optimizer's files are closed; load its state_dict() into another one")
        if os.getpid() != self._pid:  # no worker has come along: whoever waits for one waits for ever
            raise StorageError(f"this optimizer's files are those of process {self._pid}; make it after the fork")

    def _check_inner(self) -> None:
        if any(self.inner.state.values()):
            raise RuntimeError(
                "the optimizer inside an OffloadedOptimizer has got states of its own, which would be ignored: it was "
                "stepped or loaded directly. Call step() and load_state_dict() of what offload_optimizer() returned"
            )

    def _check_whole(self) -> None:
        if self._broken is not None:
            raise RuntimeError(
                f"an earlier step of this optimizer is incomplete ({self._broken}); load a checkpoint, or the weights "
                "would be those of no training"
            )

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def _snapshot(self) -> Snapshot:
        if self._last is not None:
            return self._last
        self._check_open()
        # What cannot be written is copied from memory: a full drive costs no checkpoint. The store has a warning ready.
        with contextlib.suppress(StorageError):
            self._store.flush()
        return Snapshot(self._partition, self._store)

    def state_dict(self) -> dict[str, Any]:
        """As the inner optimizer's, readable by it. Its tensors cost no memory: their pages come from the drive as they
        are read, and stay as they are now while training goes on.

        Raises:
            RuntimeError: a step is incomplete.
            StorageError: what is ahead of its drive cannot be written.
        """
        self._check_whole()
        with self._inner_step.lent(None, self.state):
            return self.inner.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what this or the inner optimizer's class has saved, subgroup by subgroup."""
        self._check_open()
        self._register_new()  # groups may have been put into param_groups since the last step
        # From the first subgroup that is replaced to the last one, states are those of no training.
        before = self._broken
        try:
            load_states(self.inner, state_dict, self._partition, self._replace, has_master=self._trials.has_master)
        except BaseException as error:
            self._broken = before if self._broken is before else f"{type(error).__name__}: {error}"
            raise
        self._broken = None

    def _replace(self, index: int, states: Sequence[State]) -> None:
        """Other states for a subgroup."""
        self._broken = "load_state_dict has not ended"
        self._store.forget(index)
        self._partition.subgroups[index].layout = None
        self._settle(index, owned(states, self._files.device), None, keep=False)

    # -- the end -------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> OptimizerStats:
        """Counters since the beginning."""
        if self._last_stats is not None:
            return self._last_stats
        progress = self._files.progress()
        return OptimizerStats(
            num_steps=self._num_steps,
            num_subgroups=len(self._partition.subgroups),
            subgroup_bytes=self._partition.max_bytes,
            state_bytes=sum(s.layout.nbytes for s in self._partition.subgroups if s.layout is not None),
            resident_bytes=self._store.slots.lent_bytes,
            resident_peak_bytes=self._store.slots.peak_bytes,
            written_bytes=sum(p.written_bytes for p in progress),
            read_bytes=sum(p.read_bytes for p in progress),
            kept_bytes=self._store.kept_bytes,
            stall_s=self._store.stall_s,
            fetch_busy_s=sum(p.read_busy_s for p in progress),
            flush_busy_s=sum(p.write_busy_s for p in progress),
            update_s=self._update_s,
            step_s=self._step_s,
        )

    def flush(self) -> None:
        """Wait until everything is on its drive. Training never needs it."""
        if not self._is_closed:
            self._store.flush()

    def close(self) -> None:
        """End of training: files and threads go; ``state_dict`` still works, and keeps the disk space. Idempotent."""
        if self._is_closed:
            return
        if os.getpid() != self._pid:  # a fork: files and threads are the parent's
            self._is_closed = True
            return
        try:
            if self._broken is None:
                snapshot = self._snapshot()
                snapshot.map_all()
                self._last = snapshot
        finally:
            self._is_closed = True
            self._last_stats = self.stats
            self._files.close()
            self._store.close()
