"""States as they are on the drives now, as tensors that cost no memory: pages come when they are read.

A flush goes to a fresh extent, and an extent that somebody holds is not given back, so that such tensors stay what they
are while training goes on. Saving them streams through the page cache.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch

from lightning_ssd.common.dtensor import local_of, spec_of, wrap
from lightning_ssd.errors import StorageError
from lightning_ssd.memory.file_mapping import FileView
from lightning_ssd.memory.mmap import PAGE_BYTES
from lightning_ssd.optimizer.step.copies import copied
from lightning_ssd.optimizer.step.layout import MOVED, Field
from lightning_ssd.optimizer.step.partition import Partition, shared
from lightning_ssd.optimizer.step.subgroups import Part
from lightning_ssd.optimizer.step.types import State
from lightning_ssd.optimizer.store.entry import CopyPin, StoredCopy
from lightning_ssd.optimizer.store.store import StateStore

__all__ = ["Snapshot"]


class Snapshot:
    """The states of all parameters at one moment. Flush first: what is ahead of its drive is copied.

    Args:
        partition: which parameter's state is where.
        store: where subgroups are.
        lent: states that are in memory alone, by parameter.
    """

    def __init__(self, partition: Partition, store: StateStore, lent: Mapping[Any, State]) -> None:
        self._partition = partition
        self._store = store
        self._lent = lent
        self._copies: dict[int, StoredCopy] = {}
        self._views: dict[int, FileView] = {}
        self._memory: dict[int, torch.UntypedStorage] = {}
        for index in range(len(partition.subgroups)):
            held = store.hold(index)
            if isinstance(held, StoredCopy):
                self._copies[index] = held
            elif held is not None:
                self._memory[index] = held
        self._made: dict[Any, State] | None = None
        self._failures: dict[Any, Exception] = {}
        self._hold = CopyPin()
        store.release_with(self._hold, list(self._copies.values()))

    def map_all(self) -> Mapping[Any, Exception]:
        """Make all stored tensors now, while files are open; they outlive the files. What does not move is the very
        object, which training goes on with.

        Returns:
            By parameter, why a state cannot be had. The others can.
        """
        made: dict[Any, State] = {}
        for parameter in self._partition.parameters:
            try:
                made[parameter] = {} if parameter in self._lent else self._state_of(parameter, lambda value: value)
            except Exception as error:
                self._failures[parameter] = error
        self._made = made
        return self._failures

    def states_of(self, keys: Iterable[Any]) -> dict[Any, State]:
        """Return all of these, by parameter, as they are now; for objects that are not copied see :func:`copied`.

        Raises:
            RuntimeError: slices of a parameter disagree about what they should share.
            StorageError: the state could not be had when the files were closed.
        """
        if self._made is not None:
            return {key: self.state_of(key) for key in keys}
        memo: dict[int, Any] = {}  # one for all, so that what shares memory still does
        return {
            key: copied(self._lent[key], memo)
            if key in self._lent
            else self._state_of(key, lambda value: copied(value, memo))
            for key in keys
        }

    def has(self, parameter: Any) -> bool:
        """Return whether there is a state, once all are made."""
        return parameter in self._failures or bool((self._made or {}).get(parameter))

    def state_of(self, parameter: Any) -> State:
        """Return what the optimizer remembers of one parameter, once all are made; empty if nothing.

        Raises:
            StorageError: the state could not be had when the files were closed.
        """
        if (error := self._failures.get(parameter)) is not None:
            raise StorageError(
                f"the state of a parameter of shape {tuple(parameter.shape)} was lost when the files were closed "
                f"({type(error).__name__}: {error}); load a checkpoint"
            ) from error
        return dict((self._made or {}).get(parameter, {}))

    def forget(self, parameter: Any) -> None:
        """Drop a state, once all are made."""
        self._failures.pop(parameter, None)
        if self._made is not None:
            self._made.pop(parameter, None)

    def _state_of(self, parameter: Any, kept: Callable[[Any], Any]) -> State:
        """The state with its stored tensors mapped; ``kept`` gives what is instead of a value that does not move."""
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
            self._views[index] = view  # not one that shows nothing, if that has failed
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
