"""Compute the signature of a step: the shapes of its batch, and the modes that change what forward saves."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from lightning_ssd.common.accelerators import device_types

__all__ = ["signature_of"]

_MAX_DEPTH = 16
"""Depth of containers below which only types count. It also ends containers that contain themselves."""


def signature_of(arguments: Any, module: torch.nn.Module) -> Hashable:
    """Return a value that is equal for steps with equal shapes, training modes, autocast and trained parameters.

    Such steps save equal tensors, unless control flow depends on data. They are then distinguished by the tensors.
    """
    return (
        _shape(arguments, _MAX_DEPTH),
        any(torch.is_autocast_enabled(kind) for kind in device_types()),
        _modes(module),
    )


def _modes(root: torch.nn.Module) -> bytes:
    """Return a flag per module (in training) and parameter (trained). ``Module.parameters()`` is four times slower."""
    modules, known = [root], {root}
    flags: list[bool] = []
    for module in modules:
        flags.append(module.training)
        for parameter in module._parameters.values():
            if parameter is not None:
                flags.append(parameter.requires_grad)
        for child in module._modules.values():
            if child is not None and child not in known:
                known.add(child)
                modules.append(child)
    return bytes(flags)


def _shape(value: Any, depth: int) -> Hashable:
    if isinstance(value, torch.Tensor):
        # A nested tensor has no shape, or one with a symbol of its own in each batch.
        return value.dim() if value.is_nested else tuple(value.shape), value.dtype
    if depth > 0:
        if isinstance(value, Mapping):
            # Keys that are no text count by type, because numbers and tensors may differ in each batch.
            return tuple(
                (key if isinstance(key, str) else type(key).__name__, _shape(item, depth - 1))
                for key, item in value.items()
            )
        if isinstance(value, list | tuple):
            return tuple(_shape(item, depth - 1) for item in value)
        if is_dataclass(value) and not isinstance(value, type):
            # A field that is not set by the constructor may be missing.
            return tuple(_shape(getattr(value, field.name, None), depth - 1) for field in fields(value))
    # Only the type: numbers (the index of the batch) change in each step, and do not change what is saved.
    return type(value).__name__
