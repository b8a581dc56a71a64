"""A tensor that stays in memory: what autograd gets to hold of it, and what it gets back.

This is the hot path of small tensors. What autograd holds is a bare tuple, because a class of its own would cost as
much as all the rest: the tensor, its version, and of a leaf a weak reference. A large one has its
:class:`~lightning_ssd.activations.kept_storage.Share` behind it. Of a small result in its first version ``replay.py``
has autograd hold the detached tensor alone.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from lightning_ssd.common.inplace_edits import inplace_error

__all__ = ["Kept", "edited_error", "give_back", "keep"]

Kept = tuple[Any, ...]


def keep(tensor: torch.Tensor) -> Kept:
    """Hold ``tensor`` for autograd without holding the graph that made it. Copies nothing.

    Args:
        tensor: of any kind.
    """
    if tensor.grad_fn is None:
        # A leaf may be held itself. Held undetached, the result of an operation would own its own graph: a leak. By the
        # weak reference PyTorch refuses to swap it for another tensor, as it does what autograd holds itself.
        return tensor, tensor._version, weakref.ref(tensor)
    return tensor.detach(), tensor._version


def give_back(kept: Kept) -> torch.Tensor:
    """The tensor, with the values that it was kept with.

    Raises:
        RuntimeError: it was edited in place since.
    """
    tensor: torch.Tensor = kept[0]
    if tensor._version != kept[1]:
        raise edited_error(tensor, kept[1])
    return tensor


def edited_error(tensor: torch.Tensor, expected: int) -> RuntimeError:
    """Return the error for a tensor that was kept, and edited in place since.

    Args:
        tensor: kept.
        expected: its version then.
    """
    return inplace_error((tensor.dtype, tensor.device, tensor.size()), version=tensor._version, expected=expected)
