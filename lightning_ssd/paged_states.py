"""The states of an optimizer's parameters, brought into memory subgroup by subgroup to be updated."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_ssd.events import EventLog, StallEvent
from lightning_ssd.inner_step import GroupChanges, InnerStep, State
from lightning_ssd.master_weights import lift, lower
from lightning_ssd.partition import Partition
from lightning_ssd.planning.spreading import half_duplex_rate, respread, spread
from lightning_ssd.planning.subgroups import Part, visit_order
from lightning_ssd.profiling import spanned
from lightning_ssd.shards import even_numel, is_shard
from lightning_ssd.slicing import Trials
from lightning_ssd.state_files import StateFiles
from lightning_ssd.state_layout import Layout, owned
from lightning_ssd.state_store import StateStore

__all__ = ["PagedStates", "Visit", "subgroup_bytes"]

_NUM_SLOTS = 4
"""Subgroups in memory at a time, per directory: one is updated while others come and go. They are updated in order, so
that those of a fast directory wait in memory for one of a slow directory."""
_NUM_SUBGROUPS = 64
"""Also per directory, so that the same share of all is in memory."""
_MIN_SUBGROUP_BYTES, _MAX_SUBGROUP_BYTES = 4 << 20, 256 << 20
_MAX_SLOTS_BYTES = 2 << 30
"""Of the slots of all directories together."""
_MAX_MOVES = 4

Groups = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Visit:
    """One subgroup's part in a step."""

    index: int
    active: tuple[tuple[int, Part], ...]
    """Of the subgroup's parts those that have a gradient, with their numbers in it."""
    groups: tuple[int, ...]
    """Of each of these, the number of its parameter group."""


