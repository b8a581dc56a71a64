"""The state of a block's modules before one call, which is put back while the call is repeated.

Put back are random numbers (PyTorch's, Python's, NumPy's, and generators among the attributes), the buffers, and the
attributes of the modules. Containers among these, also nested ones, get their contents of before, in place.

What else the modules hold is compared after the call: a tensor, an object, or an attribute of a class that the call
has changed cannot be put back, and the call is not repeated. Nor is it where a change could not be seen.
"""

from __future__ import annotations

import array
import contextvars
import enum
import functools
import logging
import re
import sys
import threading
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from lightning_ssd.common.interrupts import run_between
from lightning_ssd.common.method_patch import MethodPatch
from lightning_ssd.common.rng import RandomStates, default_sources, shared_sources, source_of
from lightning_ssd.common.tensors import StorageKey, storage_of
from lightning_ssd.recompute.fingerprint import differs

__all__ = ["CallState", "hooks_of", "restore_hooks"]

T = TypeVar("T")

_SMALL_BYTES = 64 << 10
_MAX_VALUES = 20_000
"""No more values are looked at in each call."""
_DICTS = frozenset({dict, OrderedDict, defaultdict, Counter})
_LISTS = frozenset({list, set, deque, tuple, frozenset})
_RAW = frozenset({bytearray, array.array})
_BUILTINS = (dict, list, set, deque, tuple, frozenset)
"""Whose contents are seen in derived classes, too."""
_HEAP_TYPE = 1 << 9
"""The flag of classes that are written in Python, among others."""
_STEADY = frozenset(
    {bool, int, float, complex, str, bytes, range, slice, type(None), type(Ellipsis), type(NotImplemented), re.Pattern}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
)
"""Their values never change."""
_OUTSIDE = frozenset(
    {
        type,
        types.FunctionType,
        types.BuiltinFunctionType,
        types.ModuleType,
        types.MethodWrapperType,
        contextvars.ContextVar,
    }
    | {weakref.ReferenceType, weakref.ProxyType, weakref.CallableProxyType, property, staticmethod, classmethod}
    | {types.GetSetDescriptorType, types.MemberDescriptorType, types.MappingProxyType, functools.cached_property}
    | {logging.Logger, type(threading.Lock()), type(threading.RLock()), functools._lru_cache_wrapper}
)
"""They refer to what no module owns, see ``docs/compatibility.md``."""
_FOREIGN = ("torch._", "torch.distributed.", "torch.fx.", "triton.", "lightning_ssd.")
"""Packages whose objects have caches that a forward fills."""


class _Tensor(NamedTuple):
    """A tensor as it was before the call."""

    label: str
    tensor: torch.Tensor
    version: int
    storage: StorageKey | None
    """Held, so that no other storage gets its address; ``None``: the tensor has none."""
    nbytes: int
    """0 also where the bytes are elsewhere until they are used (FSDP, offloaded weights)."""
    view: tuple[Any, ...]
    """Which part of the storage the tensor shows."""
    gradient: weakref.ref[torch.Tensor] | None
    """Weak: the call may free it."""
    gradient_version: int
    copy: torch.Tensor | None
    """The bytes, where the call may edit them past autograd."""

    @classmethod
    def of(cls, label: str, tensor: torch.Tensor, *, with_copy: bool = False) -> _Tensor:
        storage, gradient = _storage_of(tensor), _gradient_of(tensor)
        return cls(
            label,
            tensor,
            tensor._version,
            storage=None if storage is None else StorageKey(storage),
            nbytes=0 if storage is None else storage.nbytes(),
            view=_view_of(tensor),
            gradient=None if gradient is None else weakref.ref(gradient),
            gradient_version=0 if gradient is None else _version_of(gradient),
            copy=tensor.detach().clone() if with_copy else None,
        )

    def edit(self) -> str | None:
        """Return what the call, which has just ended, has edited in place."""
        if self.tensor._version != self.version:
            return self.label
        gradient, before = _gradient_of(self.tensor), None if self.gradient is None else self.gradient()
        if gradient is None and self.gradient is None:
            return None
        is_same = gradient is before and (gradient is None or _version_of(gradient) == self.gradient_version)
        return None if is_same else f"the gradient of {self.label}"

    def change(self) -> str | None:
        """Return what was done to the tensor since the call."""
        if self.tensor._version != self.version:
            return (
                f"{self.label} was modified by an inplace operation: it is at version {self.tensor._version}; "
                f"expected version {self.version} instead"
            )
        storage, before = _storage_of(self.tensor), self.storage
        if storage is None and before is None:
            return None
        if storage is None or before is None or storage._cdata != before.cdata or _view_of(self.tensor) != self.view:
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
    return tensor.grad if tensor.is_leaf else None  # PyTorch warns where others are asked for it


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class _Contents(NamedTuple):
    """What a container, or an object, held at some time."""

    label: str
    value: Any
    before: Any
    is_ours: bool
    """Whether it can be put back."""

    def is_same(self) -> bool:
        """Tell whether it holds the same."""
        now, before = _contents(self.value), self.before
        if now is before:
            return True
        if isinstance(now, tuple):
            return len(now) == len(before) and all(map(_is, now, before))
        if type(now) in _RAW:
            return bytes(now) == bytes(before)
        return bool(now.shape == before.shape and now.tobytes() == before.tobytes())


