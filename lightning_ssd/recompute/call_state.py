"""Put back what a block may change in its forward by contract while it runs again, and make it as it was afterwards.

Put back are, of its modules and of modules among its arguments: attributes, parameters, buffers, parts and hooks; and
generators of random numbers that are attributes. Besides these the random numbers of Python and NumPy. A forward that
edits a tensor or a container among its attributes, or gives a buffer other memory, is refused. Whatever else it
changes, it changes once more, as with PyTorch's own checkpoint.
"""

from __future__ import annotations

import operator
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.lazy import LazyModuleMixin

from lightning_ssd.common.method_patch import MethodPatch
from lightning_ssd.common.rng import RandomStates, shared_sources, source_of
from lightning_ssd.common.tensors import StorageKey, storage_of
from lightning_ssd.recompute.call_inputs import apart, is_plain
from lightning_ssd.recompute.fingerprint import differs

__all__ = ["CallState", "restoring"]

_SMALL_BYTES = 64 << 10
_CONTAINERS = (OrderedDict, dict, list, set, deque)
_OF_MODULES = frozenset(nn.Module().__dict__)
# Not looked at. The object of a proxy may be dead.
_STEADY = frozenset({bool, int, float, complex, str, bytes, type(None), weakref.ProxyType, weakref.CallableProxyType})
_NOT_LOOKED_INTO = (nn.Module, nn.UninitializedParameter, nn.UninitializedBuffer)
_ABSENT = object()

