"""Keep float32 copies of half-precision parameters, and let the optimizer update these in their place.

An update of 1e-4 is less than half the distance of two bfloat16 numbers around 0.1: added to the parameter itself it is
lost. So the optimizer updates the copy, the parameter is the rounded copy, and the copy is offloaded with the other
states (mixed-precision training, arXiv 1710.03740, section 3.1). Gradients stay in half precision until their subgroup
is updated, and are converted then (MLP-Offload, arXiv 2509.02480, delayed gradient conversion).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_ssd.common.tensors import PLAIN_TYPES, class_of
from lightning_ssd.optimizer.step.layout import is_bare
from lightning_ssd.optimizer.step.types import State

__all__ = ["MASTER", "from_master", "has_master", "to_master"]

MASTER = "ssd_master_weight"
"""Name of the copy among the states of its parameter."""
_HALF = (torch.bfloat16, torch.float16)


def has_master(parameter: torch.Tensor) -> bool:
    """Return whether the parameter gets a float32 copy: it is a plain dense parameter in half precision."""
    return parameter.dtype in _HALF and class_of(parameter) in PLAIN_TYPES and parameter.layout == torch.strided


def to_master(piece: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
    """Return the tensor that the optimizer updates instead of ``piece``, and its state, both in float32.

    The tensor is the float32 copy with the converted gradient. Where the parameter differs from the rounded copy, the
    program has changed it (loaded weights, pruned it, swapped in an average). The copy takes over these elements.
    """

    def is_like(value: Any) -> bool:
        """Return whether the optimizer has made a state for the parameter itself, and so in its type."""
        return is_bare(value) and value.dtype == piece.dtype and value.numel() == piece.numel()

    mine = {key: value.float() if is_like(value) else value for key, value in state.items()}
    master: torch.Tensor | None = mine.pop(MASTER, None)
    now = piece.detach()
    if master is None:
        master = now.float()
    else:
        is_changed = master.to(now.dtype) != now
        if master.device.type != "cpu" or is_changed.any():  # waiting for a device's answer takes longer than the copy
            master.copy_(torch.where(is_changed, now.float(), master))
    if isinstance(piece, nn.Parameter):  # an optimizer may test for the class, and for attributes
        marks, requires_grad = vars(piece), piece.requires_grad
        master = nn.Parameter(master, requires_grad=requires_grad)
        vars(master).update(marks)
    master.grad = None if piece.grad is None else piece.grad.float()
    return master, mine


def from_master(piece: torch.Tensor, master: torch.Tensor, state: State) -> State:
    """Round the updated copy into the parameter; return the state with the copy in it."""
    master.grad = None
    if isinstance(master, nn.Parameter):
        master = master.detach()
    piece.detach().copy_(master)
    return {**state, MASTER: master}
