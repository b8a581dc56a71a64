"""Put back what a block may change in its forward by contract while it runs again, and make it as it was afterwards.

Put back are, of its modules and of modules among its arguments: attributes, parameters, buffers, parts and hooks; the
contents of lists, dicts, sets and deques that are attributes; generators of random numbers that are attributes. Besides
these the random numbers of Python and NumPy. Whatever else a forward changes, it changes once more, as with PyTorch's
own checkpoint.
"""

from __future__ import annotations

import copy
import operator
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
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
_PLAIN_CONTAINERS = frozenset({*_CONTAINERS, defaultdict})
"""They run none of the user's code when they are read or copied."""
_OF_MODULES = frozenset(nn.Module().__dict__)
# Not looked at. The object of a proxy may be dead.
_STEADY = frozenset({bool, int, float, complex, str, bytes, type(None), weakref.ProxyType, weakref.CallableProxyType})
_NOT_LOOKED_INTO = (nn.Module, nn.UninitializedParameter, nn.UninitializedBuffer)
_ABSENT = object()

_T = TypeVar("_T")
_Contents = list[tuple[Any, list[Any]]]
"""Modules and containers, each with its items: attributes, or what is in it."""


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
        self._containers: _Contents = []
        """The user's; those that a module consists of are among the places."""
        self._buffers: list[_Buffer] = []
        self._copies: dict[int, torch.Tensor] = {}
        self._edited: list[_Buffer] = []
        self._clones: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Address of the storage of each that stands in for a buffer in a repetition -> itself, and the buffer."""
        self._has_graphs = False
        """Whether any tensor was computed by an earlier call."""
        self._has_copies = False
        """Whether some containers are copies."""
        self.changed_twice: str | None = None
        """A buffer that a repetition has edited although it was given a copy. Its bytes were put back."""
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
            (self._places if is_own else self._containers).append((value, items))
            if name == "_buffers":
                self._enter_buffers(part)
            elif items:
                for key, item in _pairs(items) if isinstance(value, dict) else zip(repeat(name), items):
                    self._look(owner, key if is_own else name, item)

    def _enter_buffers(self, part: nn.Module) -> None:
        for name, buffer in part._buffers.items():
            # What inference mode has made, nothing edits outside of it.
            if buffer is None or isinstance(buffer, nn.UninitializedBuffer) or buffer.is_inference():
                continue
            self._has_graphs = self._has_graphs or _has_graph(buffer)
            if id(buffer) not in self._copies:
                self._copies[id(buffer)] = buffer.detach().clone()
            self._buffers.append(_Buffer(part, name, buffer, buffer._version, self._copies[id(buffer)]))

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
        edited = next(filter(None, (seen.edit() for seen in self._tensors)), None)
        changed = {id(seen.buffer) for seen in self._buffers if seen.may_be_edited()}
        self._edited = [seen for seen in self._buffers if id(seen.buffer) in changed]
        others = [seen for seen in self._buffers if id(seen.buffer) not in changed]
        self._tensors += [_Tensor.of(type(seen.part), seen.name, seen.buffer) for seen in others]
        self._buffers.clear()
        self._copies.clear()
        return edited

    def release_graphs(self) -> None:
        """After :meth:`settle`: hold tensors detached, and containers of tensors with graphs as copies.

        Nodes of the call hold this state, and Python's garbage collector does not see that. A node that backward does
        not reach would keep the graphs of all calls before it.
        """
        self._edited = [seen._replace(buffer=seen.buffer.detach()) for seen in self._edited]
        others: dict[int, Any] = {}

        def other(value: Any) -> Any:
            if id(value) not in others and _has_graph(value):
                others[id(value)] = tuple(map(other, value)) if type(value) is tuple else apart(value)
            return others.get(id(value), value)

        for place, items in self._containers:
            # The call may have filled it, or one before.
            if type(place) in _PLAIN_CONTAINERS and any(map(_has_graph, chain(items, _items(place)))):
                others[id(place)] = copied = copy.copy(place)
                _put(copied, [*map(other, items)])
        self._has_copies = bool(others)
        if others or self._has_graphs:
            self._places = [(place, [*map(other, items)]) for place, items in self._places]
            self._containers = [(other(place), [*map(other, items)]) for place, items in self._containers]
            self._tensors = [seen._replace(tensor=other(seen.tensor)) for seen in self._tensors]

    def change(self) -> str | None:
        """Return what was done since that cannot be undone; ``None``: nothing that can be seen."""
        return next(filter(None, (seen.change() for seen in self._tensors)), None)

    def _copied_containers(self) -> list[Any]:
        """Return what the modules have now in place of copies: a second reference may change that."""
        modules = [place for place, _ in self._places if isinstance(place, nn.Module)] if self._has_copies else []
        return [value for part in modules for value in part.__dict__.values() if type(value) in _PLAIN_CONTAINERS]

    def as_before(self, run: Callable[..., _T], /, *args: Any, **kwargs: Any) -> _T:
        """Call ``run`` with all as it was before the call; then make all as it was when this was called.

        Buffers that the call edits are copies of copies meanwhile: it may be repeated again, and others may have saved
        the module's own.
        """
        originals = {id(seen.copy): seen.now() for seen in self._edited}
        places = self._places + self._containers
        now = [(place, _items(place)) for place in (*(place for place, _ in places), *self._copied_containers())]
        numbers = RandomStates(self._sources)

        def begin() -> _T:
            _restore(places)
            self._numbers.restore()
            clones = {id(seen.copy): seen.copy.clone() for seen in self._edited}
            for seen in self._edited:
                seen.part._buffers[seen.name] = clone = clones[id(seen.copy)]
                if is_plain(clone):
                    self._clones[clone.untyped_storage()._cdata] = clone, seen.buffer
            return run(*args, **kwargs)

        def end() -> None:
            self._clones.clear()
            _restore(now)
            numbers.restore()
            for seen in originals.values():
                if seen.is_edited():
                    self.changed_twice = f"{type(seen.part).__name__}.{seen.name}"
                    seen.buffer.data.copy_(seen.copy)

        return restoring(begin, end)

    def original_of(self, saved: torch.Tensor) -> torch.Tensor:
        """Return the part of the buffer for what a repetition saves of its copy.

        Plain autograd holds the buffer: batch norms edit it past its version, and backward gets the bytes of then.
        """
        clone, buffer = self._clones.get(saved.untyped_storage()._cdata, (saved, saved))
        if buffer is saved or clone.stride() != buffer.stride() or clone.dtype != saved.dtype:
            return saved
        with torch.no_grad():
            offset = buffer.storage_offset() + saved.storage_offset()
            return buffer.as_strided(saved.shape, saved.stride(), offset)


class _Buffer(NamedTuple):
    """A buffer, and a copy of its bytes at one time. One that is registered twice has one copy."""

    part: nn.Module
    name: str
    buffer: torch.Tensor
    version: int
    copy: torch.Tensor

    def now(self) -> _Buffer:
        """Return it with a copy of its bytes now."""
        return self._replace(version=self.buffer._version, copy=self.buffer.detach().clone())

    def is_edited(self) -> bool:
        """Tell whether an edit is seen: on a CPU by the bytes, too. A device is not waited for."""
        return self.buffer._version != self.version or (
            self.buffer.device.type == "cpu" and differs(self.buffer, self.copy)
        )

    def may_be_edited(self) -> bool:
        """Tell whether a call may have edited it.

        Batch norms, ``data`` and NumPy edit without raising a version. Small buffers on a device count as edited, large
        ones go by their version.
        """
        is_small = self.buffer.device.type != "cpu" and self.copy.nbytes <= _SMALL_BYTES
        return isinstance(self.part, _NormBase) or is_small or self.is_edited()


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
        now = _items(place)
        if len(now) != len(items) or not all(map(operator.is_, now, items)):
            _put(place, items)


def _items(place: Any) -> list[Any]:
    """Return all keys, then all values, where there are keys. Not as a class of the user's may show them."""
    base = type(place)
    if base not in _PLAIN_CONTAINERS:
        place = place.__dict__ if isinstance(place, nn.Module) else place
        base = _base_of(place)
    return [*base.keys(place), *base.values(place)] if isinstance(place, dict) else [*base.__iter__(place)]


def _pairs(items: list[Any]) -> Iterable[tuple[Any, Any]]:
    middle = len(items) // 2
    return zip(items[:middle], items[middle:], strict=True)


def _put(place: Any, items: list[Any]) -> None:
    if isinstance(place, nn.Module):
        _put_attributes(place, dict(_pairs(items)))
        return
    base = _base_of(place)  # classes of their own may refuse
    if isinstance(place, dict):
        base.clear(place)
        for key, value in _pairs(items):
            base.__setitem__(place, key, value)
    elif isinstance(place, list):
        base.__setitem__(place, slice(None), items)
    else:
        base.clear(place)
        (base.update if isinstance(place, set) else base.extend)(place, items)


def _base_of(container: Any) -> Any:
    kind = type(container)
    return kind if kind in _PLAIN_CONTAINERS else next(base for base in _CONTAINERS if issubclass(kind, base))


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


def _hooks_of(tensor: torch.Tensor) -> list[int]:
    return [*(tensor._backward_hooks or ()), *(tensor._post_accumulate_grad_hooks or ())]
