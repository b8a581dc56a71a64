"""Load a saved optimizer state into subgroups, one at a time."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_ssd.common.status_line import StatusLine
from lightning_ssd.optimizer.step.aliases import are_apart, spans_of, tensors_in
from lightning_ssd.optimizer.step.copies import copied
from lightning_ssd.optimizer.step.master_weights import MASTER
from lightning_ssd.optimizer.step.partition import Partition, may_cut
from lightning_ssd.optimizer.step.stepper import with_attributes
from lightning_ssd.optimizer.step.subgroups import Part
from lightning_ssd.optimizer.step.types import State

__all__ = ["load_states"]

_SETSTATE = "__setstate__"


def load_states(
    optimizer: Optimizer,
    state_dict: Mapping[str, Any],
    partition: Partition,
    live: Any,
    put: Callable[[int, Sequence[State]], None],
    *,
    has_master: Callable[[torch.Tensor], bool],
) -> None:
    """Let the optimizer's own ``load_state_dict`` cast and convert saved states, a subgroup at a time.

    A ``__setstate__`` of the user's class is called once, at the end, as by a plain load, and sees all loaded states.

    Args:
        live: the optimizer's ``state`` (``LiveStates``). It is cleared, and gets the keys that have a state now, in the
            order of ``state_dict``, and the states that no layout reproduces: tensors share memory, the state cannot be
            cut into slices, or it is empty.
        put: stores copies of the states of a subgroup's parts.

    Raises:
        ValueError: the groups do not match; nothing has changed.
    """
    saved = dict(state_dict)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = hook(optimizer, saved)
        saved = saved if changed is None else changed
    replaced: dict[str, Any] = {"state": defaultdict(dict)}  # load_state_dict fills it
    # Hooks belong to the whole load.
    replaced |= {f"_optimizer_load_state_dict_{when}_hooks": OrderedDict() for when in ("pre", "post")}
    own = _own_setstate(optimizer)
    if own is not None:
        replaced[_SETSTATE] = partial(Optimizer.__setstate__, optimizer)
    loading = _Loading(optimizer, saved, partition, live, put, has_master)
    with_attributes(optimizer, replaced, loading.run)
    if own is not None:
        own(optimizer, {"state": live, "param_groups": optimizer.param_groups})
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def _own_setstate(optimizer: Optimizer) -> Callable[[Optimizer, dict[str, Any]], None] | None:
    """Return the ``__setstate__`` of a class that is not PyTorch's; ``None``: PyTorch's is used.

    It may keep some of the states elsewhere. So it is called once, with the states that training continues with.
    """
    kind = next(kind for kind in type(optimizer).__mro__ if _SETSTATE in vars(kind))
    own: Callable[[Optimizer, dict[str, Any]], None] = vars(kind)[_SETSTATE]
    return None if f"{kind.__module__}.".startswith("torch.optim.") else own


@dataclass(slots=True)
class _Loading:
    """One load, by calls of the optimizer's own ``load_state_dict``: for the groups, then for one state at a time."""

    optimizer: Optimizer
    saved: Mapping[str, Any]
    partition: Partition
    live: Any
    put: Callable[[int, Sequence[State]], None]
    has_master: Callable[[torch.Tensor], bool]
    number_of: dict[int, Any] = field(default_factory=dict)
    """Number in the state dictionary, by the parameter's id."""
    cast_to: dict[int, torch.Tensor] = field(default_factory=dict)
    """Float32 tensors in the place of parameters with float32 copies: a load casts a state to its parameter's type."""

    def run(self) -> None:
        optimizer, states = self.optimizer, self.saved["state"]
        optimizer.load_state_dict({**self.saved, "state": {}})
        ids = chain.from_iterable(group["params"] for group in self.saved["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        by_number = dict(zip(ids, parameters, strict=True))
        self.number_of = {id(parameter): number for number, parameter in by_number.items()}
        with_masters = filter(self.has_master, by_number.values())
        self.cast_to = {id(p): torch.empty(0, dtype=torch.float32, device=p.device) for p in with_masters}
        stand_ins = [{**g, "params": list(map(self._stand_in, g["params"]))} for g in optimizer.param_groups]
        self.live.clear()
        with_attributes(optimizer, {"param_groups": stand_ins}, lambda: self._load(by_number))
        for key in states.keys() - by_number.keys():
            self.live[key] = copied(states[key], {})  # a state that all parameters share
        self.live.put_in_order([by_number.get(number, number) for number in states])

    def _load(self, by_number: Mapping[Any, torch.Tensor]) -> None:
        with StatusLine("Loading optimizer states") as line:
            for index, subgroup in enumerate(line.over(self.partition.subgroups, lambda one: one.expected_bytes)):
                self.put(index, [self._of_part(part) for part in subgroup.parts])
        for number, parameter in by_number.items():
            # The parameter of a lazy module may have no shape yet.
            if self.partition.number_of(parameter) is None and number in self.saved["state"]:
                self.live[parameter] = self._load_one(parameter, copied(self.saved["state"][number], {}))

    def _of_part(self, part: Part) -> State:
        """Return the loaded state of a part; lend one that no layout reproduces, and return none."""
        parameter = self.partition.parameters[part.parameter]
        number = self.number_of.get(id(parameter))
        if number not in self.saved["state"]:
            return {}
        state = dict(self.saved["state"][number])
        if id(parameter) not in self.cast_to:
            state.pop(MASTER, None)  # saved by a run with float32 copies; this run has none
        is_apart = are_apart([spans_of(tensor) for tensor in tensors_in(state)])
        if state and is_apart and (self.partition.is_whole(part) or may_cut(state, parameter)):
            # A shallow copy: load_state_dict copies or casts tensors, cut ones as well as whole ones.
            return dict(self._load_one(parameter, self.partition.cut(part, state)))
        if part.start == 0:
            self.live[parameter] = self._load_one(parameter, copied(state, {}))
        return {}

    def _load_one(self, parameter: torch.Tensor, state: State) -> State:
        self.optimizer.load_state_dict({**self.saved, "state": {self.number_of[id(parameter)]: state}})
        loaded: State = self.optimizer.state[self._stand_in(parameter)]
        return loaded

    def _stand_in(self, parameter: torch.Tensor) -> torch.Tensor:
        return self.cast_to.get(id(parameter), parameter)