_T = TypeVar("_T")
_Contents = list[tuple[Any, list[Any]]]
"""Modules and what they consist of, each with its items: attributes, or what is in it."""


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
        self._tensors: list[_Tensor] = []
        self._containers: list[_Container] = []
        self._buffers: dict[int, _Buffer] = {}
        """By the number (``id``) of each: one may be registered twice."""
        self._has_graphs = False
        """Whether any tensor was computed by an earlier call."""
        for part in parts:
            self._enter(part)
        self._numbers = RandomStates(self._sources)
        self.addresses = frozenset(seen.storage.cdata for seen in self._tensors if seen.storage is not None)
        """Addresses of storages whose identity and version are compared."""

    def _enter(self, part: nn.Module) -> None:
        owner = type(part)
        if isinstance(part, torch.jit.ScriptModule) or any(map(_has_slots, owner.__mro__)):
            self.opaque = f"a {owner.__name__} keeps attributes outside of its __dict__, which cannot be put back"
            return
        self._places.append((part, _items(part)))
        for name, value in part.__dict__.items():
            if not issubclass(type(value), _CONTAINERS):
                self._look(owner, name, value)
                continue
            items, is_own = _items(value), name in _OF_MODULES
            if is_own:
                self._places.append((value, items))
            else:
                self._enter_container(f"{owner.__name__}.{name}", value, items)
            if name == "_buffers":
                self._enter_buffers(part)
            else:
                middle = len(items) // 2 if isinstance(value, dict) else 0
                for key, item in zip(items[:middle] or repeat(name), items[middle:], strict=False):
                    self._look(owner, key if is_own else name, item)

    def _enter_container(self, label: str, value: Any, items: list[Any]) -> None:
        if any(map(_has_graph, items)):  # our nodes would hold it, and so the graphs of all calls before
            self.opaque = f"{label} holds tensors that an earlier call has computed; leave them there detached"
        self._containers.append(_Container(label, value, items))

    def _enter_buffers(self, part: nn.Module) -> None:
        for name, buffer in part._buffers.items():
            # What inference mode has made, nothing edits outside of it.
            if buffer is None or isinstance(buffer, nn.UninitializedBuffer) or buffer.is_inference():
                continue
            self._has_graphs = self._has_graphs or _has_graph(buffer)
            if id(buffer) not in self._buffers or isinstance(part, _NormBase):
                once = _each_once(buffer.detach())
                self._buffers[id(buffer)] = _Buffer(part, _Tensor.of(type(part), name, buffer), once, once.clone())

    def _look(self, owner: type, name: str, value: Any) -> None:
        kind = type(value)
        if kind in _STEADY or issubclass(kind, _NOT_LOOKED_INTO):
            return
        if issubclass(kind, torch.Tensor):
            if not value.is_inference():
                self._tensors.append(_Tensor.of(owner, name, value))
                self._has_graphs = self._has_graphs or _has_graph(value)
        elif kind is tuple:
            self._has_graphs = self._has_graphs or _has_graph(value)
        elif (source := source_of(value)) is not None:
            self._sources.append(source)
        elif hasattr(kind, "__next__") and getattr(value, "gi_frame", value) is not None:  # not a generator at its end
            self.opaque = f"{owner.__name__}.{name} leads to a {kind.__name__}, which cannot be put back"

    def settle(self) -> str | None:
        """After the call: keep what is needed to repeat it. Returns what was edited in place and cannot be put back."""
        buffers = self._buffers
        exchanged = (f"the storage of {seen.before.label}" for seen in buffers.values() if seen.before.exchange())
        edited = next(filter(None, (seen.edit() for seen in self._tensors)), None) or self.edited_container()
        self._buffers = {key: seen for key, seen in buffers.items() if seen.may_be_edited()}
        self._tensors += [seen.before for key, seen in buffers.items() if key not in self._buffers]
        return edited or next(exchanged, None)

    def edited_container(self) -> str | None:
        """Return the name of a list, dict, set or deque with other items than before the call."""
        edited = (seen.label for seen in self._containers if not _are_same(_items(seen.container), seen.items))
        return next(edited, None)

    def release_graphs(self) -> None:
        """After :meth:`settle`: hold tensors detached.

        Nodes of the call hold this state, and Python's garbage collector does not see that. A node that backward does
        not reach would keep the graphs of all calls before it.
        """
        others: dict[int, Any] = {}

        def other(value: Any) -> Any:
            if id(value) not in others and _has_graph(value):
                others[id(value)] = tuple(map(other, value)) if type(value) is tuple else apart(value)
            return others.get(id(value), value)

        if self._has_graphs:
            self._places = [(place, [*map(other, items)]) for place, items in self._places]
            self._tensors = [seen._replace(tensor=other(seen.tensor)) for seen in self._tensors]
            for key, seen in self._buffers.items():
                self._buffers[key] = seen._replace(before=seen.before._replace(tensor=other(seen.before.tensor)))

    def change(self) -> str | None:
        """Return what was done since that cannot be undone; ``None``: nothing that can be seen."""
        changed = next(filter(None, (seen.change() for seen in self._tensors)), None)
        changed = changed or next(filter(None, (seen.before.exchange() for seen in self._buffers.values())), None)
        if changed is None and (container := self.edited_container()) is not None:
            changed = f"{container} has other items than in forward"
        return changed

    def as_before(self, run: Callable[..., _T], /, *args: Any, **kwargs: Any) -> _T:
        """Call ``run`` with all as it was before the call; then make all as it was when this was called.

        Buffers have the bytes of before meanwhile, and ``run`` may save them: autograd without us holds them, too, with
        the bytes of when backward uses them. Versions stay as they are, since what others have saved has not changed.
        """
        now = [(place, _items(place)) for place, _ in self._places]
        buffers = [seen.buffer for seen in self._buffers.values()]
        bytes_now = [buffer.clone() for buffer in buffers]
        numbers = RandomStates(self._sources)

        def begin() -> _T:
            _restore(self._places)
            self._numbers.restore()
            for buffer, seen in zip(buffers, self._buffers.values(), strict=True):
                buffer.data.copy_(seen.copy)
            return run(*args, **kwargs)

        def end() -> None:
            _restore(now)
            numbers.restore()
            for buffer, copy in zip(buffers, bytes_now, strict=True):
                buffer.data.copy_(copy)

        with _unsafe_preserve_version_counter(tuple(buffers)):
            return restoring(begin, end)


class _Container(NamedTuple):
    """A list, dict, set or deque among the attributes, which the call may read, and may not edit."""

    label: str
    container: Any
    items: list[Any]
    """Held, because a new item may get the address of one that is gone."""


