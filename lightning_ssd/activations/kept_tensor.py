"""A tensor that stays in memory: what autograd gets to hold of it, and what it gets back.

This is the hot path of small tensors. What autograd holds is a bare tuple, because a class of its own would cost as
much as all the rest: the tensor, its version, and what an error would have to say of who made it, or of a leaf a weak
reference.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from lightning_ssd.common.inplace_edits import Origin, inplace_error

__all__ = ["Kept", "edited_error", "give_back", "keep"]

Kept = tuple[Any, ...]


def keep(tensor: torch.Tensor, is_view: bool) -> Kept:
    """Hold ``tensor`` for autograd without holding the graph that made it. Copies nothing.

    Args:
        tensor: of any kind.
        is_view: ``tensor._is_view()``, which the caller has asked already.
    """
    node = tensor.grad_fn
    if node is None:
        # A leaf may be held itself. Held undetached, the result of an operation would own its own graph: a leak. By the
        # weak reference PyTorch refuses to swap it for another tensor, as it does what autograd holds itself.
        return tensor, tensor._version, weakref.ref(tensor)
    return tensor.detach(), tensor._version, node.name(), node._sequence_nr(), tensor.output_nr, is_view


def give_back(kept: Kept) -> torch.Tensor:
    """The tensor, with the values that it was kept with.

    Raises:
        RuntimeError: it was edited in place since, in PyTorch's words.
    """
    tensor: torch.Tensor = kept[0]
    if tensor._version != kept[1]:
        raise edited_error(*kept)
    return tensor


def edited_error(tensor: torch.Tensor, expected: int, *made_by: Any) -> RuntimeError:
    """Return PyTorch's error for a tensor that was kept, and edited in place since.

    Args:
        tensor: kept.
        expected: its version then.
        made_by: the rest of what was kept: who made it, and, of a large one, a reference to the tensor itself. Of a
            small one who made the value that was kept is named also where PyTorch would name who edited it since: a
            reference costs each tensor that is kept a quarter more time.
    """
    origin = None
    if len(made_by) > 1:
        name, number, output_nr, is_view, *reference = made_by
        origin = Origin(name, number, output_nr, is_view, reference[0] if reference else None)
    description = tensor.dtype, tensor.device, tensor.size()
    return inplace_error(description, origin, version=tensor._version, expected=expected)
