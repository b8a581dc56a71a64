"""Float32 copies of half-precision parameters, which the optimizer updates in their place.

A step of 1e-4 is less than half the distance of two bfloat16 numbers around 0.1: added to the parameter itself it is
lost. So the copy takes the updates, the parameter is the copy rounded, and the copy moves with the optimizer's other
states (mixed-precision training, arXiv 1710.03740, section 3.1). Gradients stay as they are until their own subgroup is
updated and are widened there (MLP-Offload, arXiv 2509.02480, delayed gradient conversion).
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
    """Whether the parameter is of a kind that gets a float32 copy: a plain dense one of half precision."""
    return parameter.dtype in _HALF and class_of(parameter) in PLAIN_TYPES and parameter.layout == torch.strided


def to_master(piece: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
    """What the optimizer updates instead of ``piece``: its float32 copy with the widened gradient, and its state.

    Wherever the parameter is no longer what the copy rounds to, somebody has changed it (loaded weights, pruned,
    swapped in an average), and the copy follows.

    Args:
        piece: a parameter or a slice of one, with its ``grad``.
        state: of it; what is of the parameter's own type and size in it is widened, too.
    """
    mine = {key: _widened(value, piece) for key, value in state.items()}
    master: torch.Tensor | None = mine.pop(MASTER, None)
    now = piece.detach()
    if master is None:
        master = now.float()
    else:
        is_changed = master.to(now.dtype) != now
        if master.device.type != "cpu" or is_changed.any():  # to ask a device takes longer than to copy
            master.copy_(torch.where(is_changed, now.float(), master))
    if isinstance(piece, nn.Parameter):  # an optimizer may go by what it is, and by marks on it
        marks, requires_grad = vars(piece), piece.requires_grad
        master = nn.Parameter(master, requires_grad=requires_grad)
        vars(master).update(marks)
    master.grad = None if piece.grad is None else piece.grad.float()
    return master, mine


def from_master(piece: torch.Tensor, master: torch.Tensor, state: State) -> State:
    """Round the updated copy into the parameter; the copy joins the state."""
    master.grad = None
    if isinstance(master, nn.Parameter):
        master = master.detach()
    piece.detach().copy_(master)
    return {**state, MASTER: master}


def _widened(value: Any, piece: torch.Tensor) -> Any:
    """States that the optimizer has made for the parameter itself are of its type."""
    if is_bare(value) and value.dtype == piece.dtype and value.numel() == piece.numel():
        return value.float()
    return value
