"""What a call of a module can reach and change besides its buffers and attributes, and putting that back.

Lists, dicts, sets, the attributes of objects and classes, and generators of random numbers, as far as attributes of
the module lead to them. Contents are compared item by item by identity, before a call and after it.
"""

from __future__ import annotations

import operator
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_ssd.generators import RandomStates, shared_sources, source_of
from lightning_ssd.stand_in import StandIn

__all__ = ["Reach"]

_DEPTH = 4
"""So many steps from an attribute. What lies deeper is changed once more by each repetition."""
_MANY = 256
"""Containers of more items are compared, but their items are not looked into: vocabularies, data."""
_OF_MODULES = frozenset(nn.Module().__dict__)
_STEADY = frozenset(
    {bool, int, float, complex, str, bytes, type(None), range, slice, property, classmethod, staticmethod}
    | {types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, types.GetSetDescriptorType}
    | {weakref.ProxyType, weakref.CallableProxyType}  # whose object may be dead
    | {torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, nn.Parameter}
)
_CONTAINERS = (list, dict, set, deque)
# Threads of theirs may use such objects at any time, and some of them are ours.
_FOREIGN = sys.stdlib_module_names | {"torch", "lightning", "lightning_fabric", "pytorch_lightning", "lightning_ssd"}


class Reach:
    """What lay within reach before one call, as far as the call has changed it.

    Args:
        parts: the module and all that are inside of it.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self.edited: str | None = None
        """After :meth:`settle`: a tensor, neither buffer nor argument, that the call has edited in place."""
        self._places: list[tuple[Any, list[Any]]] = []
        self._numbers = RandomStates(shared_sources())
        self._tensors: list[tuple[str, torch.Tensor, int]] = []
        seen: set[int] = set()
        for part in parts:
            kind = type(part)
            for name, value in part.__dict__.items():
                if type(value) not in _STEADY and name not in _OF_MODULES:
                    self._look(value, f"{kind.__name__}.{name}", seen, _DEPTH)
            self._tensors += [
                (f"{kind.__name__}.{name}", weight, weight._version)
                for name, weight in part._parameters.items()
                if weight is not None
                and not isinstance(weight, nn.UninitializedParameter)
                and not weight.is_inference()
            ]
            for base in kind.__mro__:
                if id(base) not in seen and not _is_foreign(base):
                    self._enter(base, base.__name__, seen, _DEPTH)

    def _look(self, value: Any, label: str, seen: set[int], depth: int) -> None:
        if type(value) in _STEADY or id(value) in seen or isinstance(value, nn.Module | type | StandIn):
            return
        if isinstance(value, torch.Tensor):
            seen.add(id(value))
            if not value.is_inference():
                self._tensors.append((label, value, value._version))
        elif (source := source_of(value)) is not None:
            seen.add(id(value))
            self._numbers.add(source)
        elif isinstance(value, _CONTAINERS):
            self._enter(value, label, seen, depth)
        elif isinstance(value, tuple):
            for item in value if depth else ():
                self._look(item, label, seen, depth - 1)
        elif type(attributes := _attributes(value)) is dict and (
            type(value) is types.SimpleNamespace or not _is_foreign(type(value))
        ):
            self._enter(attributes, label, seen, depth)

    def _enter(self, place: Any, label: str, seen: set[int], depth: int) -> None:
        seen.add(id(place))
        contents = _contents(place)
        self._places.append((place, contents))
        if depth and len(contents) <= _MANY:
            for item in contents:
                if type(item) not in _STEADY:
                    self._look(item, label, seen, depth - 1)

    def settle(self) -> list[Any]:
        """After the call: keep what is needed to repeat it. Returns the containers that the call has changed."""
        self._places = [(place, before) for place, before in self._places if not _is_same(_contents(place), before)]
        self._numbers.forget_unused()
        self.edited = next((label for label, tensor, version in self._tensors if tensor._version != version), None)
        self._tensors.clear()
        return [place for place, _ in self._places]

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """While it is entered all is as it was before the call; then as it was when it was entered."""
        places = [(place, _contents(place)) for place, _ in self._places]
        numbers = self._numbers.now()
        try:
            _restore(self._places, self._numbers)
            yield
        finally:
            _restore(places, numbers)


def _restore(places: list[tuple[Any, list[Any]]], numbers: RandomStates) -> None:
    for place, contents in places:
        _put(place, contents)
    numbers.restore()


def _attributes(value: object) -> Any:
    try:
        return getattr(value, "__dict__", None)
    except Exception:  # a class that answers for others' attributes, and cannot
        return None


def _is_foreign(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _FOREIGN


def _contents(place: Any) -> list[Any]:
    """Of what has keys: first all keys, then all values."""
    if isinstance(place, type):
        return [*vars(place), *vars(place).values()]
    return [*place.keys(), *place.values()] if isinstance(place, dict) else list(place)


def _is_same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _put(place: Any, contents: list[Any]) -> None:
    middle = len(contents) // 2
    if isinstance(place, type):
        wanted = dict(zip(contents[:middle], contents[middle:], strict=True))
        now = dict(vars(place))
        for name in now.keys() - wanted.keys():
            delattr(place, name)
        for name, value in wanted.items():
            if name not in now or now[name] is not value:
                setattr(place, name, value)
    elif isinstance(place, dict):
        kind = OrderedDict if isinstance(place, OrderedDict) else dict  # classes of their own may refuse
        if not _is_same(list(place), contents[:middle]):
            kind.clear(place)
        for key, value in zip(contents[:middle], contents[middle:], strict=True):
            kind.__setitem__(place, key, value)
    else:
        place.clear()
        (place.update if isinstance(place, set) else place.extend)(contents)
