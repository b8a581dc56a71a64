"""The arguments of one call of a module: the tensors apart, the rest as a pattern to put them into."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lightning_ssd.common.tensors import PLAIN_TYPES

__all__ = ["CallInputs", "apart", "fill", "is_plain"]

# Their values never change, or it is the model's own business whether they are called once or twice.
_STEADY = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, enum.Enum, type, nn.Module),
    *(types.FunctionType, types.BuiltinFunctionType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)


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


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """Return these bytes with hooks of their own, and with a node where every kind of tensor has views."""
    if not tensor.requires_grad:
        return tensor
    leaf = tensor.detach().requires_grad_()
    return leaf if tensor.is_leaf or not is_plain(tensor) else leaf.view_as(leaf)


class _Slot(int):
    """The place of a tensor among the inputs."""


class CallInputs:
    """The arguments of one call: tensors apart, the rest as a pattern to put them into.

    A tensor that stands in several places stays one tensor: attention computes otherwise where query is key.

    Attributes:
        tensors: each tensor once.
        pattern: ``(args, kwargs)`` with places instead of tensors. Holds no tensor.
        modules: arguments that are modules.
        opaque: why the call cannot be repeated from them; ``None`` if it can.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.modules: list[nn.Module] = []
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
            if isinstance(value, nn.Module):
                self.modules.append(value)
            elif not isinstance(value, _STEADY):
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


def fill(pattern: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The arguments again, with these tensors."""
    if type(pattern) is _Slot:
        return tensors[pattern]
    return _mapped(lambda item: fill(item, tensors), pattern) if _is_container(pattern) else pattern


def _is_container(value: Any) -> bool:
    return type(value) in (tuple, list, dict) or (isinstance(value, tuple) and hasattr(value, "_fields"))


def _mapped(function: Callable[[Any], Any], container: Any) -> Any:
    if type(container) is dict:
        return {key: function(item) for key, item in container.items()}
    make = type(container) if type(container) in (tuple, list) else container._make
    return make(map(function, container))
