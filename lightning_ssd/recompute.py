"""One call of a module that keeps its inputs, and runs again in backward instead of keeping what it computed.

The mechanism is PyTorch's own non-reentrant checkpoint (``torch.utils.checkpoint``), which sees to random numbers and
autocast. What it leaves to its caller is done here, so that the results are those of the same call kept: buffers and
attributes that the forward changes (running statistics, states), whatever else it changes within its reach (lists and
generators of its own, see ``reach.py``) and the training mode are as they were while it runs again, and as they are
afterwards; a tensor given twice stays one; lists that the forward fills are filled once; weights that have changed
raise, and so do tensors that the forward edits and that are no buffers. What lies out of reach (files, globals, objects
that cannot be looked into) is changed once more by each repetition.
"""

from __future__ import annotations

import enum
import itertools
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from lightning_ssd.errors import ConfigError
from lightning_ssd.reach import Reach
from lightning_ssd.tensors import PLAIN_TYPES

__all__ = ["CallInputs", "device_of", "is_plain", "recompute", "watch", "who_else_decides"]

# Whoever installed saved-tensor hooks last, and the innermost transform of torch.func. Neither has a public name.
_top_hooks: Callable[[bool], tuple[Any, Any] | None] = torch._C._autograd._top_saved_tensors_default_hooks
_innermost_transform: Callable[[], object | None] = torch._C._functorch.peek_interpreter_stack
_Attribute = tuple[dict[str, Any], str, Any]

# Their values never change, or are the model's own business whether they are called once or twice.
_STEADY = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, enum.Enum, type, nn.Module),
    *(types.FunctionType, types.BuiltinFunctionType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)


def who_else_decides() -> str | None:
    """Why nothing may be recomputed just here, whatever the call.

    A checkpoint of the model's own runs its part again without us: that has to save what it saved the first time.
    """
    if _innermost_transform() is not None:
        return "it runs under a transform of torch.func"
    hooks = _top_hooks(True)
    if hooks is not None and getattr(hooks[0], "__module__", None) == checkpoint.__module__:
        return "the model checkpoints it by itself"
    return None


