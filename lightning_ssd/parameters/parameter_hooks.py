"""The hooks of a parameter whose gradients are offloaded."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch.utils.hooks import RemovableHandle

__all__ = ["ParameterHooks"]


class ParameterHooks:
    """Hooks of one parameter, which is held weakly. So PyTorch refuses to swap it (``torch.utils.swap_tensors``)."""

    def __init__(self, parameter: torch.Tensor, handles: Sequence[RemovableHandle]) -> None:
        self._parameter = weakref.ref(parameter)
        self._handles = handles

    @property
    def parameter(self) -> torch.Tensor | None:
        return self._parameter()

    def remove(self) -> None:
        """Remove the hooks, and dictionaries that have no other hook: after a swap PyTorch would call none in them."""
        for handle in self._handles:
            handle.remove()
        parameter = self._parameter()
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks") if parameter is not None else ():
            hooks = getattr(parameter, name)
            if hooks is not None and not hooks:
                setattr(parameter, name, None)