class PagedStates:
    """States by parameter, most of them on drives.

    Args:
        inner_step: calls the optimizer.
        optimizer: the user's, with all its groups.
        files: where states wait.
        master_weights: float32 copies of half-precision parameters are updated, and wait with the states.
        events: where waiting is noted.
    """

    def __init__(
        self,
        inner_step: InnerStep,
        optimizer: Optimizer,
        files: StateFiles,
        *,
        master_weights: bool,
        events: EventLog | None,
    ) -> None:
        self._inner_step = inner_step
        self._events = events
        self.files = files
        self.trials = Trials(inner_step, optimizer, master_weights=master_weights)
        self.partition = Partition(self._subgroup_bytes(optimizer.param_groups))
        self.store = StateStore(
            files.tiers,
            files.mover,
            device=files.device,
            num_slots=_NUM_SLOTS * len(files.tiers),
            mark=files.mark,
            block_bytes=files.block_bytes,
            host=files.host,
            wait=files.wait,
        )
        self.update_s = 0.0
        self._is_rehearsed = self.trials.is_elementwise
        self._slot_bytes = self.partition.max_bytes
        self._num_cached = 0
        self._rates: Sequence[float] = [half_duplex_rate(*pair) for pair in files.rates()]

    def _subgroup_bytes(self, groups: Groups) -> int:
        nbytes: int = sum(
            even_numel(p) * self.trials.element_bytes(p, number)
            for number, group in enumerate(groups)
            for p in group["params"]
        )
        return subgroup_bytes(nbytes, len(self.files.tiers))

    # -- parameters ----------------------------------------------------------------------------------------------

    def register(self, groups: Groups) -> None:
        """Take in parameters that have come into the groups, in whatever way.

        Raises:
            OutOfSpaceError: the directories have no room for their states.
        """
        numbers = _group_numbers(groups)
        new = [p for group in groups for p in group["params"] if self.partition.number_of(p) is None]
        if new:
            num_made = self.partition.extend(
                new,
                lambda p: self.trials.element_bytes(p, numbers[id(p)]),
                lambda p: self.trials.may_slice(p, numbers[id(p)]),
            )
            self.store.add(spread(num_made, self._rates))
            self._fit_cache(max(subgroup.expected_bytes for subgroup in self.partition.subgroups))
            self._reserve()

    def _fit_cache(self, largest_bytes: int) -> None:
        """More slots, each as large as the largest subgroup, where others have left host memory for them.

        No more than there are subgroups, so that others get what is of no use here.
        """
        share = self.files.share
        self._slot_bytes = max(self._slot_bytes, largest_bytes)
        if share is not None:
            wanted = len(self.partition.subgroups) - _NUM_SLOTS * len(self.files.tiers)
            num = share.fit(max(wanted, 0), self._slot_bytes)
            self.store.add_slots(num - self._num_cached)
            self._num_cached = num

    def _reserve(self) -> None:
        """Room for all states, and for the extents that a step's writes go to before the old ones are given back."""
        spare = self.store.num_slots * self.partition.max_bytes // len(self.files.tiers)
        needs = [spare] * len(self.files.tiers)
        for subgroup, path in zip(self.partition.subgroups, self.store.paths, strict=True):
            needs[path] += subgroup.expected_bytes
        self.files.reserve(needs)

    # -- a step --------------------------------------------------------------------------------------------------

    def plan_visits(self, groups: Groups, step: int) -> list[Visit]:
        """The subgroups that have a gradient, in the order of this step. Nothing is touched.

        Raises:
            RuntimeError: a parameter or its gradient is of a kind that cannot be cut any more.
        """
        numbers = _group_numbers(groups)
        visits = []
        # An optimizer that talks to other processes has to visit its parameters in the order in which they do.
        is_local = self.trials.is_elementwise or not any(map(is_shard, self.partition.parameters))
        # Upwards that is the order of parameters, wherever subgroups end.
        place = (step, self.files.first) if is_local else (0, 0)
        for index in visit_order(len(self.partition.subgroups), *place):
            active = tuple(self._active(index, numbers))
            if active:
                mine = (numbers[id(self.partition.parameters[part.parameter])] for _, part in active)
                visits.append(Visit(index, active, tuple(mine)))
        return visits

    def _active(self, index: int, numbers: Mapping[int, int]) -> Iterator[tuple[int, Part]]:
        for number, part in enumerate(self.partition.subgroups[index].parts):
            parameter = self.partition.parameters[part.parameter]
            if parameter.grad is not None and id(parameter) in numbers:
                self.partition.check_cuttable(part)
                yield number, part

    def update(self, visits: Sequence[Visit], changes: GroupChanges) -> None:
        """Fetch, update and flush every subgroup of a step; the last ones stay in memory.

        Raises:
            StorageError: states cannot be read.
            ConfigError: the optimizer turns out to couple its parameters.
        """
        self.partition.align_gradients()
        if len(visits) > 1:
            self._rehearse(visits)
        order = [visit.index for visit in visits]
        here = set(self.store.in_memory())
        self.store.evict(here - set(order[: self.store.num_slots]))
        self.store.prefetch(index for index in order if index not in here)
        for position, visit in enumerate(visits):
            self._update(visit, changes, keep=position >= len(visits) - self.store.num_slots)

    def _rehearse(self, visits: Sequence[Visit]) -> None:
        """Once, before an optimizer that is not known is called several times: with the smallest of its parameters."""
        if self._is_rehearsed:
            return
        pairs = [
            (self.partition.slice_of(part), group)
            for visit in visits
            for (_, part), group in zip(visit.active, visit.groups, strict=True)
        ]
        piece, group = min(pairs, key=lambda pair: even_numel(pair[0]) or math.inf)  # some are empty
        self._inner_step.rehearse(lift(piece, {})[0] if self.trials.has_master(piece) else piece, group)
        self._is_rehearsed = True

    def _update(self, visit: Visit, changes: GroupChanges, *, keep: bool) -> None:
        """One subgroup."""
        subgroup = self.partition.subgroups[visit.index]
        asked_s = time.perf_counter()
        storage = self.store.take(visit.index)
        begin_s = time.perf_counter()
        if self._events is not None and storage is not None:
            self._events.append(StallEvent(storage.nbytes(), asked_s, begin_s))
        states = list(map(dict, subgroup.templates))
        if storage is not None and subgroup.layout is not None:
            states = subgroup.layout.fill(states, storage)
        pieces = [self.partition.slice_of(part) for _, part in visit.active]
        before = [states[number] for number, _ in visit.active]
        for (number, _), state in zip(visit.active, self._run(pieces, visit.groups, before, changes), strict=True):
            states[number] = state
        self.update_s += time.perf_counter() - begin_s
        self._settle(visit.index, states, storage, keep=keep)

    @spanned("lightning_ssd::update")
    def _run(
        self, pieces: Sequence[torch.Tensor], groups: Sequence[int], states: Sequence[State], changes: GroupChanges
    ) -> list[State]:
        """Let the optimizer update the pieces, or the float32 copies of those that have one."""
        pairs = zip(pieces, states, strict=True)
        lifted = [lift(piece, state) if self.trials.has_master(piece) else (piece, state) for piece, state in pairs]
        tensors = [tensor for tensor, _ in lifted]
        after = self._inner_step.run(tensors, groups, [state for _, state in lifted], changes)
        return [
            state if tensor is piece else lower(piece, tensor, state)
            for piece, tensor, state in zip(pieces, tensors, after, strict=True)
        ]

    @spanned("lightning_ssd::flush")
    def _settle(self, index: int, states: Sequence[State], storage: torch.UntypedStorage | None, *, keep: bool) -> None:
        """Put states into the subgroup's memory, or into new memory if they have become others, and give it back."""
        subgroup = self.partition.subgroups[index]
        paged = [not self.partition.is_whole(part) for part in subgroup.parts]
        layout = Layout.of(states, self.files.device, self.store.block_bytes, paged)
        if layout.nbytes > self._slot_bytes:  # more than a trial has told
            self._fit_cache(layout.nbytes)
        if layout != subgroup.layout or storage is None:
            storage = self.store.allocate(layout.nbytes) if layout.nbytes else None
        if storage is not None:
            layout.collect(states, storage)
        # Not before: interrupted in between, old bytes would be read in a new layout.
        subgroup.layout = layout if layout.nbytes else None
        subgroup.templates = layout.templates(states)
        self.store.give(index, storage, is_dirty=True, keep=keep)

    def rebalance(self) -> None:
        """Next writes go where the drives have turned out to be faster."""
        if len(self.store.tiers) > 1:
            self._rates = [half_duplex_rate(*pair) for pair in self.files.rates()]
            self.store.assign(respread(self.store.paths, self._rates, max_moves=_MAX_MOVES))

    # -- states from elsewhere -----------------------------------------------------------------------------------

    def put(self, states: Mapping[torch.Tensor, State]) -> None:
        """States that the optimizer has made itself; subgroups of other parameters stay as they are."""
        known = self.partition
        for index, subgroup in enumerate(known.subgroups):
            mine = [states.get(known.parameters[part.parameter], {}) for part in subgroup.parts]
            if any(mine):
                cut = [known.cut(part, state) for part, state in zip(subgroup.parts, mine, strict=True)]
                self._settle(index, cut, self.store.take(index), keep=False)

    def replace(self, index: int, states: Sequence[State]) -> None:
        """Other states for the parts of one subgroup; what it keeps of them it copies."""
        self.store.forget(index)
        self.partition.subgroups[index].layout = None
        self._settle(index, owned(states, self.files.device), None, keep=False)

    @property
    def nbytes(self) -> int:
        """Of all states that move."""
        return sum(s.layout.nbytes for s in self.partition.subgroups if s.layout is not None)


def subgroup_bytes(nbytes: int, num_directories: int) -> int:
    """How large subgroups are that make up states of so many bytes, which go to so many directories."""
    most = min(_MAX_SUBGROUP_BYTES, _MAX_SLOTS_BYTES // (_NUM_SLOTS * num_directories))
    return min(max(nbytes // (_NUM_SUBGROUPS * num_directories), _MIN_SUBGROUP_BYTES), most)


def _group_numbers(groups: Groups) -> dict[int, int]:
    """Of each parameter, by its id, the number of its group."""
    return {id(p): number for number, group in enumerate(groups) for p in group["params"]}
