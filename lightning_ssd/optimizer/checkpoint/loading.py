"""Load a saved optimizer state into subgroups, one at a time."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

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


class _Saved(NamedTuple):
    """A saved optimizer state, and which of its numbers belong to which parameters."""

    content: Mapping[str, Any]
    number_of: Mapping[int, Any]
    """Number of each parameter in ``content``, by the parameter's id."""
    cast_to: Mapping[int, torch.Tensor]
    """Tensors in the place of the parameters with float32 copies, by the parameter's id."""


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
    # A class that is not PyTorch's may keep some of the states elsewhere. So its method is called once, with the states
    # that training continues with.
    kind = next(kind for kind in type(optimizer).__mro__ if _SETSTATE in vars(kind))
    own = None if f"{kind.__module__}.".startswith("torch.optim.") else vars(kind)[_SETSTATE]
    if own is not None:
        replaced[_SETSTATE] = partial(Optimizer.__setstate__, optimizer)

    def load() -> None:
        states = saved["state"]
        optimizer.load_state_dict({**saved, "state": {}})
        ids = chain.from_iterable(group["params"] for group in saved["param_groups"])
        by_number = dict(zip(ids, (p for group in optimizer.param_groups for p in group["params"]), strict=True))
        number_of = {id(parameter): number for number, parameter in by_number.items()}
        # A load casts a state to its parameter's type: a float32 tensor is in the place of one with a float32 copy.
        with_masters = filter(has_master, by_number.values())
        cast_to = {id(p): torch.empty(0, dtype=torch.float32, device=p.device) for p in with_masters}
        given = _Saved(saved, number_of, cast_to)

        def load_all() -> None:
            with StatusLine("Loading optimizer states") as line:
                for index, subgroup in enumerate(line.over(partition.subgroups, lambda one: one.expected_bytes)):
                    put(index, [_state_of(part, partition, optimizer, given, live) for part in subgroup.parts])
            for number, parameter in by_number.items():
                # The parameter of a lazy module may have no shape yet.
                if partition.number_of(parameter) is None and number in states:
                    live[parameter] = _load_one(optimizer, given, parameter, copied(states[number], {}))

        live.clear()
        stand_ins = [
            {**group, "params": [cast_to.get(id(p), p) for p in group["params"]]} for group in optimizer.param_groups
        ]
        with_attributes(optimizer, {"param_groups": stand_ins}, load_all)
        for key in states.keys() - by_number.keys():
            live[key] = copied(states[key], {})  # a state that all parameters share
        live.put_in_order([by_number.get(number, number) for number in states])

    with_attributes(optimizer, replaced, load)
    if own is not None:
        own(optimizer, {"state": live, "param_groups": optimizer.param_groups})
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def _state_of(part: Part, partition: Partition, optimizer: Optimizer, saved: _Saved, live: Any) -> State:
    """Return the loaded state of a part; lend one that no layout reproduces, and return none."""
    parameter, states = partition.parameters[part.parameter], saved.content["state"]
    number = saved.number_of.get(id(parameter))
    if number not in states:
        return {}
    state = dict(states[number])
    if id(parameter) not in saved.cast_to:
        state.pop(MASTER, None)  # saved by a run with float32 copies; this run has none
    is_apart = are_apart([spans_of(tensor) for tensor in tensors_in(state)])
    if state and is_apart and (partition.is_whole(part) or may_cut(state, parameter)):
        # A shallow copy: load_state_dict copies or casts tensors, cut ones as well as whole ones.
        return dict(_load_one(optimizer, saved, parameter, partition.cut(part, state)))
    if part.start == 0:
        live[parameter] = _load_one(optimizer, saved, parameter, copied(state, {}))
    return {}


def _load_one(optimizer: Optimizer, saved: _Saved, parameter: torch.Tensor, state: State) -> State:
    """Return one parameter's state as the optimizer's own ``load_state_dict`` casts it."""
    optimizer.load_state_dict({**saved.content, "state": {saved.number_of[id(parameter)]: state}})
    loaded: State = optimizer.state[saved.cast_to.get(id(parameter), parameter)]
    return loaded
