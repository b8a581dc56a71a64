"""Copy and compare the states, options and attributes of optimizers."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from numbers import Number
from typing import Any

import torch

from lightning_ssd.common.dtensor import local_of
from lightning_ssd.optimizer.step.aliases import tensors_in

__all__ = ["PLAIN", "copied", "same"]

PLAIN = (Number, str, type(None))
"""Types of immutable values: numbers, texts and ``None``."""
_EDITABLE = (dict, OrderedDict, defaultdict, list, deque)
_FIXED = (tuple, set, frozenset)
_SEQUENCES = (list, tuple, deque)


def copied(value: Any, memo: dict[int, Any]) -> Any:
    """Copy tensors, and the containers that they are in; return any other value itself.

    A copy of a lock, a generator, a module or an object that refers to a parameter would be useless. A plain
    ``state_dict()`` also returns the object itself. A tensor whose class can neither clone nor flatten it stays, too.
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
        for mark in vars(tensor).values():  # deepcopy takes them from the memo, and does not fail on uncopyable ones
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


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal bit for bit; NaN equals NaN.

    Objects that are neither numbers, texts, tensors nor containers of these count as equal.
    """
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        ones, others = list(tensors_in(one)), list(tensors_in(other))
        return type(one) is type(other) and len(ones) == len(others) and all(map(_same_bits, ones, others))
    if isinstance(one, PLAIN) or isinstance(other, PLAIN):
        return type(one) is type(other) and repr(one) == repr(other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        # Keys that are parameters differ between an optimizer and its copy.
        ours, theirs = ({k: v for k, v in each.items() if isinstance(k, PLAIN)} for each in (one, other))
        return ours.keys() == theirs.keys() and all(same(ours[k], theirs[k]) for k in ours)
    if isinstance(one, _SEQUENCES) and isinstance(other, _SEQUENCES):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return not isinstance(one, torch.Tensor) and not isinstance(other, torch.Tensor)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = local_of(one).detach(), local_of(other).detach()
    if (one.shape, one.dtype, one.layout, one.device) != (other.shape, other.dtype, other.layout, other.device):
        return False
    if one.layout != torch.strided:
        one, other = one.to_dense(), other.to_dense()
    if one.device.type == "meta":
        return True
    nans = [each != each for each in (one, other)]
    bits = [each.masked_fill(nan, 0).flatten().view(torch.uint8) for each, nan in zip((one, other), nans, strict=True)]
    return torch.equal(*nans) and torch.equal(*bits)
