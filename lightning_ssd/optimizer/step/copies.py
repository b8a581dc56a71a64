"""Copy and compare what optimizers remember: states, options and attributes."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from numbers import Number
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_ssd.common.dtensor import is_shard, local_of
from lightning_ssd.common.tensors import PLAIN_TYPES

__all__ = ["copied", "same"]

_EDITABLE = (dict, OrderedDict, defaultdict, list, deque)
_FIXED = (tuple, set, frozenset)
_CONSTANT = (str, bytes, type(None), type, FunctionType, BuiltinFunctionType, ModuleType, torch.dtype, torch.device)
_MAX_DEPTH = 8


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


def same(one: Any, other: Any, names: Mapping[int, int] | None = None, depth: int = 0) -> bool:
    """Whether two values are equal, bit for bit; not a number is as good as itself. What cannot be compared is.

    Args:
        one: a value.
        other: another one.
        names: numbers of objects that stand for others, by their ids.
        depth: of containers and objects around the values.
    """
    names = names or {}
    if one is other or depth > _MAX_DEPTH:
        return True
    if id(one) in names or id(other) in names:
        return names.get(id(one)) == names.get(id(other))
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        is_container: bool = is_traceable_wrapper_subclass(one)
        if is_container and not is_shard(one):
            inner = one.__tensor_flatten__()[0]  # type: ignore[attr-defined]
            return all(same(getattr(one, name), getattr(other, name), names, depth + 1) for name in inner)
        return _same_tensors(local_of(one), local_of(other))
    if isinstance(one, torch.Generator):
        return torch.equal(one.get_state(), other.get_state())
    if isinstance(one, Mapping):
        ones, others = ({names.get(id(key), key): value for key, value in each.items()} for each in (one, other))
        return ones.keys() == others.keys() and all(same(ones[k], others[k], names, depth + 1) for k in ones)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(same(a, b, names, depth + 1) for a, b in zip(one, other, strict=True))
    if isinstance(one, set | frozenset):
        return {names.get(id(item), item) for item in one} == {names.get(id(item), item) for item in other}
    if isinstance(one, Number):
        return repr(one) == repr(other)
    if isinstance(one, _CONSTANT):
        return bool(one == other)
    if type(one).__module__ == "numpy":
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    if isinstance(getattr(one, "__dict__", None), dict):
        return same(vars(one), vars(other), names, depth + 1)
    return True


def _same_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype, one.layout, one.device) != (other.shape, other.dtype, other.layout, other.device):
        return False
    if type(one) not in PLAIN_TYPES or one.layout != torch.strided or one.device.type == "meta":
        return True
    is_equal = (one == other) | ((one != one) & (other != other))
    if one.is_floating_point():
        is_equal &= (torch.signbit(one) == torch.signbit(other)) | (one != one)
    return bool(is_equal.all())
