"""Put back what a block may change in its forward by contract while it runs again, and make it as it was afterwards.

Put back are, of its modules and of modules among its arguments: attributes, parameters, buffers, parts and hooks; the
contents of lists, dicts, sets and deques that are attributes; generators of random numbers that are attributes. Besides
these the random numbers of Python and NumPy, context variables, and hooks of parameters and inputs. Whatever else a
forward changes, it changes once more, as with PyTorch's own checkpoint.
"""

from __future__ import annotations

import contextvars
import operator
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.lazy import LazyModuleMixin

from lightning_ssd.common.method_patch import MethodPatch
from lightning_ssd.common.rng import RandomStates, shared_sources, source_of
from lightning_ssd.common.tensors import StorageKey, storage_of
from lightning_ssd.recompute.fingerprint import differs

__all__ = ["CallState", "contents_of", "restore", "restoring"]

_SMALL_BYTES = 64 << 10
_CONTAINERS = (dict, list, set, deque)
_OF_MODULES = frozenset(nn.Module().__dict__)
# Not looked at. The object of a proxy may be dead.
_STEADY = frozenset({bool, int, float, complex, str, bytes, type(None), weakref.ProxyType, weakref.CallableProxyType})
_NOT_LOOKED_INTO = (nn.Module, nn.UninitializedParameter, nn.UninitializedBuffer)
_ABSENT = object()

_T = TypeVar("_T")
_Buffers = dict[str, torch.Tensor | None]
_Contents = list[tuple[Any, list[Any]]]
"""Modules, containers and tensors, each with its items: attributes, what is in it, or its hooks."""


