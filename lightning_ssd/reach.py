"""What a call of a module can reach, as it was before the call, and putting that back.

The attributes, parameters, buffers, parts and hooks of the module; lists, dicts, sets, what functions close over, the
attributes of objects and classes, and generators of random numbers, as far as attributes of the module and functions
among the arguments lead to them. Contents are compared item by item by identity; of tensors also the version, the
storage and whether they need a gradient.
"""

from __future__ import annotations

import operator
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.modules.module as all_modules
from torch import nn

from lightning_ssd.generators import RandomStates, shared_sources, source_of
from lightning_ssd.stand_in import StandIn

__all__ = ["Reach"]

_DEPTH = 4
"""So many steps from an attribute. What lies deeper is seen by its effect only, see ``fingerprint.py``."""
_MANY = 256
"""Containers of more items are compared, but their items are not looked into: vocabularies, data."""
_OF_MODULES = frozenset(nn.Module().__dict__)
_STEADY = frozenset(
    {bool, int, float, complex, str, bytes, type(None), range, slice, property, classmethod, staticmethod}
    | {types.BuiltinFunctionType, types.MethodType, types.ModuleType, types.GetSetDescriptorType}
    | {weakref.ProxyType, weakref.CallableProxyType}  # whose object may be dead
    | {torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, nn.Parameter}
)
_CONTAINERS = (list, dict, set, deque)
# Threads of theirs may use such objects at any time, and some of them are ours.
_FOREIGN = sys.stdlib_module_names | {"torch", "lightning", "lightning_fabric", "pytorch_lightning", "lightning_ssd"}


_GLOBAL_HOOKS = [
    value for name, value in vars(all_modules).items() if name.startswith("_global") and isinstance(value, dict)
]


class _Tensor(NamedTuple):
    """A tensor as it was before the call."""

    label: str
    tensor: torch.Tensor
    version: int
    storage: torch.UntypedStorage | None
    """Itself, so that no other one can have its address; ``None``: it has none."""
    nbytes: int
    requires_grad: bool

    @classmethod
    def of(cls, label: str, tensor: torch.Tensor) -> _Tensor:
        storage = _storage_of(tensor)
        return cls(label, tensor, tensor._version, storage, storage.nbytes() if storage else 0, tensor.requires_grad)

    def change(self) -> str | None:
        """What has been done to it since that cannot be undone."""
        if self.tensor._version != self.version:
            return (
                f"{self.label} was modified by an inplace operation: it is at version {self.tensor._version}; "
                f"expected version {self.version} instead"
            )
        storage = _storage_of(self.tensor)
        if storage is None or self.storage is None:
            return None if storage is self.storage else f"{self.label} was given other data"
        if storage._cdata != self.storage._cdata:
            return f"{self.label} was given other data"
        return None if storage.nbytes() == self.nbytes else f"the memory of {self.label} was resized"


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


