"""Keep the states of an optimizer's parameters on drives, and load them subgroup by subgroup to update them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_ssd.common.dtensor import even_numel, has_shape, is_shard, local_of
from lightning_ssd.common.profiling import spanned
from lightning_ssd.common.status_line import StatusLine
from lightning_ssd.common.tensors import Piece
from lightning_ssd.errors import ConfigError, StorageError
from lightning_ssd.optimizer.checkpoint.snapshot import Snapshot
from lightning_ssd.optimizer.step.aliases import SHARE_MEMORY, are_own, spans_of
from lightning_ssd.optimizer.step.contract import elementwise_kind, is_known, refuse_shared_memory
from lightning_ssd.optimizer.step.elementwise import UpdateProbe
from lightning_ssd.optimizer.step.layout import Layout, moved_out, moves, owned
from lightning_ssd.optimizer.step.master_weights import from_master, has_master, to_master
from lightning_ssd.optimizer.step.partition import Contents, Partition, Subgroup
from lightning_ssd.optimizer.step.stepper import SubgroupStepper, WholeStep
from lightning_ssd.optimizer.step.subgroups import Part, visit_order
from lightning_ssd.optimizer.step.types import CoupledError, State
from lightning_ssd.optimizer.store.files import StateFiles
from lightning_ssd.optimizer.store.store import StateStore
from lightning_ssd.planning import update_memory
from lightning_ssd.telemetry.events import EventLog, StallEvent
from lightning_ssd.telemetry.stats import OptimizerStats

__all__ = ["PagedStates", "Updating", "Visit"]

Groups = Sequence[Mapping[str, Any]]
Updating = Callable[[Sequence[Piece], Sequence[Piece]], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Visit:
    """The parts of one subgroup that a step updates."""

    index: int
    active: tuple[tuple[int, Part], ...]
    """The subgroup's parts that have a gradient, each with its number in the subgroup."""
    groups: tuple[int, ...]
    """The number of the parameter group for each part in ``active``."""


