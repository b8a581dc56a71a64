"""Map the states on the drives at one moment as tensors that cost no memory, because pages are read on access.

A flush writes to a fresh extent, and a mapped extent is not freed. So these tensors do not change while training goes
on. Saving them streams through the page cache.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from lightning_ssd.common.dtensor import local_of, spec_of, wrap
from lightning_ssd.memory.file_mapping import FileView
from lightning_ssd.memory.mmap import PAGE_BYTES
from lightning_ssd.optimizer.step.layout import MOVED, Field
from lightning_ssd.optimizer.step.partition import Partition, shared
from lightning_ssd.optimizer.step.types import State
from lightning_ssd.optimizer.store.entry import CopyPin, StoredCopy
from lightning_ssd.optimizer.store.store import StateStore

__all__ = ["Snapshot"]


class Snapshot:
    """The stored states of all parameters at one moment.

    Flush first, because states in memory that are newer than the drive's copy are copied in memory.

    Args:
        partition: says which parameter's state is in which subgroup.
        store: the store of the subgroups.
    """

    def __init__(self, partition: Partition, store: StateStore) -> None:
        self._partition = partition
        self._copies: dict[int, StoredCopy] = {}
        self._views: dict[int, FileView] = {}
        self._memory: dict[int, torch.UntypedStorage] = {}
        for index in range(len(partition.subgroups)):
            held = store.hold(index)
            if isinstance(held, StoredCopy):
                self._copies[index] = held
            elif held is not None:
                self._memory[index] = held
        self._hold = CopyPin()
        store.release_with(self._hold, list(self._copies.values()))

    def state_of(self, parameter: Any, kept: Callable[[Any], Any]) -> State:
        """Return a state with its stored tensors mapped, which outlive the files; empty if there is none."""
        places = self._partition.places_of(parameter)
        states = [self._partition.subgroups[index].templates[part] for index, part in places]
        if not any(states):
            return {}
        result: State = {}
        for key, value in states[0].items():
            if value is not MOVED:
                result[key] = kept(shared([state[key] for state in states], key))
            elif len(places) == 1:
                result[key] = self._whole(*places[0], key)
            else:
                number = self._partition.number_of(parameter)
                assert number is not None
                result[key] = wrap(self._joined(number, key), spec_of(parameter))
        return result

    def _whole(self, index: int, number: int, key: Hashable) -> torch.Tensor:
        field = self._partition.subgroups[index].field(number, key)
        if index in self._memory:
            return wrap(field.view(self._memory[index]).clone(), field.spec)
        view = self._views.get(index)
        if view is None:
            held = self._copies[index]
            view = FileView(held.stored.body_nbytes, keeps=self._hold)
            held.show(view, 0, 0, held.stored.body_nbytes)
            self._views[index] = view  # only now: show() may fail, and the view would be empty
        return wrap(view.tensor(field.offset, field.dtype, field.shape, field.stride), field.spec)

    def _joined(self, parameter: int, key: Hashable) -> torch.Tensor:
        """Map the slices of a parameter's state side by side, as one tensor (or the local part of a DTensor)."""
        places = self._partition.places[parameter]
        shape, stride = self._partition.shapes[parameter]
        pieces = []
        for index, number in places:
            subgroup = self._partition.subgroups[index]
            value = subgroup.templates[number][key]
            # A part's tensor that is too small to be moved is in the template itself.
            field: Any = subgroup.field(number, key) if value is MOVED else local_of(value)
            pieces.append((index, number, subgroup.parts[number], field))
        first = pieces[0][-1]
        size = first.dtype.itemsize
        view = FileView(pieces[-1][2].stop * size, keeps=self._hold)
        for index, number, part, field in pieces:
            if isinstance(field, Field) and (index in self._memory or part.start * size % PAGE_BYTES):
                field = local_of(self._whole(index, number, key)).cpu()  # a piece that cannot be mapped side by side
            if isinstance(field, Field):
                self._copies[index].show(view, part.start * size, field.offset, field.nbytes)
            else:
                flat = view.tensor(part.start * size, field.dtype, (field.numel(),), (1,))
                flat.copy_(field.flatten())
        return view.tensor(0, first.dtype, shape, stride)