class Reach:
    """What lay within reach before one call.

    Args:
        parts: the module and all that are inside of it.
        functions: among the arguments.
    """

    def __init__(self, parts: Sequence[nn.Module], functions: Sequence[types.FunctionType] = ()) -> None:
        self._places: list[tuple[Any, list[Any]]] = [(hooks, _contents(hooks)) for hooks in _GLOBAL_HOOKS]
        self._numbers = RandomStates(shared_sources())
        self._tensors: list[_Tensor] = []
        seen: set[int] = set()
        for part in parts:
            self._enter_part(part, seen)
        for function in functions:
            self._look(function, "a function among the arguments", seen, _DEPTH)

    def _enter_part(self, part: nn.Module, seen: set[int]) -> None:
        kind = type(part)
        attributes = part.__dict__
        self._places.append((part, _contents(part)))
        for name, value in attributes.items():
            if type(value) in _STEADY:
                continue
            if name not in _OF_MODULES:
                self._look(value, f"{kind.__name__}.{name}", seen, _DEPTH)
            elif isinstance(value, dict):
                self._places.append((value, _contents(value)))
        self._tensors += [
            _Tensor.of(f"{kind.__name__}.{name}", weight)
            for name, weight in part._parameters.items()
            if weight is not None and not isinstance(weight, nn.UninitializedParameter) and not weight.is_inference()
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
                self._tensors.append(_Tensor.of(label, value))
        elif (source := source_of(value)) is not None:
            seen.add(id(value))
            self._numbers.add(source)
        elif isinstance(value, _CONTAINERS):
            self._enter(value, label, seen, depth)
        elif isinstance(value, tuple):
            for item in value if depth else ():
                self._look(item, label, seen, depth - 1)
        elif isinstance(value, types.FunctionType):
            for cell in value.__closure__ or ():
                if id(cell) not in seen:
                    self._enter(cell, f"what {label} closes over", seen, depth)
        elif type(attributes := _attributes(value)) is dict and (
            type(value) is types.SimpleNamespace or not _is_foreign(type(value))
        ):
            self._enter(attributes, label, seen, depth)

    def _enter(self, place: Any, label: str, seen: set[int], depth: int) -> None:
        seen.add(id(place))
        contents = _contents(place)
        self._places.append((place, contents))
        if depth and len(contents) <= _MANY:
            is_class = isinstance(place, type)  # its methods are not data
            for item in contents:
                if type(item) not in _STEADY and not (is_class and isinstance(item, types.FunctionType)):
                    self._look(item, label, seen, depth - 1)

    @property
    def addresses(self) -> frozenset[int]:
        """Of the storages of all tensors within reach."""
        return frozenset(seen.storage._cdata for seen in self._tensors if seen.storage is not None)

    def watch_over(self, label: str, tensor: torch.Tensor) -> None:
        """One more tensor, as it is now."""
        self._tensors.append(_Tensor.of(label, tensor))

    def settle(self) -> str | None:
        """After the call. Returns a tensor, neither buffer nor argument, that it has edited in place."""
        self._numbers.forget_unused()
        return next((seen.label for seen in self._tensors if seen.tensor._version != seen.version), None)

    def change(self) -> str | None:
        """What has been done since that :meth:`as_before` cannot undo; ``None``: nothing that can be seen."""
        return next(filter(None, (seen.change() for seen in self._tensors)), None)

    def probes(self) -> list[tuple[str, weakref.ref[torch.Tensor], int]]:
        """Label, tensor and version, for who asks for edits only and is to keep nothing alive."""
        return [(seen.label, weakref.ref(seen.tensor), seen.version) for seen in self._tensors]

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """While it is entered all is as it was before the call; then as it was when it was entered."""
        places = [(place, _contents(place)) for place, _ in self._places]
        numbers = self._numbers.now()
        frozen = [(seen.tensor, seen.requires_grad) for seen in self._tensors if _is_unlike(seen)]
        try:
            _restore(self._places, self._numbers)
            for tensor, flag in frozen:
                tensor.requires_grad_(flag)
            yield
        finally:
            for tensor, flag in frozen:
                tensor.requires_grad_(not flag)
            _restore(places, numbers)


def _is_unlike(seen: _Tensor) -> bool:
    return seen.tensor.requires_grad != seen.requires_grad and seen.tensor.is_leaf


def _restore(places: list[tuple[Any, list[Any]]], numbers: RandomStates) -> None:
    for place, contents in places:
        if not _is_same(_contents(place), contents):
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
    if isinstance(place, dict):
        return [*place.keys(), *place.values()] if place else []
    if isinstance(place, nn.Module):
        return _contents(place.__dict__)
    if isinstance(place, type):
        return [*vars(place), *vars(place).values()]
    if isinstance(place, types.CellType):
        try:
            return [place.cell_contents]
        except ValueError:  # nothing is in it yet
            return []
    return list(place)


def _is_same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _put(place: Any, contents: list[Any]) -> None:
    middle = len(contents) // 2
    if isinstance(place, type | nn.Module):
        _put_attributes(place, dict(zip(contents[:middle], contents[middle:], strict=True)))
    elif isinstance(place, dict):
        kind = OrderedDict if isinstance(place, OrderedDict) else dict  # classes of their own may refuse
        if not _is_same(list(place), contents[:middle]):
            kind.clear(place)
        for key, value in zip(contents[:middle], contents[middle:], strict=True):
            kind.__setitem__(place, key, value)
    elif isinstance(place, types.CellType):
        if contents:
            place.cell_contents = contents[0]
        else:
            del place.cell_contents
    else:
        place.clear()
        (place.update if isinstance(place, set) else place.extend)(contents)


def _put_attributes(place: Any, wanted: dict[str, Any]) -> None:
    """One by one: a module, or a class, that loses all of them for a moment may lose them for good by Ctrl-C."""
    now = dict(vars(place))
    for name in [*(now.keys() - wanted.keys()), *wanted]:
        old, new = now.get(name, _ABSENT), wanted.get(name, _ABSENT)
        if old is new or issubclass(type(old), StandIn) or issubclass(type(new), StandIn):
            continue  # our own stand-ins come and go as they please
        if isinstance(place, nn.Module):  # past setters that a module may have of its own
            if new is _ABSENT:
                del place.__dict__[name]
            else:
                place.__dict__[name] = new
        elif new is _ABSENT:
            delattr(place, name)
        else:
            setattr(place, name, new)


_ABSENT = object()
