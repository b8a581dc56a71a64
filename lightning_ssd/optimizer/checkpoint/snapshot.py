"""States as they are on the drives now, as tensors that cost no memory: pages come when they are read.

A flush goes to a fresh extent, and an extent that somebody holds is not given back, so that such tensors stay what they
are while training goes on. Saving them streams through the page cache.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch

from lightning_ssd.common.dtensor import local_of, spec_of, wrap
from lightning_ssd.memory.file_mapping import FileView
from lightning_ssd.memory.mmap import PAGE_BYTES
from lightning_ssd.optimizer.step.layout import MOVED, Field
from lightning_ssd.optimizer.step.partition import Partition, shared
from lightning_ssd.optimizer.step.subgroups import Part
from lightning_ssd.optimizer.step.types import State
from lightning_ssd.optimizer.store.entry import CopyPin, StoredCopy
from lightning_ssd.optimizer.store.store import StateStore

__all__ = ["Snapshot"]


class Snapshot:
    """The states of all parameters at one moment. What is in memory only is copied; flush first.

    Args:
        partition: which parameter's state is where.
        store: where subgroups are.
        lent: states that are in memory alone, by parameter.
    """

    def __init__(self, partition: Partition, store: StateStore, lent: Mapping[Any, State]) -> None:
        self._partition = partition
        self._store = store
        self._copies: dict[int, StoredCopy] = {}
        self._views: dict[int, FileView] = {}
        self._memory: dict[int, torch.UntypedStorage] = {}
        for index in range(len(partition.subgroups)):
            held = store.hold(index)
            if isinstance(held, StoredCopy):
                self._copies[index] = held
            elif held is not None:
                self._memory[index] = held
        # One call, so that what shares memory still does.
        copies = copy.deepcopy(list(lent.values()))
        self._lent: dict[Any, State] = dict(zip(lent, copies, strict=True))
        self._made: dict[Any, State] | None = None
        self._hold = CopyPin()
        store.release_with(self._hold, list(self._copies.values()))

    def map_all(self) -> None:
        """Make all tensors now, while files are open; they outlive the files."""
        self._made = {parameter: self.state_of(parameter) for parameter in self._partition.parameters}

    def states_of(self, keys: Iterable[Any]) -> dict[Any, State]:
        """Return all of these, by parameter; what was in memory alone is the same object in each call."""
        return {key: self._lent[key] if key in self._lent else self.state_of(key) for key in keys}

    def state_of(self, parameter: Any) -> State:
        """What the optimizer remembers of one parameter; empty if nothing.

        Raises:
            RuntimeError: slices of the parameter disagree about what they should share.
        """
        if self._made is not None:
            return dict(self._made.get(parameter, {}))
        number = self._partition.number_of(parameter)
        if number is None:
            return {}
        if parameter in self._lent:
            return dict(self._lent[parameter])
        places = self._partition.places[number]
        states = [self._partition.subgroups[index].templates[part] for index, part in places]
        if not any(states):
            return {}
        result: State = {}
        memo: dict[int, Any] = {}  # so that what shares memory still does
        for key, value in states[0].items():
            if len(places) == 1:
                result[key] = self._whole(*places[0], key) if value is MOVED else copy.deepcopy(value, memo)
            elif value is MOVED:
                result[key] = wrap(self._joined(number, key), spec_of(parameter))
            else:
                result[key] = copy.deepcopy(shared([state[key] for state in states], key))
        return result

    def forget(self, parameter: Any) -> None:
        """There is no such state any more, once all are made."""
        if self._made is not None:
            self._made.pop(parameter, None)

    def _whole(self, index: int, number: int, key: Hashable) -> torch.Tensor:
        field = self._partition.subgroups[index].field(number, key)
        if index in self._memory:
            return wrap(field.view(self._memory[index]).clone(), field.spec)
        view = self._views.get(index)
        if view is None:
            held = self._copies[index]
            view = self._views[index] = FileView(held.stored.body_nbytes, keeps=self._hold)
            held.show(view, 0, 0, held.stored.body_nbytes)
        return wrap(view.tensor(field.offset, field.dtype, field.shape, field.stride), field.spec)

    def _joined(self, parameter: int, key: Hashable) -> torch.Tensor:
        """Slices side by side, as the one tensor (or part of a DTensor) that they are."""
        places = self._partition.places[parameter]
        shape, stride = self._partition.shapes[parameter]
        first = self._field(*places[0], key)
        size = first.dtype.itemsize
        num_elements = self._part(*places[-1]).stop
        view = FileView(num_elements * size, keeps=self._hold)
        for index, number in places:
            part, field = self._part(index, number), self._field(index, number, key)
            if isinstance(field, Field) and (index in self._memory or part.start * size % PAGE_BYTES):
                field = local_of(self._whole(index, number, key)).cpu()  # a piece that cannot be mapped side by side
            if isinstance(field, Field):
                self._copies[index].show(view, part.start * size, field.offset, field.nbytes)
            else:
                flat = view.tensor(part.start * size, field.dtype, (field.numel(),), (1,))
                flat.copy_(field.flatten())
        return view.tensor(0, first.dtype, shape, stride)

    def _field(self, index: int, number: int, key: Hashable) -> Any:
        """Where a part's tensor is; or the tensor itself, when it is so small that it stayed."""
        subgroup = self._partition.subgroups[index]
        value = subgroup.templates[number][key]
        return subgroup.field(number, key) if value is MOVED else local_of(value)

    def _part(self, index: int, number: int) -> Part:
        return self._partition.subgroups[index].parts[number]
