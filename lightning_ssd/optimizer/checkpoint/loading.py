"""Load a saved optimizer state into subgroups, one at a time."""

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
    """Let the optimizer's own ``load_state_dict`` cast and convert saved states, a subgroup at a time.

    A ``__setstate__`` of the user's class is called once, at the end, as by a plain load, and sees all loaded states.

    Args:
        optimizer: the user's optimizer; its ``state`` is the same object before and after. Its hooks run once.
        state_dict: a ``state_dict`` of its class. None of its tensors and containers is kept.
        partition: the optimizer's parameters.
        put: stores copies of the states of a subgroup's parts.
        keep: keeps the state of one parameter in memory. It is called for states that no layout reproduces: tensors
            share memory, the state cannot be cut into slices, or it is empty.
        has_master: returns whether the states of a parameter are float32, of whatever type the parameter is.

    Returns:
        The keys that have a state now, in the order of ``state_dict``: parameters, and keys that are no parameters.

    Raises:
        ValueError: the groups do not match; nothing has changed.
    """
    saved = dict(state_dict)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = hook(optimizer, saved)
        saved = saved if changed is None else changed
    state, pre_hooks = optimizer.state, optimizer._optimizer_load_state_dict_pre_hooks
    post_hooks = optimizer._optimizer_load_state_dict_post_hooks
    mine: Any = defaultdict(dict)  # load_state_dict replaces it
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
    """Return the ``__setstate__`` of a class that is not PyTorch's; ``None``: PyTorch's is used.

    It may keep some of the states elsewhere. So it is called once, with the states that training continues with.
    """
    kind = next(kind for kind in type(optimizer).__mro__ if _SETSTATE in vars(kind))
    own: Callable[[Optimizer, dict[str, Any]], None] = vars(kind)[_SETSTATE]
    return None if f"{kind.__module__}.".startswith("torch.optim.") else own


class _Loading:
    """One load, by calls of the optimizer's own ``load_state_dict``: for the groups, then for one state at a time.

    Args:
        optimizer: the user's optimizer. Its groups are the loaded ones from now on.
        saved: the state dictionary to load.
        partition: the optimizer's parameters.
        has_master: returns whether the states of a parameter are float32, of whatever type the parameter is.
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
        # load_state_dict casts a state to the type of its parameter.
        with_masters = filter(has_master, self._parameters)
        self._cast_to = {id(p): torch.empty(0, dtype=torch.float32, device=p.device) for p in with_masters}

    def run(self, put: Callable[[int, Sequence[State]], None], keep: Callable[[Any, Any], None]) -> list[Any]:
        """Load the states; return the keys that have one, in the order of the state dictionary."""
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
                # The parameter of a lazy module may have no shape yet.
                if self._partition.number_of(parameter) is None and number in self._states:
                    keep(parameter, self._load_one(parameter, copied(self._states[number], {})))
        finally:
            self._optimizer.param_groups = groups
            line.clear()
        by_number = {self._number_of[id(parameter)]: parameter for parameter in self._parameters}
        for key in self._states.keys() - by_number.keys():
            keep(key, copied(self._states[key], {}))  # a state that all parameters share
        return [by_number.get(number, number) for number in self._states]

    def _of_part(self, part: Part, kept: list[tuple[torch.Tensor, State]]) -> State:
        """Return the loaded state of a part. Add a state that no layout reproduces to ``kept``, and return none."""
        parameter = self._partition.parameters[part.parameter]
        number = self._number_of.get(id(parameter))
        if number not in self._states:
            return {}
        state = dict(self._states[number])
        if id(parameter) not in self._cast_to:
            state.pop(MASTER, None)  # saved by a run with float32 copies; this run has none
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
