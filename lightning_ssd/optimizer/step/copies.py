"""Copy and compare what optimizers remember: states, options and attributes."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from numbers import Number
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_ssd.common.dtensor import is_shard, local_of
from lightning_ssd.common.rng import source_of

__all__ = ["copied", "same"]

_EDITABLE = (dict, OrderedDict, defaultdict, list, deque)
_FIXED = (tuple, set, frozenset)
_CONSTANT = (str, bytes, type(None), type, FunctionType, BuiltinFunctionType, ModuleType, torch.dtype, torch.device)
_PLAIN_MODULES = ("builtins", "collections")
"""Of containers that are no more than what is in them."""


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


def same(one: Any, other: Any, names: Mapping[int, int] | None = None, seen: dict[Any, Any] | None = None) -> bool:
    """Compare two values bit for bit; not a number is as good as itself.

    Args:
        one: a value.
        other: another one.
        names: numbers of objects that stand for others, by their ids.
        seen: the pairs around these values.

    Raises:
        TypeError: nothing tells whether they are equal: they can be neither compared nor pickled.
    """
    names, seen = names or {}, {} if seen is None else seen
    if one is other or (id(one), id(other)) in seen:
        return True
    if id(one) in names or id(other) in names:
        return names.get(id(one)) == names.get(id(other))
    if type(one) is not type(other):
        return False
    seen[id(one), id(other)] = one, other  # kept: an id may not become that of another object
    if isinstance(one, torch.Tensor):
        is_container: bool = is_traceable_wrapper_subclass(one)
        if is_container and not is_shard(one):
            inner = one.__tensor_flatten__()[0]  # type: ignore[attr-defined]
            return all(same(getattr(one, name), getattr(other, name), names, seen) for name in inner)
        return _same_tensors(local_of(one), local_of(other))
    if isinstance(one, Number):
        return repr(one) == repr(other)
    if isinstance(one, _CONSTANT):
        return bool(one == other)
    if isinstance(one, Mapping) and type(one).__module__ in _PLAIN_MODULES:
        ones, others = ({names.get(id(key), key): value for key, value in each.items()} for each in (one, other))
        return ones.keys() == others.keys() and all(same(ones[key], others[key], names, seen) for key in ones)
    if isinstance(one, list | tuple | deque) and type(one).__module__ in _PLAIN_MODULES:
        return len(one) == len(other) and all(same(a, b, names, seen) for a, b in zip(one, other, strict=True))
    if isinstance(one, set | frozenset):
        return {names.get(id(item), item) for item in one} == {names.get(id(item), item) for item in other}
    source, theirs = source_of(one), source_of(other)
    if source is not None and theirs is not None:
        return source.is_same(source.read(), theirs.read())
    if type(one).__module__ == "numpy":
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    return same(_pickled(one), _pickled(other), names, seen)


def _pickled(value: Any) -> Any:
    """Return what a pickle has of an object, which is all that can be known of one that C code has made."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of iterators, which Python 3.14 pickles no more
        reduced = value.__reduce_ex__(4)
    return reduced if isinstance(reduced, str) else tuple(list(p) if isinstance(p, Iterator) else p for p in reduced)


def _same_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype, one.layout, one.device) != (other.shape, other.dtype, other.layout, other.device):
        return False
    if one.device.type == "meta":
        return True
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        if one.layout != torch.strided:
            one, other = one.to_dense(), other.to_dense()
        is_equal = (one == other) | ((one != one) & (other != other))
        if one.is_floating_point():
            is_equal &= (torch.signbit(one) == torch.signbit(other)) | (one != one)
        return bool(is_equal.all())