class PagedStates:
    """The states of an optimizer by parameter, most of them on drives.

    Args:
        inner_step: calls the optimizer.
        optimizer: the user's optimizer, with all its groups.
        files: files for the states.
        master_weights: the optimizer updates float32 copies of half-precision parameters, offloaded with the states.
        events: log that stalls are added to.
        updating: returns a context for the update of a subgroup, given its parameters and those of the next subgroup.
    """

    def __init__(
        self,
        inner_step: SubgroupStepper,
        optimizer: Optimizer,
        files: StateFiles,
        *,
        master_weights: bool,
        events: EventLog,
        updating: Updating,
    ) -> None:
        self._updating = updating
        self._inner_step = inner_step
        self._events = events
        self.files = files
        self.device = files.device
        self.lent: dict[Any, State] = {}
        """States that are in memory, by parameter. Their copies on drives are outdated. States that all parameters
        share are under keys that are no parameters."""
        self.lost: dict[Any, Exception] = {}
        """Errors of the states that could not be handed back when the files were closed, by parameter."""
        self.partition = Partition(0)
        """Which parameter's state is in which subgroup."""
        self.is_known = is_known(optimizer)
        """Whether this package knows that the optimizer updates each parameter by itself; else the user declared it."""
        self.master_weights = master_weights
        kind = elementwise_kind(optimizer)
        self._is_elementwise = kind is not None
        self._trials = UpdateProbe(optimizer, kind=kind, has_master=self.has_master)
        self.store = StateStore(
            files.tier,
            device=files.device,
            num_slots=update_memory.NUM_SLOTS * files.tier.num_directories,
            copies=files.copies,
            block_bytes=files.block_bytes,
            host=files.host,
        )
        self._update_s = 0.0
        self._has_updated = False
        self.slot_bytes = 0
        """Bytes that a slot of memory has to hold: those of the largest subgroup so far."""
        self._num_cached = 0
        self._memory: list[Any] = []

    @property
    def shared(self) -> dict[Any, Any]:
        """States that all parameters share, under keys that are no parameters."""
        return {key: value for key, value in self.lent.items() if not isinstance(key, torch.Tensor)}

    def has_master(self, parameter: torch.Tensor) -> bool:
        return self.master_weights and has_master(parameter)

    # -- parameters ----------------------------------------------------------------------------------------------

    def register(self, groups: Groups) -> None:
        """Take in all new parameters of the groups, those of lazy modules once they have a shape."""
        numbers = _group_numbers(groups)
        new = [p for group in groups for p in group["params"] if self.partition.number_of(p) is None and has_shape(p)]
        self._retire(numbers)
        if new:
            if not self.partition.subgroups:
                shaped = [p for group in groups for p in group["params"] if has_shape(p)]
                nbytes = sum(even_numel(p) * self._trials.element_bytes(p, numbers[id(p)]) for p in shaped)
                largest = update_memory.subgroup_bytes(nbytes, self.files.tier.num_directories)
                self.slot_bytes = self.partition.max_bytes = largest
            self.partition.extend(
                new,
                lambda p: self._trials.element_bytes(p, numbers[id(p)]),
                lambda p: self._trials.may_slice(p, numbers[id(p)]),
                lambda num: self.store.add(num, len(self.partition.subgroups)),
            )
            expected = [subgroup.expected_bytes for subgroup in self.partition.subgroups]
            self._fit_cache(max(expected))
            # Space for all states, and for the writes of a step, which free the old extents afterwards.
            self.files.reserve(self.store.num_slots * self.partition.max_bytes + sum(expected))

    def _retire(self, numbers: Mapping[int, int]) -> None:
        """Forget parameters that are no longer in the groups and have no state, and free their room on the drives."""
        for number, parameter in enumerate(self.partition.parameters):
            is_gone = self.partition.number_of(parameter) is not None and id(parameter) not in numbers
            if is_gone and parameter not in self.lent and not self.is_stored(parameter):
                self.partition.retire(number)
        for index, subgroup in enumerate(self.partition.subgroups):
            if not subgroup.expected_bytes and subgroup.layout is not None and not any(subgroup.templates):
                self.store.forget(index)
                subgroup.forget_layout()

    def _fit_cache(self, largest_bytes: int) -> None:
        """Add slots as large as the largest subgroup while the budget of host memory has room.

        There are never more slots than subgroups, so that other optimizers get the rest of the budget.
        """
        share = self.files.share
        self.slot_bytes = max(self.slot_bytes, largest_bytes)
        if share is not None:
            wanted = len(self.partition.subgroups) - update_memory.NUM_SLOTS * self.files.tier.num_directories
            num = share.fit(max(wanted, 0), self.slot_bytes)
            self.store.add_slots(num - self._num_cached)
            self._num_cached = num

    # -- a step --------------------------------------------------------------------------------------------------

    def plan_visits(self, groups: Groups, step: int) -> list[Visit]:
        """Return the subgroups that have a gradient, in the order of this step. Changes nothing.

        Raises:
            RuntimeError: a parameter that is cut into slices, or its gradient, can no longer be cut.
            ConfigError: parameters of different calls share memory, or a changed option gives slices other bits than
                whole parameters.
        """
        numbers = _group_numbers(groups)
        visits = []
        # An optimizer that communicates with other processes has to visit its parameters in the same order as they do.
        is_local = self._is_elementwise or not any(map(is_shard, self.partition.parameters))
        # An even step visits parameters in their own order, wherever subgroups end.
        place = (step, self.files.first) if is_local else (0, 0)
        for index in visit_order(len(self.partition.subgroups), *place):
            active = tuple(self._active(index, numbers))
            if active:
                mine = (numbers[id(self.partition.parameters[part.parameter])] for _, part in active)
                visits.append(Visit(index, active, tuple(mine)))
        if len(visits) > 1:
            active_ones = {part.parameter for visit in visits for _, part in visit.active}
            parameters = [self.partition.parameters[number] for number in sorted(active_ones)]
            memory = [(spans_of(p), local_of(p).stride() if p.layout == torch.strided else ()) for p in parameters]
            if memory != self._memory:
                refuse_shared_memory([spans for spans, _ in memory])
                self._memory = memory
        return visits

    def _active(self, index: int, numbers: Mapping[int, int]) -> Iterator[tuple[int, Part]]:
        for number, part in enumerate(self.partition.subgroups[index].parts):
            parameter = self.partition.parameters[part.parameter]
            if parameter in self.lent and self.partition.places[part.parameter][0] != (index, number):
                continue  # the parameter is updated as a whole, with its first part
            if parameter.grad is not None and id(parameter) in numbers:
                self.partition.check_cuttable(part)
                group = numbers[id(parameter)]
                is_cut = parameter not in self.lent and not self.partition.is_whole(part)
                if is_cut and not self._trials.may_slice(parameter, group):
                    raise ConfigError(
                        f"param_groups[{group}] has options by which slices of a parameter of shape "
                        f"{tuple(parameter.shape)} get other bits than the whole one (fused=True, as a checkpoint may "
                        "bring it), and it was cut before. Nothing was updated: make the optimizer with this option "
                        "before offload_optimizer(), or undo it"
                    )
                yield number, part

    def update(self, visits: Sequence[Visit], whole: WholeStep | None, groups: Groups) -> None:
        """Fetch, update and flush every subgroup of a step; the last ones stay in memory.

        Args:
            visits: the subgroups, in the order of the step.
            whole: the step of a declared optimizer; ``None``: it is a known one.
            groups: the optimizer's groups. A declared one gets those without a gradient in its first call.
        """
        self.partition.align_gradients()
        order = [visit.index for visit in visits]
        here = set(self.store.in_memory())
        self.store.evict(here - set(order[: self.store.num_slots]))
        self.store.prefetch(index for index in order if index not in here)
        versions = {} if whole is None else _versions(self.partition.parameters)
        doing = None if self._has_updated else "Laying out optimizer states, in the first step"
        given = [[self._piece(part) for _, part in visit.active] for visit in visits]
        active = {group for visit in visits for group in visit.groups}
        idle = {number: group["params"] for number, group in enumerate(groups) if whole and number not in active}
        if whole is not None and not visits:
            self._inner_step.run([], [], [], whole, idle=idle)
        subgroups = self.partition.subgroups
        with StatusLine(doing) as line:
            for position, visit in enumerate(line.over(visits, lambda visit: subgroups[visit.index].expected_bytes)):
                following = given[position + 1] if position + 1 < len(given) else ()
                with self._updating(given[position], following):
                    self._update(visit, whole, idle, keep=position >= len(visits) - self.store.num_slots)
                    if whole is not None:
                        before, versions = versions, _versions(self.partition.parameters)
                        _check_others(before, versions, [piece.tensor for piece in given[position]])
                idle = {}
        self._has_updated = True

    def _piece(self, part: Part) -> Piece:
        """Return the elements that the update of a part changes: the part, or its whole parameter."""
        parameter = self.partition.parameters[part.parameter]
        is_whole = parameter in self.lent or self.partition.is_whole(part)
        return Piece(parameter, *((0, local_of(parameter).numel()) if is_whole else (part.start, part.stop)))

    def _update(
        self, visit: Visit, whole: WholeStep | None, idle: Mapping[int, Sequence[torch.Tensor]], *, keep: bool
    ) -> None:
        """Update one subgroup. Parameters with lent states are updated as a whole, with the lent states."""
        owners = [self.partition.parameters[part.parameter] for _, part in visit.active]
        is_lent = [parameter in self.lent for parameter in owners]
        storage, states = None, list[State]()
        if not all(is_lent):
            asked_s, storage = time.perf_counter(), self.store.take(visit.index)
            if storage is not None:
                self._events.append(StallEvent(storage.nbytes(), asked_s, time.perf_counter()))
            states = _filled(self.partition.subgroups[visit.index], storage)
        begin_s = time.perf_counter()
        each = list(zip(owners, is_lent, visit.active, strict=True))
        pieces = [p if lent else self.partition.slice_of(part) for p, lent, (_, part) in each]
        after = self._run(
            pieces,
            visit.groups,
            [self.lent[p] if lent else states[number] or None for p, lent, (number, _) in each],
            partial(self._inner_step.run, whole=whole, owners=owners, idle=idle),
        )
        made = [state for state, lent in zip(after, is_lent, strict=True) if state and not lent]
        if whole is not None and not are_own(made, owners):
            raise CoupledError(f"this optimizer's states {SHARE_MEMORY}")
        for p, lent, (number, _) in each:
            state = after.pop(0)
            if lent:
                self.lent[p] = {} if state is None else state
            elif whole is None or state is None:
                states[number] = state or {}
            else:
                # What is not moved gets memory of its own, because the subgroup's is used again.
                moving = {id(value) for value in state.values() if moves(value, self.device)}
                states[number] = moved_out(state, storage, except_for=moving)
                if not state:
                    self.lent[p] = state  # an empty state, which differs from none
        self._update_s += time.perf_counter() - begin_s
        if states:
            self._settle(visit.index, states, storage, keep=keep)

    @spanned("lightning_ssd::update")
    def _run(
        self,
        pieces: Sequence[torch.Tensor],
        groups: Sequence[int],
        states: Sequence[State | None],
        run: Callable[..., list[State | None]],
    ) -> list[State | None]:
        """Let the optimizer update the pieces, or the float32 copies of those that have one."""
        lifted: list[tuple[torch.Tensor, State | None]] = [
            to_master(piece, state or {}) if self.has_master(piece) else (piece, state)
            for piece, state in zip(pieces, states, strict=True)
        ]
        tensors = [tensor for tensor, _ in lifted]
        is_own = [tensor is piece for tensor, piece in zip(tensors, pieces, strict=True)]
        after = run(tensors, groups, [s if own else s or None for (_, s), own in zip(lifted, is_own, strict=True)])
        for number, (tensor, given) in enumerate(lifted):
            if not is_own[number]:
                state, old = after[number], states[number]
                lowered = after[number] = from_master(pieces[number], tensor, state or {})
                if old is not None and state is given:  # the program may hold the dictionary
                    old.clear()
                    old.update(lowered)
                    after[number] = old
        return after

    @spanned("lightning_ssd::flush")
    def _settle(self, index: int, states: Sequence[State], storage: torch.UntypedStorage | None, *, keep: bool) -> None:
        """Copy states into the subgroup's memory, or into new memory if their layout has changed, and give it back."""
        subgroup = self.partition.subgroups[index]
        paged = [not self.partition.is_whole(part) for part in subgroup.parts]
        layout = Layout.of(states, self.device, self.store.block_bytes, paged)
        contents = Contents(layout if layout.nbytes else None, layout.templates(states))
        if layout.nbytes > self.slot_bytes:  # more than the trial predicted
            self._fit_cache(layout.nbytes)
        if layout != subgroup.layout or storage is None:
            storage = self.store.allocate(layout.nbytes) if layout.nbytes else None
        else:
            self.store.will_change(index)
        if storage is not None:
            layout.collect(states, storage)
        self.store.give(index, storage, is_dirty=True, keep=keep, new=(subgroup, contents))

    # -- states from elsewhere -----------------------------------------------------------------------------------

    def is_stored(self, key: object) -> bool:
        """Return whether a state of the parameter was ever stored. It may be lent now."""
        return any(self.partition.subgroups[index].templates[part] for index, part in self.partition.places_of(key))

    def read(self, parameter: torch.Tensor) -> State:
        """Return a copy of a parameter's state. Values that are never moved are the objects themselves, not copies,
        unless the parameter is cut.
        """
        if (error := self.lost.get(parameter)) is not None:
            raise StorageError(
                f"the state of a parameter of shape {tuple(parameter.shape)} was lost when the files were closed "
                f"({type(error).__name__}: {error}); load a checkpoint"
            ) from error
        number = self.partition.number_of(parameter)
        assert number is not None
        places = self.partition.places[number]
        found = []
        for index, part in places:
            storage = self.store.take(index)
            state = _filled(self.partition.subgroups[index], storage)[part]
            found.append(moved_out(state, storage))
            self.store.give(index, storage, is_dirty=False, keep=True)
        return found[0] if len(places) == 1 else self.partition.join(number, found)

    def put(self, states: Mapping[torch.Tensor, State]) -> None:
        """Store the states of some parameters, with all others of their subgroups."""
        known = self.partition
        mine = {number: state for p, state in states.items() if (number := known.number_of(p)) is not None}
        indices = sorted({index for number in mine for index, _ in known.places[number]})
        with StatusLine("Laying out optimizer states") as line:
            for index in line.over(indices, lambda index: known.subgroups[index].expected_bytes):
                subgroup, storage = known.subgroups[index], self.store.take(index)
                parts = _filled(subgroup, storage)
                for number, part in enumerate(subgroup.parts):
                    if part.parameter in mine:
                        parts[number] = known.cut(part, mine[part.parameter])
                self._settle(index, parts, storage, keep=False)

    def forget(self, key: object) -> None:
        """Drop a parameter's state. Moves nothing."""
        for index, part in self.partition.places_of(key):
            self.partition.subgroups[index].forget(part)

    def replace(self, index: int, states: Sequence[State]) -> None:
        """Replace the states of the parts of one subgroup by copies of ``states``."""
        self.store.forget(index)
        self.partition.subgroups[index].forget_layout()
        self._settle(index, owned(states, self.device), None, keep=False)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Return the states as they are now. Those on a drive cost no memory."""
        # States that cannot be written are copied from memory: a full drive costs no checkpoint. A warning is ready.
        with contextlib.suppress(StorageError):
            self.store.flush()
        return Snapshot(self.partition, self.store)

    def hand_back(self) -> None:
        """Lend all states before the files are closed, as mapped memory that outlives these; note those that are lost.

        Values that are never moved stay the same objects.
        """
        snapshot = self.snapshot()
        for parameter in self.partition.parameters:
            if parameter not in self.lent and self.is_stored(parameter):
                try:
                    self.lent[parameter] = snapshot.state_of(parameter, lambda value: value)
                except Exception as error:
                    self.lost[parameter] = error

    # -- numbers, and the end ------------------------------------------------------------------------------------

    def stats(self) -> OptimizerStats:
        """Return all counters except those of steps."""
        progress = self.files.tier.progress()
        return OptimizerStats(
            num_subgroups=len(self.partition.subgroups),
            subgroup_bytes=self.partition.max_bytes,
            state_bytes=sum(s.layout.nbytes for s in self.partition.subgroups if s.layout is not None),
            resident_bytes=self.store.slots.lent_bytes,
            resident_peak_bytes=self.store.slots.peak_bytes,
            written_bytes=progress.written_bytes,
            read_bytes=progress.read_bytes,
            kept_bytes=self.store.kept_bytes,
            stall_s=self.store.stall_s,
            fetch_busy_s=progress.read_busy_s,
            flush_busy_s=progress.write_busy_s,
            update_s=self._update_s,
        )

    def close(self) -> None:
        try:
            self.files.close()
        finally:
            self.store.close()


def _filled(subgroup: Subgroup, storage: torch.UntypedStorage | None) -> list[State]:
    states = list(map(dict, subgroup.templates))
    return states if storage is None or subgroup.layout is None else subgroup.layout.fill(states, storage)


def _versions(parameters: Sequence[torch.Tensor]) -> dict[int, int]:
    return {id(p): p._version for p in parameters if not p.is_inference()}


def _check_others(before: Mapping[int, int], after: Mapping[int, int], given: Sequence[torch.Tensor]) -> None:
    """Raise if a call has edited a parameter that it was not given, by the versions before and after it."""
    mine = set(map(id, given))
    if any(version != before.get(key) and key not in mine for key, version in after.items()):
        raise CoupledError("this optimizer changes parameters that its step was not given")


def _group_numbers(groups: Groups) -> dict[int, int]:
    """Return the number of the group of each parameter, by the parameter's id."""
    return {id(p): number for number, group in enumerate(groups) for p in group["params"]}
