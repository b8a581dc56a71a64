"""Present offloaded states as an optimizer's ``state``: reading one loads it, and changes to it are written back.

Note: lent states
    Reading a state lends it: the program gets a dictionary of tensors in memory, which *is* the state from then on.
    While the program holds these tensors, steps update them in place, as a plain step does. A state that the program no
    longer holds returns to its drive: at the beginning of the next step, at a checkpoint, or when much is lent. A state
    that no layout on a drive can reproduce (one tensor under two names, a view of a gradient) stays in memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch

from lightning_ssd.common.dtensor import has_shape, local_of
from lightning_ssd.errors import ConfigError
from lightning_ssd.optimizer.checkpoint.snapshot import Snapshot
from lightning_ssd.optimizer.paged_states import PagedStates
from lightning_ssd.optimizer.step.aliases import are_apart, is_held, num_looking, spans_of
from lightning_ssd.optimizer.step.layout import moves
from lightning_ssd.optimizer.step.partition import may_cut
from lightning_ssd.optimizer.step.types import WITHIN_STEP, State

__all__ = ["LiveStates"]


class LiveStates(MutableMapping[Any, Any]):
    """The states by parameter. As in ``Optimizer.state``, a missing one begins as an empty dictionary.

    Args:
        states: the offloaded states.
    """

    default_factory = dict

    def __init__(self, states: PagedStates) -> None:
        self._states = states
        self._snapshot: Snapshot | None = None
        self._order: dict[Any, None] = {}
        self._num_lent_bytes = 0
        self._is_in_step = False

    # -- a mapping -----------------------------------------------------------------------------------------------

    def __contains__(self, key: object) -> bool:
        return key in self._states.lent or self._is_stored(key)

    def __iter__(self) -> Iterator[Any]:
        self.note_order(self._states.parameters)
        self.note_order(self._states.lent)
        return iter([key for key in self._order if key in self])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, key: Any) -> Any:
        lent = self._states.lent
        if key not in lent:
            self._check_between_steps()
            lent[key] = self._lend(key) if self._is_stored(key) else {}
            self.note_order([key])
        return lent[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._check_between_steps()
        self._states.lent[key] = value  # first: the stored state is then outdated, and may be dropped part by part
        self._forget(key)
        self.note_order([key])

    def __delitem__(self, key: Any) -> None:
        if key not in self:
            raise KeyError(key)
        self._check_between_steps()
        self._states.lent[key] = {}  # first: the stored state is then outdated, and may be dropped part by part
        self._forget(key)
        self._order.pop(key, None)
        self._states.lent.pop(key, None)

    def note_order(self, keys: Iterable[Any]) -> None:
        """Append those of the keys that have a state, and are not in the order yet, to the order of iteration."""
        self._order.update((key, None) for key in keys if key not in self._order and key in self)

    def clear(self) -> None:
        """Drop all states. Reads nothing from a drive."""
        for key in list(self):
            del self[key]

    def get(self, key: Any, default: Any = None) -> Any:
        """Return a state, or ``default`` if there is none. Makes no empty state."""
        return self[key] if key in self else default  # noqa: SIM401

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove a state and return it, as ``dict.pop`` does."""
        if key not in self:
            return {}.pop(key, *default)
        value = self[key]
        del self[key]
        return value

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Return a state; set it to ``default`` if there is none, as ``dict.setdefault`` does."""
        if key not in self:
            self[key] = default
        return self[key]

    def copy(self) -> defaultdict[Any, Any]:
        """Return a plain ``defaultdict`` of the states, all of them loaded into memory."""
        return defaultdict(dict, self.items())

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as a plain ``defaultdict`` with all states."""
        return defaultdict, (dict,), None, None, iter(self.items())

    def __repr__(self) -> str:
        return f"<states of {len(self)} parameters, {len(self._states.lent)} of them in memory>"

    # -- up and down ---------------------------------------------------------------------------------------------

    def _check_between_steps(self) -> None:
        """Raise during a step: a state that is lent then would be updated as a whole, and again in planned slices."""
        if self._is_in_step:
            raise RuntimeError(f"state {WITHIN_STEP}")

    def _is_stored(self, key: object) -> bool:
        return self._states.is_stored(key) if self._snapshot is None else self._snapshot.has(key)

    def _lend(self, parameter: torch.Tensor) -> State:
        if self._snapshot is not None:
            return self._snapshot.state_of(parameter)
        if self._num_lent_bytes > self._states.lent_limit_bytes:
            self.settle()
        state = self._states.read(parameter)
        self._num_lent_bytes += _nbytes(state)
        return state

    def _forget(self, key: Any) -> None:
        self._states.forget(key)
        if self._snapshot is not None:
            self._snapshot.forget(key)

    def settle(self) -> None:
        """Return the lent states that the program no longer holds to their drives.

        Raises:
            StorageError: a drive cannot be read; the lent states stay in memory.
        """
        lent = self._states.lent
        if self._snapshot is None:
            # States that lie in the memory of a subgroup share one storage.
            values = (value for state in lent.values() if type(state) is dict for value in state.values())
            looking = num_looking(value for value in values if isinstance(value, torch.Tensor))
            done = [parameter for parameter in lent if self._may_leave(parameter, looking)]
            if done:
                self._states.put({parameter: lent[parameter] for parameter in done})
                for parameter in done:
                    del lent[parameter]
        # States that stay count no more. Else each further read would check all states again that the program holds.
        self._num_lent_bytes = 0

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Enter a step, in which ``state`` refuses reads of new states, and changes.

        Reading the state of a parameter before its first step lends an empty dictionary. If the program no longer holds
        it, it is dropped for the step. The optimizer then makes a new state, which is offloaded.
        """
        lent = self._states.lent
        # Another optimizer may see a difference between an empty state and none.
        may_leave = self._states.is_known
        empty = [parameter for parameter in lent if may_leave and self._is_empty(parameter)]
        for parameter in empty:
            del lent[parameter]
        try:
            self._is_in_step = True
            yield
        finally:
            self._is_in_step = False
            lent.update((parameter, {}) for parameter in empty if parameter not in self)

    def _is_empty(self, parameter: Any) -> bool:
        lent = self._states.lent
        is_plain = isinstance(parameter, torch.Tensor) and type(lent[parameter]) is dict
        return is_plain and not lent[parameter] and not is_held(lent, parameter) and not self._is_stored(parameter)

    def _may_leave(self, parameter: Any, looking: Mapping[int, int]) -> bool:
        lent, num_parts = self._states.lent, self._states.num_parts(parameter)
        if not num_parts or type(lent[parameter]) is not dict or not lent[parameter] or is_held(lent, parameter):
            return False
        is_cut = num_parts > 1
        state, device = lent[parameter], self._states.device
        if is_cut and not may_cut(state, parameter):
            return False
        # A value that is not moved stays the same object, even if the program holds it.
        tensors = [key for key in state if isinstance(state[key], torch.Tensor)]
        return not any((is_cut or moves(state[key], device)) and is_held(state, key, looking) for key in tensors)

    def take_over(self, states: Mapping[Any, Any]) -> None:
        """Replace all states by others."""
        self.clear()
        self._states.lent.update(states)
        self.note_order(states)

    def put_in_order(self, keys: Iterable[Any]) -> None:
        """Put these keys first in the order of iteration, as in a loaded state dictionary."""
        self._order.clear()
        self.note_order(keys)

    def keep(self, snapshot: Snapshot) -> None:
        """Read all states from memory or from ``snapshot`` from now on, because the files are closed."""
        self._snapshot = snapshot

    def saved(self, snapshot: Snapshot) -> dict[Any, State]:
        """Return all states of a snapshot; once the files are closed, with the program's changes since."""
        edited = {} if self._snapshot is None else self._states.lent
        keys = list(self)
        rest = snapshot.states_of(key for key in keys if key not in edited)
        return {key: edited[key] if key in edited else rest[key] for key in keys}

    def check(self) -> None:
        """Before a step, check that lent states can be updated in separate calls.

        Raises:
            ConfigError: two parameters share a state, or a state shares memory with another parameter.
        """
        lent = {key: state for key, state in self._states.lent.items() if isinstance(key, torch.Tensor)}
        if not lent:
            return
        states = [state for state in lent.values() if state]
        owners = [spans_of([p, state] if has_shape(p) else state) for p, state in lent.items()]
        owners.append(spans_of([p for p in self._states.parameters if p not in lent]))
        if len({id(state) for state in states}) < len(states) or not are_apart(owners):
            raise ConfigError(
                "optimizer.state expects a state of its own for each parameter; got one that two share, or that shows "
                "another parameter's memory: they are not updated at the same time. Clone it, or use "
                "OffloadPolicy.optimizer_states='keep'"
            )


def _nbytes(state: Any) -> int:
    values = state.values() if isinstance(state, Mapping) else ()
    return sum(v.numel() * v.element_size() for v in map(_local, values) if v is not None)


def _local(value: Any) -> torch.Tensor | None:
    return local_of(value) if isinstance(value, torch.Tensor) and value.layout == torch.strided else None