def recompute(
    module: nn.Module,
    run: Callable[..., Any],
    inputs: CallInputs,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """``run(*args, **kwargs)``, and again whenever backward needs what it computed.

    Saved-tensor hooks around it see its tensor inputs, those in ``kwargs`` and in lists too, and nothing else.

    Args:
        module: whose forward ``run`` is; its weights and state are looked after.
        run: what to call.
        inputs: made of ``args`` and ``kwargs``; not ``opaque``.
        args: as the caller gave them.
        kwargs: as the caller gave them.

    Raises:
        ConfigError: the call has edited one of its inputs, which is needed again as it was, or another tensor.
    """
    tensors = list(inputs.tensors)
    device = device_of(module)
    if device.type != "cpu" and all(tensor.device != device for tensor in tensors):
        # checkpoint looks after the random numbers of the devices of its inputs, and of no others.
        tensors.append(torch.empty(0, device=device))
    call = _Call(module, run, inputs, (args, kwargs))
    result = checkpoint(call, *tensors, use_reentrant=False, preserve_rng_state=True)
    if call.edits is not None:
        raise ConfigError(
            f"a {type(module).__name__} edits {call.edits} in place, so that it cannot be recomputed; let it edit a "
            "copy (or a buffer), or name classes of other blocks in OffloadPolicy.recompute_modules"
        )
    return result


def watch(
    module: nn.Module, run: Callable[..., Any], inputs: CallInputs, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, str | None]:
    """``run(*args, **kwargs)``, kept, and why it had better not be recomputed: what it edits; ``None``: it may be."""
    call = _Call(module, run, inputs, (args, kwargs))
    result = call(*inputs.tensors)
    return result, None if call.edits is None else f"{call.edits} is edited in place by it"


def device_of(module: nn.Module) -> torch.device:
    """Where its first parameter is."""
    tensor = next(itertools.chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if tensor is None else tensor.device


def _has_version(tensor: torch.Tensor) -> bool:
    """Whether autograd can save it, and tell of edits: not in inference mode, nor under torch.func."""
    return not tensor.is_inference() and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is nothing but a view of a storage, with a version."""
    return (
        type(tensor) in PLAIN_TYPES
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and _has_version(tensor)
    )


class _Slot(int):
    """The place of a tensor among the inputs."""


class CallInputs:
    """The arguments of one call: tensors apart, the rest as a pattern to put them into.

    A tensor that stands in several places stays one tensor: attention computes otherwise where query is key.

    Attributes:
        tensors: each tensor once.
        pattern: ``(args, kwargs)`` with places instead of tensors. Holds no tensor.
        opaque: why the call cannot be repeated from them; ``None`` if it can.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.opaque: str | None = None
        self._slots: dict[int, _Slot] = {}
        self.pattern = (self._take(args), self._take(kwargs))

    def _take(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if not _has_version(value):
                self.opaque = "it is given tensors that autograd cannot save (inference mode, torch.func)"
            if id(value) not in self._slots:
                self._slots[id(value)] = _Slot(len(self.tensors))
                self.tensors.append(value)
            return self._slots[id(value)]
        if not _is_container(value):
            if not isinstance(value, _STEADY):
                kind = type(value).__name__
                hint = " (use_cache=False)" if "Cache" in kind else ""
                self.opaque = f"it is given a {kind}, which it may change; call it without{hint}"
            return value
        return _mapped(self._take, value)

    def nbytes_on(self, device: torch.device) -> int:
        """Bytes of their storages on a device, each storage once, parameters left out."""
        storages = {}
        for tensor in self.tensors:
            if tensor.device == device and is_plain(tensor) and not isinstance(tensor, nn.Parameter):
                storage = tensor.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
        return sum(storages.values())


def _fill(pattern: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if type(pattern) is _Slot:
        return tensors[pattern]
    return _mapped(lambda item: _fill(item, tensors), pattern) if _is_container(pattern) else pattern


def _is_container(value: Any) -> bool:
    return type(value) in (tuple, list, dict) or (isinstance(value, tuple) and hasattr(value, "_fields"))


def _mapped(function: Callable[[Any], Any], container: Any) -> Any:
    if type(container) is dict:
        return {key: function(item) for key, item in container.items()}
    make = type(container) if type(container) in (tuple, list) else container._make
    return make(map(function, container))


class _Call:
    """Runs a module as it was called, and again from the tensors that were saved of that call.

    The first run gets the caller's own lists and dicts, which it may fill; those of later runs are ours.
    """

    def __init__(
        self,
        module: nn.Module,
        run: Callable[..., Any],
        inputs: CallInputs,
        first: tuple[Any, Any],
    ) -> None:
        self.edits: str | None = None
        """After the first run: what it has edited in place that cannot be put back."""
        self._module = module
        self._run = run
        self._pattern = inputs.pattern
        self._versions = [(tensor, tensor._version) for tensor in inputs.tensors]
        self._first: tuple[Any, Any] | None = first
        self._state = _State(module)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if self._first is None:
            return self._run_again(tensors)
        (args, kwargs), self._first = self._first, None
        result = self._run(*args, **kwargs)
        self.edits = self._state.settle(self._module)
        if any(tensor._version != version for tensor, version in self._versions):
            self.edits = "an input"
        self._versions.clear()
        return result

    def _run_again(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        self._state.check_weights(self._module)
        args, kwargs = _fill(self._pattern, tensors)
        undo = self._state.put_back()
        try:
            with self._state.reach.as_before():
                return self._run(*args, **kwargs)
        finally:
            _set(undo)


class _State:
    """What a module had remembered before one call, as far as the call has changed it."""

    def __init__(self, module: nn.Module) -> None:
        parts = list(module.modules())
        self._modes: list[_Attribute] = [(part.__dict__, "training", part.training) for part in parts]
        self._attributes = [(part.__dict__, part.__dict__.copy()) for part in parts]
        self.reach = Reach(parts)
        self._buffers = [
            (part._buffers, name, buffer, buffer._version, buffer.detach().clone())
            for part in parts
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]
        self._changed: list[_Attribute] = []
        self._copies: list[_Attribute] = []
        self._steady: list[tuple[torch.Tensor, int]] = []

    def settle(self, module: nn.Module) -> str | None:
        """After the call: keep what is needed to repeat it. Returns what was edited in place and cannot be put back."""
        changed = set(map(id, self.reach.settle()))
        for attributes, before in self._attributes:
            if changed:  # they may be replaced before the repetition: a list of losses by a new one, say
                self._changed += [(attributes, name, value) for name, value in before.items() if id(value) in changed]
            if len(attributes) == len(before) and all(map(operator.is_, attributes.values(), before.values())):
                continue  # as nearly always
            self._changed += [
                (attributes, name, value)
                for name, value in before.items()
                if attributes.get(name, _ABSENT) is not value and name != "training"
            ]
            # What the call has made anew may be looked for: "if not hasattr(self, ...)".
            self._changed += [(attributes, name, _ABSENT) for name in attributes.keys() - before.keys()]
        self._attributes.clear()
        parts = list(module.modules())
        # Batch norms update their statistics without raising a version.
        silent = {id(part._buffers) for part in parts if isinstance(part, _NormBase)}
        for owner, name, buffer, version, copy in self._buffers:
            if id(owner) in silent or owner.get(name) is not buffer or buffer._version != version:
                self._copies.append((owner, name, copy))
            else:
                self._steady.append((buffer, version))
        self._buffers.clear()
        for part in parts:
            self._steady += [(weight, weight._version) for weight in part._parameters.values() if weight is not None]
        return self.reach.edited

    def put_back(self) -> list[_Attribute]:
        """Before a repetition. Returns what to set afterwards. Buffers are copies of copies: it may be repeated again.

        The module's own are set aside, not written to, because others may have saved them.
        """
        scratch = [(owner, name, copy.clone()) for owner, name, copy in self._copies]
        wanted = [*self._modes, *self._changed, *scratch]
        now = [(owner, name, owner.get(name, _ABSENT)) for owner, name, _ in wanted]
        _set(wanted)
        return now

    def check_weights(self, module: nn.Module) -> None:
        """Raise as plain PyTorch does, which compares the weights that it has saved."""
        for tensor, version in self._steady:
            if tensor._version != version:
                named: Iterator[tuple[str, torch.Tensor]] = itertools.chain(
                    module.named_parameters(), module.named_buffers()
                )
                name = next((name for name, other in named if other is tensor), "a weight")
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"{name} of a recomputed {type(module).__name__} is at version {tensor._version}; expected version "
                    f"{version} instead. Run backward before weights change, or do not recompute this block"
                )


_ABSENT = object()


def _set(attributes: list[_Attribute]) -> None:
    for owner, name, value in attributes:
        if value is _ABSENT:
            owner.pop(name, None)
        else:
            owner[name] = value
