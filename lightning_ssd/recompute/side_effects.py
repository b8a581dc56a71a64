"""The objects that a call of a module can reach, as it was before the call, and putting that back.

The attributes, parameters, buffers, parts and hooks of the module; lists, dicts, sets, small arrays, what functions
close over and have for defaults, the attributes and slots of objects and classes, and generators of random numbers, as
far as attributes of the module and functions among the arguments lead to them. Contents are compared item by item by
identity; of tensors also the version, the storage, the view of it, the gradient and whether they need one, and their
hooks are put back. A module that leads to what can be changed and not put back (iterators, large arrays, too much) is
said to be ``opaque``.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.modules.module as all_modules
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from lightning_ssd.common.method_patch import MethodPatch
from lightning_ssd.common.restore import Meanwhile
from lightning_ssd.common.rng import RandomStates, shared_sources, source_of
from lightning_ssd.common.tensors import StorageKey, storage_of
from lightning_ssd.recompute.containers import contents_of, is_array, is_same, nbytes_of, put, slots_of

__all__ = ["SideEffectSnapshot", "hooks_of", "restore_hooks"]

_MOST = 4_096
"""So many objects are looked into."""
_MAX_ARRAY_BYTES = 1 << 20
"""Larger arrays are not copied."""
_OF_MODULES = frozenset(nn.Module().__dict__)
_STEADY = frozenset(
    {bool, int, float, complex, str, bytes, type(None), range, slice, property, classmethod, staticmethod}
    | {types.ModuleType, types.GetSetDescriptorType, types.MemberDescriptorType}
    | {weakref.ProxyType, weakref.CallableProxyType}  # whose object may be dead
    | {torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, nn.Parameter}
)
_CONTAINERS = (list, dict, set, deque)
_BOUND = (types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType)
# Threads of theirs may use such objects at any time, and some of them are ours.
_FOREIGN = (
    sys.stdlib_module_names | {"torch", "lightning", "lightning_fabric", "pytorch_lightning", "lightning_ssd"}
) - {"collections"}
_OF_PYTHON = ("builtins", "itertools")


_GLOBAL_HOOKS = [
    value for name, value in vars(all_modules).items() if name.startswith("_global") and isinstance(value, dict)
]


class _Tensor(NamedTuple):
    """A tensor as it was before the call."""

    label: str
    tensor: torch.Tensor
    version: int
    storage: StorageKey | None
    """No other one can have its address as long as this is held; ``None``: it has none."""
    nbytes: int
    """0 also where the bytes wait elsewhere until they are used (FSDP, and weights that we have offloaded)."""
    view: tuple[Any, ...]
    """The part that it shows of its storage."""
    requires_grad: bool
    gradient: weakref.ref[torch.Tensor] | None
    """Not itself: the call may want to free it."""
    gradient_version: int

    @classmethod
    def of(cls, label: str, tensor: torch.Tensor) -> _Tensor:
        storage = _storage_of(tensor)
        nbytes = 0 if storage is None else storage.nbytes()
        key = None if storage is None else StorageKey(storage)
        gradient = _gradient_of(tensor)
        return cls(
            *(label, tensor, tensor._version, key, nbytes, _view_of(tensor), tensor.requires_grad),
            *((None, 0) if gradient is None else (weakref.ref(gradient), _version_of(gradient))),
        )

    def edit(self) -> str | None:
        """Return what the call, which has just ended, has edited in place."""
        if self.tensor._version != self.version:
            return self.label
        gradient = _gradient_of(self.tensor)
        before = None if self.gradient is None else self.gradient()
        if gradient is None and self.gradient is None:
            return None
        if gradient is not before or (gradient is not None and _version_of(gradient) != self.gradient_version):
            return f"the gradient of {self.label}"
        return None

    def change(self) -> str | None:
        """Return what has been done to it since that cannot be undone."""
        if self.tensor._version != self.version:
            return (
                f"{self.label} was modified by an inplace operation: it is at version {self.tensor._version}; "
                f"expected version {self.version} instead"
            )
        storage = _storage_of(self.tensor)
        if storage is None or self.storage is None:
            return None if storage is None and self.storage is None else f"{self.label} was given other data"
        if storage._cdata != self.storage.cdata or _view_of(self.tensor) != self.view:
            return f"{self.label} was given other data"
        is_resized = 0 != storage.nbytes() != self.nbytes != 0
        return f"the memory of {self.label} was resized" if is_resized else None


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        return storage_of(tensor)
    except (NotImplementedError, RuntimeError):
        return None


def _view_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return (tensor.dtype,)
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def _gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor.grad if tensor.is_leaf else None  # asking others for it is warned of


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class SideEffectSnapshot:
    """Holds what lay within reach before one call.

    Args:
        parts: the module and all that are inside of it.
        functions: among the arguments.
    """

    def __init__(self, parts: Sequence[nn.Module], functions: Sequence[types.FunctionType] = ()) -> None:
        self.opaque: str | None = None
        """A thing that may be changed by the call and could not be put back; ``None``: nothing that can be seen."""
        self.is_unmade = False
        """Whether parameters are made by this very call, and hooks and classes of modules changed, as never again."""
        self._places: list[tuple[Any, list[Any]]] = [(hooks, contents_of(hooks)) for hooks in _GLOBAL_HOOKS]
        self._numbers = RandomStates(shared_sources())
        self._tensors: list[_Tensor] = []
        self._seen: set[int] = set()
        self._to_see: deque[tuple[str, Any]] = deque()
        for part in parts:
            self._enter_part(part)
        self._add("a function among the arguments", functions)
        while self._to_see and self.opaque is None:
            self._look(*self._to_see.popleft())
        self._to_see.clear()
        self._seen.clear()

    def _enter_part(self, part: nn.Module) -> None:
        kind = type(part)
        self._places.append((part, contents_of(part)))
        for name, value in part.__dict__.items():
            if type(value) in _STEADY:
                continue
            if name not in _OF_MODULES:
                self._to_see.append((f"{kind.__name__}.{name}", value))
            elif isinstance(value, dict):
                self._places.append((value, contents_of(value)))
        self.is_unmade |= isinstance(part, LazyModuleMixin) and "_initialize_hook" in part.__dict__
        self._tensors += [
            _Tensor.of(f"{kind.__name__}.{name}", weight)
            for name, weight in part._parameters.items()
            if weight is not None and not isinstance(weight, nn.UninitializedParameter) and not weight.is_inference()
        ]
        for base in kind.__mro__:
            if id(base) not in self._seen and not _is_foreign(base):
                self._enter_class(base)

    def _enter_class(self, kind: type) -> None:
        self._seen.add(id(kind))
        contents = contents_of(kind)
        self._places.append((kind, contents))
        for item in contents:
            function = item.__func__ if isinstance(item, staticmethod | classmethod) else item
            if isinstance(function, types.FunctionType):  # no data, unless there is more to it than code
                if function.__closure__ or function.__defaults__ or function.__kwdefaults__ or function.__dict__:
                    self._to_see.append((f"{kind.__name__}.{function.__name__}", function))
            elif type(item) not in _STEADY:
                self._to_see.append((kind.__name__, item))

    def _add(self, label: str, values: Iterable[Any]) -> None:
        self._to_see.extend((label, value) for value in values if type(value) not in _STEADY)

    def _look(self, label: str, value: Any) -> None:
        kind = type(value)
        if kind in _STEADY or id(value) in self._seen or isinstance(value, nn.Module | type | MethodPatch):
            return
        self._seen.add(id(value))
        if len(self._seen) > _MOST:
            self.opaque = f"more than {_MOST} objects lie within its reach"
        elif isinstance(value, torch.Tensor):
            if not value.is_inference():
                self._tensors.append(_Tensor.of(label, value))
        elif (source := source_of(value)) is not None:
            self._numbers.add(source)
        elif isinstance(value, types.FunctionType):
            self._look_at_function(value, label)
        elif isinstance(value, _BOUND):
            self._add(label, (value.__self__, getattr(value, "__func__", None)))
        elif isinstance(value, partial):
            self._add(label, (value.func, value.args, value.keywords, value.__dict__))
        elif is_array(value):
            self._enter_array(value, label)
        elif kind.__module__ in _OF_PYTHON and hasattr(kind, "__next__"):
            if getattr(value, "gi_frame", value) is not None:  # else it is a generator that has come to its end
                self.opaque = f"{label} leads to a {kind.__name__}, which cannot be put back"
        else:
            self._look_into(value, label)

    def _look_into(self, value: Any, label: str) -> None:
        kind = type(value)
        if isinstance(value, tuple | frozenset):
            self._add(label, value)
        elif isinstance(value, _CONTAINERS):
            self._enter(value, label)
        if kind is not types.SimpleNamespace and _is_foreign(kind):
            return
        if type(attributes := _attributes(value)) is dict:
            self._enter(attributes, label)
        slots = slots_of(value)
        if slots is not None:
            self._enter(slots, label)

    def _look_at_function(self, function: types.FunctionType, label: str) -> None:
        for cell in function.__closure__ or ():
            if id(cell) not in self._seen:
                self._seen.add(id(cell))
                self._enter(cell, f"what {label} closes over")
        self._add(label, (function.__defaults__, function.__kwdefaults__))
        self._enter(function.__dict__, label)

    def _enter_array(self, value: Any, label: str) -> None:
        nbytes = nbytes_of(value)
        if nbytes is None or nbytes > _MAX_ARRAY_BYTES:
            self.opaque = f"{label} leads to a {type(value).__name__} that is too large to be copied, or holds objects"
        else:
            self._places.append((value, contents_of(value)))

    def _enter(self, place: Any, label: str) -> None:
        contents = contents_of(place)
        self._places.append((place, contents))
        if not _STEADY.issuperset(map(type, contents)):
            self._add(label, contents)

    @property
    def addresses(self) -> frozenset[int]:
        """Return the addresses of the storages of all tensors within reach."""
        return frozenset(seen.storage.cdata for seen in self._tensors if seen.storage is not None)

    def watch_over(self, label: str, tensor: torch.Tensor) -> None:
        """One more tensor, as it is now."""
        self._tensors.append(_Tensor.of(label, tensor))

    def settle(self) -> str | None:
        """After the call. Returns a tensor, neither buffer nor argument, that it has edited in place."""
        self._numbers.forget_unused()
        return next(filter(None, (seen.edit() for seen in self._tensors)), None)

    def change(self) -> str | None:
        """Return what has been done since that :meth:`as_before` cannot undo; ``None``: nothing that can be seen."""
        return next(filter(None, (seen.change() for seen in self._tensors)), None)

    def probes(self) -> list[tuple[str, weakref.ref[torch.Tensor], int]]:
        """Label, tensor and version, for who asks for edits only and is to keep nothing alive."""
        return [(seen.label, weakref.ref(seen.tensor), seen.version) for seen in self._tensors]

    def as_before(self) -> Meanwhile:
        """While it is entered all is as it was before the call; then as it was when this was called."""
        places = [(place, contents_of(place)) for place, _ in self._places]
        numbers = self._numbers.now()
        frozen = [(seen.tensor, seen.requires_grad) for seen in self._tensors if _is_unlike(seen)]
        hooks = [(seen.tensor, hooks_of(seen.tensor)) for seen in self._tensors]

        def enter() -> None:
            _restore(self._places, self._numbers)
            for tensor, flag in frozen:
                tensor.requires_grad_(flag)

        def leave() -> None:
            for tensor, flag in frozen:
                tensor.requires_grad_(not flag)
            for tensor, contents in hooks:
                restore_hooks(tensor, contents)
            _restore(places, numbers)

        return Meanwhile(enter, leave)


def _is_unlike(seen: _Tensor) -> bool:
    return seen.tensor.requires_grad != seen.requires_grad and seen.tensor.is_leaf


def _restore(places: list[tuple[Any, list[Any]]], numbers: RandomStates) -> None:
    for place, contents in places:
        if not is_same(contents_of(place), contents):
            put(place, contents)
    numbers.restore()


def hooks_of(tensor: torch.Tensor) -> list[list[Any]]:
    """Return what is registered with a tensor, to be given to :func:`restore_hooks`."""
    return [contents_of(hooks) for hooks in _hooks_of(tensor)]


def restore_hooks(tensor: torch.Tensor, contents: list[list[Any]]) -> None:
    """Take away those that have come meanwhile: a forward that registers some runs a second time."""
    for hooks, before in zip(_hooks_of(tensor), contents, strict=True):
        if not is_same(contents_of(hooks), before):
            put(hooks, before)


def _hooks_of(tensor: torch.Tensor) -> list[dict[int, Any]]:
    found = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    return [{} if hooks is None else hooks for hooks in found]


def _attributes(value: object) -> Any:
    try:
        return getattr(value, "__dict__", None)
    except Exception:  # a class that answers for others' attributes, and cannot
        return None


def _is_foreign(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _FOREIGN
