"""From a saved optimizer state to subgroups, one at a time."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
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
from lightning_ssd.optimizer.step.subgroups import Part
from lightning_ssd.optimizer.step.types import State

__all__ = ["load_states"]

_SETSTATE = "__setstate__"


def load_states(
    optimizer: Optimizer,
    state_dict: Mapping[str, Any],
    partition: Partition,
    put: Callable[[int, Sequence[State]], None],
    keep: Callable[[Any, Any], None],
    *,
    has_master: Callable[[torch.Tensor], bool],
) -> list[Any]:
    """Let the optimizer's own ``load_state_dict`` cast and convert what was saved, a subgroup at a time.

    A ``__setstate__`` of the class' own is called once, at the end, as by a plain load: it finds the true states.

    Args:
        optimizer: the user's; its ``state`` is the same object before and after. Its hooks run once.
        state_dict: what ``state_dict`` of its class gave. Of its tensors and containers nothing is kept.
        partition: the optimizer's parameters.
        put: takes the states of a subgroup's parts; what it keeps it copies.
        keep: takes the state of a parameter that no layout gives back as it is: its tensors share memory, slices
            cannot have their share of it, or it is empty.
        has_master: whether the states of a parameter are float32, whatever the parameter itself is.

    Returns:
        The keys that have a state now, in the order of these: parameters, and what is none.

    Raises:
        ValueError: the groups do not match; nothing has changed.
    """
    saved = dict(state_dict)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = hook(optimizer, saved)
        saved = saved if changed is None else changed
    state, pre_hooks = optimizer.state, optimizer._optimizer_load_state_dict_pre_hooks
    post_hooks = optimizer._optimizer_load_state_dict_post_hooks
    mine: Any = defaultdict(dict)  # load_state_dict puts others in its place
    nothing: OrderedDict[int, Any] = OrderedDict()  # hooks belong to the whole load
    own, plain, attributes = _own_setstate(optimizer), partial(Optimizer.__setstate__, optimizer), vars(optimizer)
    try:
        # No context manager: an interrupt as one is entered or left would leave them there.
        if own is not None:
            attributes[_SETSTATE] = plain
        optimizer.state = mine
        optimizer._optimizer_load_state_dict_pre_hooks = nothing
        optimizer._optimizer_load_state_dict_post_hooks = nothing
        loaded = _Loading(optimizer, saved, partition, has_master).run(put, keep)
    finally:
        optimizer.state = state
        optimizer._optimizer_load_state_dict_pre_hooks = pre_hooks
        optimizer._optimizer_load_state_dict_post_hooks = post_hooks
        if own is not None:
            del attributes[_SETSTATE]
    if own is not None:
        own(optimizer, {"state": state, "param_groups": optimizer.param_groups})
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)
    return loaded


def _own_setstate(optimizer: Optimizer) -> Callable[[Optimizer, dict[str, Any]], None] | None:
    """What a class that is not PyTorch's does with all that was loaded. It may keep some of it elsewhere: it is called
    once, as in a plain load, and finds the states that training goes on with.
    """
    kind = next(kind for kind in type(optimizer).__mro__ if _SETSTATE in vars(kind))
    own: Callable[[Optimizer, dict[str, Any]], None] = vars(kind)[_SETSTATE]
    return None if f"{kind.__module__}.".startswith("torch.optim.") else own


class _Loading:
    """One load, by calls of the optimizer's own ``load_state_dict``: for the groups, then for one state at a time.

    Args:
        optimizer: the user's. Its groups are the loaded ones from now on.
        saved: what is loaded.
        partition: the optimizer's parameters.
        has_master: whether the states of a parameter are float32, whatever the parameter itself is.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        saved: Mapping[str, Any],
        partition: Partition,
        has_master: Callable[[torch.Tensor], bool],
    ) -> None:
        self._optimizer, self._saved, self._partition = optimizer, saved, partition
        self._states: Mapping[Any, Any] = saved["state"]
        optimizer.load_state_dict({**saved, "state": {}})
        ids = chain.from_iterable(group["params"] for group in saved["param_groups"])
        self._parameters = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
        self._number_of = {id(p): number for number, p in zip(ids, self._parameters, strict=True)}
        # By its parameter's type load_state_dict decides to which type it casts a state.
        with_masters = filter(has_master, self._parameters)
        self._cast_to = {id(p): torch.empty(0, dtype=torch.float32, device=p.device) for p in with_masters}

    def run(self, put: Callable[[int, Sequence[State]], None], keep: Callable[[Any, Any], None]) -> list[Any]:
        """Load the states; return the parameters that have one, in the order of what was saved."""
        groups = self._optimizer.param_groups
        self._optimizer.param_groups = [{**g, "params": list(map(self._stand_in, g["params"]))} for g in groups]
        line = StatusLine("Loading optimizer states")
        try:
            for index, subgroup in enumerate(line.over(self._partition.subgroups, lambda one: one.expected_bytes)):
                kept: list[tuple[torch.Tensor, State]] = []
                put(index, [self._of_part(part, kept) for part in subgroup.parts])
                for parameter, state in kept:
                    keep(parameter, state)
            for parameter in self._parameters:
                number = self._number_of[id(parameter)]
                # A lazy module's, without a shape yet.
                if self._partition.number_of(parameter) is None and number in self._states:
                    keep(parameter, self._load_one(parameter, copied(self._states[number], {})))
        finally:
            self._optimizer.param_groups = groups
            line.clear()
        by_number = {self._number_of[id(parameter)]: parameter for parameter in self._parameters}
        for key in self._states.keys() - by_number.keys():
            keep(key, copied(self._states[key], {}))  # what all parameters share
        return [by_number.get(number, number) for number in self._states]

    def _of_part(self, part: Part, kept: list[tuple[torch.Tensor, State]]) -> State:
        """What a subgroup gets of its part's state; one that no layout gives back as it is goes to ``kept`` instead."""
        parameter = self._partition.parameters[part.parameter]
        number = self._number_of.get(id(parameter))
        if number not in self._states:
            return {}
        state = dict(self._states[number])
        if id(parameter) not in self._cast_to:
            state.pop(MASTER, None)  # saved by a run that had copies; this one has none
        is_apart = are_apart([spans_of(tensor) for tensor in tensors_in(state)])
        if state and is_apart and (self._partition.is_whole(part) or may_cut(state, parameter)):
            # A shallow copy: load_state_dict copies or casts tensors, cut ones as well as whole ones.
            return dict(self._load_one(parameter, self._partition.cut(part, state)))
        if part.start == 0:
            kept.append((parameter, self._load_one(parameter, copied(state, {}))))
        return {}

    def _load_one(self, parameter: torch.Tensor, state: State) -> State:
        self._optimizer.load_state_dict({**self._saved, "state": {self._number_of[id(parameter)]: state}})
        loaded: State = self._optimizer.state[self._stand_in(parameter)]
        return loaded

    def _stand_in(self, parameter: torch.Tensor) -> torch.Tensor:
        return self._cast_to.get(id(parameter), parameter)
