"""From a saved optimizer state to subgroups, one at a time."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_ssd.common.status_line import StatusLine
from lightning_ssd.optimizer.step.aliases import are_apart, spans_of, tensors_in
from lightning_ssd.optimizer.step.master_weights import MASTER
from lightning_ssd.optimizer.step.partition import Partition
from lightning_ssd.optimizer.step.types import State

__all__ = ["load_states"]

_SETSTATE = "__setstate__"


def load_states(
    optimizer: Optimizer,
    state_dict: Mapping[str, Any],
    partition: Partition,
    put: Callable[[int, Sequence[State]], None],
    keep: Callable[[torch.Tensor, State], None],
    *,
    has_master: Callable[[torch.Tensor], bool],
) -> None:
    """Let the optimizer's own ``load_state_dict`` cast and convert what was saved, a subgroup at a time.

    A ``__setstate__`` of the class' own is called once, at the end, as by a plain load: it finds the true states.

    Args:
        optimizer: the user's; its ``state`` is the same object before and after. Its hooks run once.
        state_dict: what ``state_dict`` of its class gave. Nothing of it is kept.
        partition: the optimizer's parameters.
        put: takes the states of a subgroup's parts; what it keeps it copies.
        keep: takes the state of a parameter whose tensors share memory, which no layout gives back as they are.
        has_master: whether the states of a parameter are float32, whatever the parameter itself is.

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
        _load(optimizer, saved, partition, put, keep, has_master)
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


def _own_setstate(optimizer: Optimizer) -> Callable[[Optimizer, dict[str, Any]], None] | None:
    """What a class that is not PyTorch's does with all that was loaded. It may keep some of it elsewhere: it is called
    once, as in a plain load, and finds the states that training goes on with.
    """
    kind = next(kind for kind in type(optimizer).__mro__ if _SETSTATE in vars(kind))
    own: Callable[[Optimizer, dict[str, Any]], None] = vars(kind)[_SETSTATE]
    return None if f"{kind.__module__}.".startswith("torch.optim.") else own


def _load(
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    partition: Partition,
    put: Callable[[int, Sequence[State]], None],
    keep: Callable[[torch.Tensor, State], None],
    has_master: Callable[[torch.Tensor], bool],
) -> None:
    states = saved["state"]
    optimizer.load_state_dict({**saved, "state": {}})
    groups = optimizer.param_groups
    ids = chain.from_iterable(group["params"] for group in saved["param_groups"])
    parameters = list(chain.from_iterable(group["params"] for group in groups))
    id_of = {id(parameter): number for number, parameter in zip(ids, parameters, strict=True)}
    # By its parameter's type load_state_dict decides to which type it casts a state.
    cast_to = {id(p): torch.empty(0, dtype=torch.float32, device=p.device) for p in parameters if has_master(p)}
    optimizer.param_groups = [{**group, "params": [cast_to.get(id(p), p) for p in group["params"]]} for group in groups]
    line = StatusLine("Loading optimizer states")
    try:
        for index, subgroup in enumerate(line.over(partition.subgroups, lambda subgroup: subgroup.expected_bytes)):
            loaded: list[State] = []
            shared: list[tuple[torch.Tensor, State]] = []
            for part in subgroup.parts:
                parameter = partition.parameters[part.parameter]
                number = id_of.get(id(parameter))
                state = dict(states.get(number, {}))
                if id(parameter) not in cast_to:
                    state.pop(MASTER, None)  # saved by a run that had copies; this one has none
                if not are_apart([spans_of(tensor) for tensor in tensors_in(state)]):
                    if part.start == 0:
                        optimizer.load_state_dict({**saved, "state": {number: copy.deepcopy(state)}})
                        shared.append((parameter, optimizer.state[cast_to.get(id(parameter), parameter)]))
                    state = {}
                if state:
                    # A shallow copy: load_state_dict copies or casts tensors, cut ones as well as whole ones.
                    cut = partition.cut(part, state)
                    optimizer.load_state_dict({**saved, "state": {number: cut}})
                    state = dict(optimizer.state[cast_to.get(id(parameter), parameter)])
                loaded.append(state)
            put(index, loaded)
            for parameter, state in shared:
                keep(parameter, state)
        for parameter in parameters:
            number = id_of[id(parameter)]
            if partition.number_of(parameter) is None and number in states:  # a lazy module's, without a shape yet
                optimizer.load_state_dict({**saved, "state": {number: copy.deepcopy(states[number])}})
                keep(parameter, optimizer.state[parameter])
    finally:
        optimizer.param_groups = groups
        line.clear()