class CallState:
    """Holds what lies within the contract, as it was before one call.

    Args:
        modules: the one that is called, and those among its arguments.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        parts = list(dict.fromkeys(part for module in modules for part in module.modules()))
        self.opaque: str | None = None
        """An attribute that the call may change and that cannot be put back; ``None``: there is none."""
        self.is_unmade = any(isinstance(p, LazyModuleMixin) and "_initialize_hook" in p.__dict__ for p in parts)
        """Whether parameters are made by this very call, and hooks and classes of modules changed, as never again."""
        self._places: _Contents = []
        self._sources = shared_sources()
        self._context = contextvars.copy_context()
        self._tensors: list[_Tensor] = []
        self._buffers: list[tuple[nn.Module, str, torch.Tensor, int, torch.Tensor]] = []
        self._copies: list[tuple[_Buffers, str, torch.Tensor]] = []
        for part in parts:
            self._enter(part)
        self._numbers = RandomStates(self._sources)
        self.addresses = frozenset(seen.storage.cdata for seen in self._tensors if seen.storage is not None)
        """Addresses of storages whose identity and version are compared."""

    def _enter(self, part: nn.Module) -> None:
        kind = type(part).__name__
        self._places.append((part, _items(part)))
        for name, value in part.__dict__.items():
            if not issubclass(type(value), _CONTAINERS):
                self._look(f"{kind}.{name}", value)
                continue
            self._places.append((value, _items(value)))
            if name == "_buffers":
                self._buffers += [
                    (part, key, buffer, buffer._version, buffer.detach().clone())
                    for key, buffer in part._buffers.items()
                    # What inference mode has made, nothing edits outside of it.
                    if not (buffer is None or isinstance(buffer, nn.UninitializedBuffer) or buffer.is_inference())
                ]
                continue
            for key, item in value.items() if isinstance(value, dict) else zip(repeat(name), value):
                self._look(f"{kind}.{key if name in _OF_MODULES else name}", item)

    def _look(self, label: str, value: Any) -> None:
        kind = type(value)
        if kind in _STEADY or issubclass(kind, _NOT_LOOKED_INTO):
            return
        if issubclass(kind, torch.Tensor):
            if not value.is_inference():
                self._tensors.append(_Tensor.of(label, value))
        elif (source := source_of(value)) is not None:
            self._sources.append(source)
        elif hasattr(kind, "__next__") and getattr(value, "gi_frame", value) is not None:  # not a generator at its end
            self.opaque = f"{label} leads to a {kind.__name__}, which cannot be put back"

    def settle(self) -> str | None:
        """After the call: keep what is needed to repeat it. Returns what was edited in place and cannot be put back."""
        edited = next(filter(None, (seen.edit() for seen in self._tensors)), None)
        self._copies = self._edited_buffers()
        kept = {id(copy) for *_, copy in self._copies}
        self._tensors += [
            _Tensor.of(f"{type(part).__name__}.{name}", buffer)
            for part, name, buffer, _, copy in self._buffers
            if id(copy) not in kept
        ]
        self._buffers.clear()
        return edited

    def _edited_buffers(self) -> list[tuple[_Buffers, str, torch.Tensor]]:
        return [
            (part._buffers, name, copy)
            for part, name, buffer, version, copy in self._buffers
            if _is_edited(part, buffer, version, copy)
        ]

    def change(self) -> str | None:
        """Return what was done since that cannot be undone; ``None``: nothing that can be seen."""
        return next(filter(None, (seen.change() for seen in self._tensors)), None)

    def probes(self) -> list[tuple[str, weakref.ref[torch.Tensor], int]]:
        """Return label, tensor and version, for who asks for edits only and is to keep nothing alive."""
        return [(seen.label, weakref.ref(seen.tensor), seen.version) for seen in self._tensors]

    def as_before(self, run: Callable[..., _T], /, *args: Any, **kwargs: Any) -> _T:
        """Call ``run`` with all as it was before the call; then make all as it was when this was called.

        Buffers that the call edits are copies of copies meanwhile: it may be repeated again, and others may have saved
        the module's own.
        """
        # A call that asks for gradients in its own forward is repeated before it has ended.
        copies = self._copies + self._edited_buffers()
        now = contents_of([*(place for place, _ in self._places), *(seen.tensor for seen in self._tensors)])
        numbers = RandomStates(self._sources)

        def begin() -> _T:
            restore(self._places)
            self._numbers.restore()
            for buffers, name, copy in copies:
                buffers[name] = copy.clone()
            return self._context.copy().run(run, *args, **kwargs)

        def end() -> None:
            restore(now)
            numbers.restore()

        return restoring(begin, end)


def _is_edited(part: nn.Module, buffer: torch.Tensor, version: int, copy: torch.Tensor) -> bool:
    """Tell whether a call may have edited a buffer.

    Batch norms, ``data`` and NumPy edit without raising a version. On a CPU the bytes tell. A device is not waited for:
    small buffers count as edited there, large ones go by their version.
    """
    if isinstance(part, _NormBase) or buffer._version != version:
        return True
    if buffer.device.type == "cpu":
        return differs(buffer, copy)
    return copy.nbytes <= _SMALL_BYTES


def restoring(call: Callable[[], _T], undo: Callable[[], object]) -> _T:
    """Call ``call``, then ``undo``; where Ctrl-C comes into that, ``undo`` is called once more before it is raised."""
    is_undone = False
    try:
        try:
            return call()
        finally:
            undo()
            is_undone = True
    except BaseException:
        if not is_undone:
            undo()
        raise


def contents_of(places: Iterable[Any]) -> _Contents:
    """Return what is in modules, containers and registered with tensors, for :func:`restore`."""
    return [(place, _items(place)) for place in places]


def restore(contents: _Contents) -> None:
    """Put the same objects into the same places. May be called again, wherever an earlier call has got to."""
    for place, items in contents:
        now = _items(place)
        if len(now) != len(items) or not all(map(operator.is_, now, items)):
            _put(place, items)


def _items(place: Any) -> list[Any]:
    """Return all keys, then all values, where there are keys."""
    if isinstance(place, torch.Tensor):  # numbers of hooks are unique
        place = {number: hook for hooks in _hooks_of(place) for number, hook in hooks.items()}
    elif isinstance(place, nn.Module):
        place = place.__dict__
    return [*place.keys(), *place.values()] if isinstance(place, dict) else list(place)


def _put(place: Any, items: list[Any]) -> None:
    middle = len(items) // 2
    if isinstance(place, torch.Tensor):  # what a second forward has registered
        for hooks in _hooks_of(place):
            for number in hooks.keys() - set(items[:middle]):
                del hooks[number]
    elif isinstance(place, nn.Module):
        _put_attributes(place, dict(zip(items[:middle], items[middle:], strict=True)))
    elif isinstance(place, dict):
        kind = OrderedDict if isinstance(place, OrderedDict) else dict  # classes of their own may refuse
        kind.clear(place)
        for key, value in zip(items[:middle], items[middle:], strict=True):
            kind.__setitem__(place, key, value)
    elif isinstance(place, list):
        list.__setitem__(place, slice(None), items)
    else:
        place.clear()
        (place.update if isinstance(place, set) else place.extend)(items)


def _put_attributes(part: nn.Module, wanted: dict[str, Any]) -> None:
    """One by one: other code may look at a module at any time. Past setters that it may have of its own."""
    now = part.__dict__
    for name in [*(now.keys() - wanted.keys()), *wanted]:
        old, new = now.get(name, _ABSENT), wanted.get(name, _ABSENT)
        if old is new or issubclass(type(old), MethodPatch) or issubclass(type(new), MethodPatch):
            continue  # our own stand-ins come and go as they please
        if new is _ABSENT:
            del now[name]
        else:
            now[name] = new


def _hooks_of(tensor: torch.Tensor) -> list[dict[int, Any]]:
    return [hooks or {} for hooks in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)]


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
    gradient: weakref.ref[torch.Tensor] | None
    """Not itself: the call may want to free it."""
    gradient_version: int

    @classmethod
    def of(cls, label: str, tensor: torch.Tensor) -> _Tensor:
        storage = _storage_of(tensor)
        nbytes = 0 if storage is None else storage.nbytes()
        key = None if storage is None else StorageKey(storage)
        gradient = _gradient_of(tensor)
        seen = (None, 0) if gradient is None else (weakref.ref(gradient), _version_of(gradient))
        return cls(label, tensor, tensor._version, key, nbytes, _view_of(tensor), *seen)

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
