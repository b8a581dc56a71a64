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
from typing import Any

import torch

from lightning_ssd.common.dtensor import has_shape, local_of
from lightning_ssd.errors import ConfigError
from lightning_ssd.optimizer.paged_states import PagedStates
from lightning_ssd.optimizer.step.aliases import are_apart, is_held, spans_of
from lightning_ssd.optimizer.step.layout import moves
from lightning_ssd.optimizer.step.partition import may_cut
from lightning_ssd.optimizer.step.types import WITHIN_STEP, State

__all__ = ["LiveStates"]


class LiveStates(MutableMapping[Any, Any]):
    """The states by parameter. As in ``Optimizer.state``, a missing one begins as an empty dictionary."""

    default_factory = dict

    def __init__(self, states: PagedStates) -> None:
        self._states = states
        self._keys: dict[Any, None] = {}
        """Keys in the order of iteration. The state of a key that is neither lent nor stored is empty."""
        self._num_lent_bytes = 0
        self.is_in_step = False
        """Whether a step is under way, in which states that are not lent cannot be read, and none be replaced."""

    # -- a mapping -----------------------------------------------------------------------------------------------

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._keys))

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, key: Any) -> Any:
        lent = self._states.lent
        if key not in lent:
            self._check_between_steps()
            self._keys.setdefault(key)
            lent[key] = self._lend(key) if self._states.is_stored(key) else {}
        return lent[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._check_between_steps()
        self._keys.setdefault(key)
        self._states.lent[key] = value  # first: the stored state is then outdated, and may be dropped part by part
        self._states.forget(key)

    def __delitem__(self, key: Any) -> None:
        if key not in self:
            raise KeyError(key)
        self._check_between_steps()
        self._drop(key)

    def _drop(self, key: Any) -> None:
        self._states.lent[key] = {}  # first: the stored state is then outdated, and may be dropped part by part
        self._states.forget(key)
        self._keys.pop(key, None)
        self._states.lent.pop(key, None)

    def note_keys(self, keys: Iterable[Any]) -> None:
        """Append those of the keys for which a step has made a state to the order of iteration."""
        states = self._states
        self._keys.update((key, None) for key in (*keys, *states.lent) if key in states.lent or states.is_stored(key))

    def clear(self) -> None:
        """Drop all states, also those of an incomplete step. Reads nothing from a drive."""
        for key in dict.fromkeys((*self._keys, *self._states.lent, *self._states.partition.parameters)):
            self._drop(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return a state, or ``default`` if there is none. Makes no empty state."""
        return self[key] if key in self else default  # noqa: SIM401

    def pop(self, key: Any, *default: Any) -> Any:
        if key not in self:
            return {}.pop(key, *default)
        value = self[key]
        del self[key]
        return value

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def copy(self) -> defaultdict[Any, Any]:
        """Return a plain ``defaultdict`` of the states, all of them loaded into memory."""
        return defaultdict(dict, self.items())

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict,), None, None, iter(self.items())

    def __repr__(self) -> str:
        return f"<states of {len(self)} parameters, {len(self._states.lent)} of them in memory>"

    # -- up and down ---------------------------------------------------------------------------------------------

    def _check_between_steps(self) -> None:
        """Raise during a step: a state that is lent then would be updated as a whole, and again in planned slices."""
        if self.is_in_step:
            raise RuntimeError(f"state {WITHIN_STEP}")

    def _lend(self, parameter: torch.Tensor) -> State:
        # Above it, states that the program no longer holds go back to their drives.
        if self._num_lent_bytes > 2 * self._states.store.num_slots * self._states.slot_bytes:
            self.settle()
        state = self._states.read(parameter)
        self._num_lent_bytes += sum(map(_nbytes, state.values()))
        return state

    def settle(self) -> None:
        """Return the lent states that the program no longer holds to their drives."""
        lent = self._states.lent
        done = [parameter for parameter in lent if self._may_leave(parameter)]
        if full := {parameter: lent[parameter] for parameter in done if lent[parameter]}:
            self._states.put(full)
        for parameter in done:
            del lent[parameter]
        # States that stay count no more. Else each further read would check all states again that the program holds.
        self._num_lent_bytes = 0

    def _may_leave(self, parameter: Any) -> bool:
        lent, num_parts = self._states.lent, len(self._states.partition.places_of(parameter))
        if not num_parts or type(lent[parameter]) is not dict or is_held(lent, parameter):
            return False
        state, device = lent[parameter], self._states.device
        if not state:
            # A step makes a new state, on its way to a drive. Another optimizer may see that there was an empty one.
            return self._states.is_known and not self._states.is_stored(parameter)
        is_cut = num_parts > 1
        if is_cut and not may_cut(state, parameter):
            return False
        # A value that is not moved stays the same object, even if the program holds it.
        tensors = [key for key in state if isinstance(state[key], torch.Tensor)]
        return not any((is_cut or moves(state[key], device)) and is_held(state, key) for key in tensors)

    def take_over(self, states: Mapping[Any, Any]) -> None:
        self.clear()
        self._states.lent.update(states)
        self.put_in_order(states)

    def put_in_order(self, keys: Iterable[Any]) -> None:
        """Put these keys first in the order of iteration, as in a loaded state dictionary."""
        self._keys = dict.fromkeys((*keys, *self._keys))

    def check(self) -> None:
        """Before a step, check that lent states can be updated in separate calls."""
        lent = {key: state for key, state in self._states.lent.items() if isinstance(key, torch.Tensor)}
        if not lent:
            return
        states = [state for state in lent.values() if state]
        owners = [spans_of([p, state] if has_shape(p) else state) for p, state in lent.items()]
        owners.append(spans_of([p for p in self._states.partition.parameters if p not in lent]))
        if len({id(state) for state in states}) < len(states) or not are_apart(owners):
            raise ConfigError(
                "optimizer.state expects a state of its own for each parameter; got one that two share, or that shows "
                "another parameter's memory: they are not updated at the same time. Clone it, or use "
                "OffloadPolicy.optimizer_states='keep'"
            )


def _nbytes(value: Any) -> int:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return 0
    local = local_of(value)
    return local.numel() * local.element_size()