def _contents(value: Any) -> Any:
    """Copy what a container holds, or the attributes of an object, or of a class."""
    kind = type(value)
    if kind in _DICTS:
        return (*value.keys(), *value.values()) if value else ()
    if kind in _LISTS:
        return tuple(value)
    if kind in _RAW:
        return value[:]
    if _is_array(kind):
        return value.copy()
    if issubclass(kind, type):
        return tuple(item for name, item in vars(value).items() if not name.startswith("__"))
    contents: list[Any] = []
    for base in _BUILTINS:
        if issubclass(kind, base):
            contents += base.__iter__(value)
            contents += dict.values(value) if issubclass(kind, dict) else ()
            break
    return (*contents, *_attributes(value))


def _attributes(value: Any) -> Iterator[Any]:
    """Yield names and values of the attributes of an object, past its own methods."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        own = {}
    yield from own.keys()
    yield from own.values()
    for kind in type(value).__mro__:
        for descriptor in vars(kind).values():
            if type(descriptor) is types.MemberDescriptorType:
                try:
                    yield descriptor.__get__(value)
                except AttributeError:
                    yield None


def _is(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and type(one) in (int, str) and one == other)


def _is_steady(kind: type) -> bool:
    """Tell whether NumPy's objects of a class never change."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, numpy.generic | numpy.dtype | numpy.ufunc)


def _is_array(kind: type) -> bool:
    return kind.__module__ == "numpy" and kind.__name__ == "ndarray"


def _put(value: Any, contents: Any) -> None:
    """Make a container hold what it held."""
    kind = type(value)
    if kind in _DICTS:
        value.clear()
        middle = len(contents) // 2
        for key, item in zip(contents[:middle], contents[middle:], strict=True):
            value[key] = item
    elif kind is list or kind in _RAW:
        value[:] = contents
    elif kind is set or kind is deque:
        value.clear()
        (value.update if kind is set else value.extend)(contents)
    else:
        if value.shape != contents.shape:
            value.resize(contents.shape, refcheck=False)
        value[...] = contents


def _is_of_python(kind: type) -> bool:
    """Tell whether all that an object of a class holds is in its attributes, and in what builtin containers hold."""
    return all(
        base in (object, types.SimpleNamespace, *_BUILTINS, *_DICTS)
        or (bool(base.__flags__ & _HEAP_TYPE) and not isinstance(vars(base).get("__new__"), types.BuiltinFunctionType))
        for base in kind.__mro__
    )


def _hook_inside(module: nn.Module) -> str | None:
    """Return which hook would run twice: of users, not of PyTorch's own ``spectral_norm``, say."""
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        named = getattr(hook, "func", hook)
        if isinstance(named, types.MethodType | types.FunctionType):
            owner, name = named.__module__, named.__qualname__
        else:
            owner, name = type(named).__module__, type(named).__qualname__
        if not str(owner).startswith("torch."):
            return f"the hook {name} of a {type(module).__name__} in it would run again; register it with the block"
    return None


class _Part(NamedTuple):
    """One module as it was before the call."""

    module: nn.Module
    attributes: dict[str, Any]
    buffers: dict[str, tuple[torch.Tensor, int, torch.Tensor]]
    """With version and a copy."""

    @classmethod
    def of(cls, module: nn.Module) -> _Part:
        # Stand-ins of ours come and go as they please.
        attributes = {n: value for n, value in vars(module).items() if not issubclass(type(value), MethodPatch)}
        buffers = {
            name: (buffer, buffer._version, buffer.detach().clone())
            for name, buffer in module._buffers.items()
            if buffer is not None and not isinstance(buffer, nn.UninitializedBuffer)
        }
        return cls(module, attributes, buffers)

    def is_edited(self, name: str) -> bool | torch.Tensor:
        """Tell whether the call has edited a buffer. Edits through ``data``, NumPy and ``batch_norm`` raise no version.

        A tensor: not known yet, so that the device is not waited for in forward. What is small is put back anyway.
        """
        buffer, version, copy = self.buffers[name]
        if buffer._version != version:
            return True
        if buffer.device.type == "cpu":
            return bool(differs(buffer, copy))
        return copy.nbytes <= _SMALL_BYTES or differs(buffer, copy)

    def as_before(self) -> None:
        """Give the module its attributes of before, and buffers that a repetition may edit."""
        state = dict(self.attributes)
        state.update((name, v) for name, v in vars(self.module).items() if issubclass(type(v), MethodPatch))
        for name, (_, _, copy) in self.buffers.items():
            state["_buffers"][name] = copy.clone()  # the call may be repeated again
        object.__setattr__(self.module, "__dict__", state)


