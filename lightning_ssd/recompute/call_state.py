"""The state of a block's modules before one call, which is put back while the call is repeated.

Put back are random numbers (PyTorch's, Python's, NumPy's, and generators that are attributes), the buffers, and the
attributes of the modules. Lists, dicts, sets and deques among the attributes are repeated with copies, so that parts,
parameters and hooks are put back with them. Nothing else is: ``fingerprint.py`` tells if it mattered.

A tensor that was edited in place, or got other data, cannot be put back. Versions and addresses tell.
"""

from __future__ import annotations

import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from lightning_ssd.common.method_patch import MethodPatch
from lightning_ssd.common.rng import RandomStates, default_sources, shared_sources, source_of
from lightning_ssd.common.tensors import StorageKey, storage_of
from lightning_ssd.recompute.fingerprint import differs

__all__ = ["CallState", "hooks_of", "restore_hooks"]

T = TypeVar("T")

_SMALL_BYTES = 64 << 10
_COPIED = frozenset({list, dict, set, deque, OrderedDict, defaultdict})
# Neither a tensor nor a generator. A proxy may refer to a dead object, which answers no question.
_SKIPPED = frozenset(
    {bool, int, float, str, type(None), tuple, type, torch.dtype, torch.device, types.FunctionType}
    | {types.MethodType, types.BuiltinFunctionType, weakref.ProxyType, weakref.CallableProxyType}
)


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

    @classmethod
    def of(cls, label: str, tensor: torch.Tensor) -> _Tensor:
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


class _Part:
    """One module as it was before the call."""

    def __init__(self, module: nn.Module, copies: dict[int, Any]) -> None:
        self.module = module
        # Stand-ins of ours come and go as they please.
        self.attributes = {
            name: _copied(value, copies)
            for name, value in vars(module).items()
            if not issubclass(type(value), MethodPatch)
        }
        self.buffers = {
            name: (buffer, buffer._version, buffer.detach().clone())
            for name, buffer in module._buffers.items()
            if buffer is not None and not isinstance(buffer, nn.UninitializedBuffer)
        }

    def tensors_and_sources(self) -> Iterable[tuple[str, Any]]:
        """Yield what may be a tensor or a generator, with a label; buffers are left out."""
        kind = type(self.module).__name__
        for name, value in self.attributes.items():
            if name in ("_buffers", "_modules") or type(value) in _SKIPPED:
                continue
            if type(value) not in _COPIED:
                yield f"{kind}.{name}", value
            elif value:
                items = value.items() if isinstance(value, dict) else ((name, item) for item in value)
                for key, item in items:
                    if type(item) not in _SKIPPED:
                        yield f"{kind}.{key if name == '_parameters' else name}", item

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

    def as_before(self, copies: dict[int, Any]) -> dict[str, Any]:
        """Return the ``__dict__`` for a repetition, which it may change."""
        state = {name: _copied(value, copies) for name, value in self.attributes.items()}
        state.update((name, v) for name, v in vars(self.module).items() if issubclass(type(v), MethodPatch))
        for name, (_, _, copy) in self.buffers.items():
            state["_buffers"][name] = copy.clone()  # the call may be repeated again
        return state


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    """Copy a container, one level deep. What two modules share they go on sharing."""
    if type(value) not in _COPIED:
        return value
    if id(value) not in copies:
        copies[id(value)] = value.copy()
    return copies[id(value)]


class CallState:
    """The state before one call.

    Args:
        modules: the one that is called, and those among its arguments.
        devices: whose random numbers the call may draw.

    Attributes:
        is_unmade: the call makes parameters, and changes hooks and classes of modules, as no later one will.
    """

    def __init__(self, modules: Sequence[nn.Module], devices: Iterable[torch.device] = ()) -> None:
        parts = dict.fromkeys(part for module in modules for part in module.modules())
        self.is_unmade = any(isinstance(p, LazyModuleMixin) and "_initialize_hook" in vars(p) for p in parts)
        copies: dict[int, Any] = {}
        self._parts = [_Part(part, copies) for part in parts]
        self._numbers = RandomStates([*shared_sources(), *default_sources(devices)])
        self._tensors: list[_Tensor] = []
        self._unknown: list[tuple[str, torch.Tensor]] = []
        """Buffers that the call may have edited, which their devices will know."""
        for part in self._parts:
            for label, value in part.tensors_and_sources():
                if isinstance(value, torch.Tensor):
                    if not isinstance(value, nn.UninitializedParameter) and not value.is_inference():
                        self._tensors.append(_Tensor.of(label, value))
                elif (source := source_of(value)) is not None:
                    self._numbers.add(source)

    @property
    def addresses(self) -> frozenset[int]:
        """Of the storages whose identity and version are compared."""
        return frozenset(seen.storage.cdata for seen in self._tensors if seen.storage is not None)

    def settle(self) -> str | None:
        """Keep what a repetition needs, after the call. Returns what was edited in place and cannot be put back."""
        edited = next(filter(None, (seen.edit() for seen in self._tensors)), None)
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
        now = [(part.module, vars(part.module)) for part in self._parts]
        hooks = [(seen.tensor, hooks_of(seen.tensor)) for seen in self._tensors]
        buffers = [(buffer, buffer.detach().clone()) for part in self._parts for buffer, _, _ in part.buffers.values()]
        numbers = self._numbers.now()
        copies: dict[int, Any] = {}
        interrupts: list[BaseException] = []
        try:
            for part in self._parts:
                object.__setattr__(part.module, "__dict__", part.as_before(copies))
            self._numbers.restore()
            return function(*args, **kwargs)
        finally:
            # Within this function: Python looks for signals where another one is entered.
            while True:
                try:
                    _put_back(now, hooks, buffers, numbers)
                    break
                except BaseException as error:
                    if isinstance(error, Exception):
                        raise
                    interrupts = [error]
            if interrupts:
                raise interrupts.pop()


def _put_back(now: Sequence[Any], hooks: Sequence[Any], buffers: Sequence[Any], numbers: RandomStates) -> None:
    for module, attributes in now:
        object.__setattr__(module, "__dict__", attributes)
    for tensor, before in hooks:
        restore_hooks(tensor, before)
    for buffer, before in buffers:
        if differs(buffer, before):  # the repetition had a copy, and has edited this one by an alias
            buffer.data.copy_(before)
    numbers.restore()


def hooks_of(tensor: torch.Tensor) -> list[dict[int, Any]]:
    """Return what is registered with a tensor, for :func:`restore_hooks`."""
    return [dict(hooks or {}) for hooks in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)]


def restore_hooks(tensor: torch.Tensor, before: list[dict[int, Any]]) -> None:
    """Take away hooks that were registered meanwhile: a forward that registers some runs a second time."""
    for hooks, old in zip((tensor._backward_hooks, tensor._post_accumulate_grad_hooks), before, strict=True):
        if hooks is not None and hooks.keys() != old.keys():
            hooks.clear()
            hooks.update(old)
