"""Copies of state values, which later steps do not change."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict, defaultdict, deque
from typing import Any

import torch

__all__ = ["copied"]

_EDITABLE = (dict, OrderedDict, defaultdict, list, deque)
_FIXED = (tuple, set, frozenset)


def copied(value: Any, memo: dict[int, Any]) -> Any:
    """Copy tensors, and the containers that they are in; return any other value as it is.

    A lock, a generator, a module or an object that refers to a parameter means something only as the object that it
    is, and a plain ``state_dict()`` gives that object, too. A tensor is given as it is where its class can neither
    clone it nor take it apart.

    Args:
        value: a state, or a value in one.
        memo: as that of ``copy.deepcopy``; calls with one memo keep which tensors share memory.
    """
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, torch.Tensor):
        memo[id(value)] = _copied_tensor(value, memo)
    elif type(value) in _EDITABLE:
        memo[id(value)] = result = copy.copy(value)  # before its items, which may refer to it
        for place in list(value) if isinstance(value, dict) else range(len(value)):
            result[place] = copied(value[place], memo)
    elif type(value) in _FIXED or (isinstance(value, tuple) and hasattr(value, "_make")):
        make = getattr(value, "_make", type(value))
        memo[id(value)] = make([copied(item, memo) for item in value])
    else:
        return value
    return memo[id(value)]


def _copied_tensor(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    # A tensor subclass may raise anything where it lacks an operation.
    with contextlib.suppress(Exception):
        for mark in vars(tensor).values():  # deepcopy finds them in the memo, and does not copy what cannot be
            memo.setdefault(id(mark), copied(mark, memo))
        result: torch.Tensor = copy.deepcopy(tensor, memo)
        return result
    with contextlib.suppress(Exception):
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = {name: copied(getattr(tensor, name), memo) for name in names}
        kind: Any = type(tensor)
        rebuilt: torch.Tensor = kind.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
        return rebuilt
    return tensor