class _Buffer(NamedTuple):
    """A buffer, and a copy of its bytes before the call."""

    part: nn.Module
    before: _Tensor
    buffer: torch.Tensor
    """Detached, with each element once."""
    copy: torch.Tensor

    def may_be_edited(self) -> bool:
        """Tell whether a call may have edited it.

        Batch norms, ``data`` and NumPy edit without raising a version. So bytes are compared on a CPU. A device is not
        waited for: small buffers there count as edited, large ones go by their version.
        """
        if isinstance(self.part, _NormBase) or self.buffer._version != self.before.version:
            return True
        return differs(self.buffer, self.copy) if self.buffer.device.type == "cpu" else self.copy.nbytes <= _SMALL_BYTES


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


def _restore(contents: _Contents) -> None:
    """Put the same objects into the same places. May be called again, wherever an earlier call has got to."""
    for place, items in contents:
        if not _are_same(_items(place), items):
            _put(place, items)


def _are_same(now: list[Any], items: list[Any]) -> bool:
    return len(now) == len(items) and all(map(operator.is_, now, items))


def _items(place: Any) -> list[Any]:
    """Return all keys, then all values, where there are keys. Not as a class of the user's may show them."""
    place = place.__dict__ if isinstance(place, nn.Module) else place
    base: Any = next(base for base in _CONTAINERS if issubclass(type(place), base))
    return [*base.keys(place), *base.values(place)] if issubclass(base, dict) else [*base.__iter__(place)]


def _put(place: Any, items: list[Any]) -> None:
    middle = len(items) // 2
    if isinstance(place, nn.Module):
        _put_attributes(place, dict(zip(items[:middle], items[middle:], strict=True)))
        return
    base: Any = next(base for base in _CONTAINERS if isinstance(place, base))
    base.clear(place)
    base.update(place, items if base is set else zip(items[:middle], items[middle:], strict=True))


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


def _has_slots(kind: type) -> bool:
    names = kind.__dict__.get("__slots__")
    if not names:
        return False
    return not {"__dict__", "__weakref__"}.issuperset([names] if isinstance(names, str) else names)


def _has_graph(value: Any) -> bool:
    if type(value) is tuple:
        return any(map(_has_graph, value))
    return is_plain(value) and value.grad_fn is not None


class _Tensor(NamedTuple):
    """A tensor as it was before the call."""

    owner: type
    name: str
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
    hooks: list[int]
    """Numbers of the hooks that are registered with the tensor."""

    @classmethod
    def of(cls, owner: type, name: str, tensor: torch.Tensor) -> _Tensor:
        storage = _storage_of(tensor)
        nbytes = 0 if storage is None else storage.nbytes()
        key = None if storage is None else StorageKey(storage)
        gradient = _gradient_of(tensor)
        reference, version = (None, 0) if gradient is None else (weakref.ref(gradient), _version_of(gradient))
        view, hooks = _view_of(tensor), _hooks_of(tensor)
        return cls(owner, name, tensor, tensor._version, key, nbytes, view, reference, version, hooks)

    @property
    def label(self) -> str:
        return f"{self.owner.__name__}.{self.name}"

    def edit(self) -> str | None:
        """Return what the call, which has just ended, has edited in place."""
        if self.tensor._version != self.version:
            return self.label
        if _hooks_of(self.tensor) != self.hooks:
            return f"the hooks of {self.label}"
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
        return self.exchange()

    def exchange(self) -> str | None:
        """Return how it was given other memory."""
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


def _each_once(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view without the repetitions of ``expand``, which PyTorch refuses to write to."""
    if tensor.layout is torch.strided and not tensor.is_nested:
        for dim, stride in enumerate(tensor.stride()):
            tensor = tensor.narrow(dim, 0, 1) if stride == 0 and tensor.shape[dim] > 1 else tensor
    return tensor


def _view_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return (tensor.dtype,)
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def _gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor.grad if tensor.is_leaf else None  # asking others for it is warned of


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _hooks_of(tensor: torch.Tensor) -> list[int]:
    return [*(tensor._backward_hooks or ()), *(tensor._post_accumulate_grad_hooks or ())]