class CallState:
    """The state before one call.

    Args:
        modules: the one that is called, and then those among its arguments.
        devices: whose random numbers the call may draw.

    Attributes:
        is_unmade: the call makes parameters, and changes hooks and classes of modules, as no later one will.
        opaque: why the call cannot be repeated; ``None``: nothing is known against it.
    """

    def __init__(self, modules: Sequence[nn.Module], devices: Iterable[torch.device] = ()) -> None:
        self.opaque: str | None = None
        self._parts: list[_Part] = []
        self._contents: list[_Contents] = []
        self._context = contextvars.copy_context()
        self._numbers = RandomStates([*shared_sources(), *default_sources(devices)])
        self._tensors: list[_Tensor] = []
        self._unknown: list[tuple[str, torch.Tensor]] = []
        """Tensors that the call may have edited, which their devices will know."""
        self._seen: set[int] = set()
        self._roots = modules
        if nn.modules.module._global_forward_hooks or nn.modules.module._global_forward_pre_hooks:
            self.opaque = "a forward hook of all modules would run again"
        for module in modules:
            self._add_module(module)
        self.is_unmade = any(
            isinstance(part.module, LazyModuleMixin) and "_initialize_hook" in part.attributes for part in self._parts
        )
        self._seen.clear()

    def _add_module(self, module: nn.Module) -> None:
        parts = [_Part.of(part) for part in module.modules() if id(part) not in self._seen]
        self._seen.update(id(part.module) for part in parts)
        self._parts += parts
        for part in parts:
            kind = type(part.module)
            if part.module is not self._roots[0]:
                self.opaque = self.opaque or _hook_inside(part.module)
            for name, value in part.attributes.items():
                if type(value) in _STEADY:
                    continue
                if name == "_parameters":
                    for key, parameter in value.items():
                        self._add(f"{kind.__name__}.{key}", parameter)
                if name in ("_parameters", "_buffers", "_modules"):
                    self._hold(f"{kind.__name__}.{name}", value)
                else:
                    self._add(f"{kind.__name__}.{name}", value)
            self._add_classes(kind)

    def _add_classes(self, kind: type) -> None:
        for base in kind.__mro__:
            if id(base) in self._seen or base.__module__ == "builtins" or base.__module__.startswith("torch."):
                continue
            self._hold(f"the class {base.__name__}", base, is_ours=False)
            for name, value in vars(base).items():
                of = type(value)
                if of in _STEADY or of in _OUTSIDE or name.startswith("__"):
                    continue
                if _is_array(of) or _is_of_python(of) or source_of(value) is not None:
                    self._add(f"{base.__name__}.{name}", value)

    def _hold(self, label: str, value: Any, *, is_ours: bool = True) -> Any:
        self._seen.add(id(value))
        contents = _contents(value)
        self._contents.append(_Contents(label, value, contents, is_ours))
        return contents

    def _add(self, label: str, root: Any) -> None:
        """Look at what an attribute holds, and at what that holds."""
        values = [root]
        while values:
            value = values.pop()
            kind = type(value)
            if kind in _STEADY or kind in _OUTSIDE or id(value) in self._seen or issubclass(kind, enum.Enum | type):
                continue
            if len(self._seen) + len(values) > _MAX_VALUES:
                self.opaque = self.opaque or f"{label} holds more than {_MAX_VALUES:,} values"
                return
            if kind in _DICTS or kind in _LISTS:
                values += self._hold(label, value)
            elif issubclass(kind, torch.Tensor):
                self._seen.add(id(value))
                self._add_tensor(label, value)
            elif issubclass(kind, nn.Module):
                if not any(root in value.modules() for root in self._roots):
                    self._add_module(value)  # hidden in a list, say, so that it is no child
            elif (source := source_of(value)) is not None:
                self._seen.add(id(value))
                self._numbers.add(source)
            elif kind in _RAW:
                self._hold(label, value)
            elif kind is types.MethodType:
                values.append(value.__self__)
            elif kind is functools.partial:
                values += (value.func, *value.args, *value.keywords.values())
            elif _is_array(kind):
                self._hold(label, value, is_ours=bool(value.flags.writeable))
                values += value.ravel().tolist() if value.dtype.hasobject else ()
            elif kind.__module__.startswith(_FOREIGN) or _is_steady(kind):
                continue
            elif _is_of_python(kind):
                values += self._hold(label, value, is_ours=False)
                self._add_classes(kind)
            elif not kind.__module__.startswith("torch."):
                self.opaque = self.opaque or f"{label} holds a {kind.__name__}, of which a change could not be seen"

    def _add_tensor(self, label: str, tensor: torch.Tensor) -> None:
        if isinstance(tensor, nn.UninitializedParameter) or tensor.is_inference():
            return
        is_watched = isinstance(tensor, nn.Parameter) or any(
            tensor is buffer for part in self._parts for buffer, _, _ in part.buffers.values()
        )
        self._tensors.append(_Tensor.of(label, tensor, with_copy=not is_watched))

    @property
    def addresses(self) -> frozenset[int]:
        """Of the storages whose identity and version are compared."""
        return frozenset(seen.storage.cdata for seen in self._tensors if seen.storage is not None)

    def settle(self) -> str | None:
        """Keep what a repetition needs, after the call. Returns what was changed and cannot be put back."""
        edited = next((held.label for held in self._contents if not held.is_ours and not held.is_same()), None)
        self._contents = [held for held in self._contents if held.is_ours]
        edited = edited or next(filter(None, (seen.edit() for seen in self._tensors)), None)
        for index, seen in enumerate(self._tensors):
            if seen.copy is not None:
                is_edited = differs(seen.tensor, seen.copy)
                if not isinstance(is_edited, torch.Tensor) or is_edited.device.type == "cpu":
                    edited = edited or (seen.label if is_edited else None)
                else:
                    self._unknown.append((seen.label, is_edited))
                self._tensors[index] = seen._replace(copy=None)
        for part in self._parts:
            for name in list(part.buffers):
                is_edited = part.is_edited(name)
                if is_edited is True:
                    continue
                label, (buffer, _, _) = f"{type(part.module).__name__}.{name}", part.buffers.pop(name)
                self._tensors.append(_Tensor.of(label, buffer))
                if isinstance(is_edited, torch.Tensor):
                    self._unknown.append((label, is_edited))
        self._numbers.forget_unused()
        return edited

    def change(self) -> str | None:
        """Return what was done to a tensor since the call and cannot be undone; ``None``: nothing that is seen."""
        unseen = (
            f"{label} was edited past autograd, by the forward" for label, is_edited in self._unknown if is_edited
        )
        return next(unseen, None) or next(filter(None, (seen.change() for seen in self._tensors)), None)

    def probes(self) -> list[tuple[str, weakref.ref[torch.Tensor], int]]:
        """Return label, tensor and version of each tensor, for a caller that may keep nothing alive."""
        return [(seen.label, weakref.ref(seen.tensor), seen.version) for seen in self._tensors]

    def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function while all is as it was before the call. Afterwards all is as it was, Ctrl-C or not."""
        attributes = [(part.module, vars(part.module)) for part in self._parts]
        contents = [held._replace(before=_contents(held.value)) for held in self._contents]
        hooks = [(seen.tensor, hooks_of(seen.tensor)) for seen in self._tensors]
        buffers = [(buffer, buffer.detach().clone()) for part in self._parts for buffer, _, _ in part.buffers.values()]
        numbers = self._numbers.now()

        def put_in() -> None:
            for held in self._contents:
                if not held.is_same():
                    _put(held.value, held.before)
            for part in self._parts:
                part.as_before()
            self._numbers.restore()

        def put_back() -> None:
            for module, own in attributes:
                object.__setattr__(module, "__dict__", own)
            for held in contents:
                if not held.is_same():
                    _put(held.value, held.before)
            for tensor, before in hooks:
                restore_hooks(tensor, before)
            for buffer, copy in buffers:
                if differs(buffer, copy):  # the repetition had a copy, and has edited this one by an alias
                    buffer.data.copy_(copy)
            numbers.restore()

        context = self._context.copy()
        return run_between(put_in, lambda: context.run(function, *args, **kwargs), put_back)


def hooks_of(tensor: torch.Tensor) -> list[dict[int, Any]]:
    """Return what is registered with a tensor, for :func:`restore_hooks`."""
    return [dict(hooks or {}) for hooks in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)]


def restore_hooks(tensor: torch.Tensor, before: list[dict[int, Any]]) -> None:
    """Take away hooks that were registered meanwhile: a forward that registers some runs a second time."""
    for hooks, old in zip((tensor._backward_hooks, tensor._post_accumulate_grad_hooks), before, strict=True):
        if hooks is not None and hooks.keys() != old.keys():
            hooks.clear()
            hooks.update(old)
