"""Copies that autocast makes of weights that wait: copies in another type, which are saved like activations."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from lightning_ssd.common.accelerators import device_types

__all__ = ["tell_of_casts"]

_log = logging.getLogger(__name__)


def tell_of_casts(module: torch.nn.Module, waits: Callable[[torch.Tensor], bool]) -> bool:
    """Log what autocast's copies of the weights take, where it may cast those of a module that is about to run.

    It casts float32 alone, and holds copies of trained weights (unless ``cache_enabled=False``) until its own end.

    Args:
        module: whose weights may wait.
        waits: whether one does.

    Returns:
        Whether it was told.
    """
    kinds = [kind for kind in device_types() if torch.is_autocast_enabled(kind)]
    if not kinds or not torch.is_autocast_cache_enabled():
        return False
    for weight in module.parameters():
        if weight.dtype is torch.float32 and weight.device.type in kinds and waits(weight):
            break
    else:
        return False
    dtype = torch.get_autocast_dtype(weight.device.type)
    if dtype is torch.float32:
        return False
    _log.warning(
        "autocast computes with copies in %s of weights that wait: those of trained weights stay in memory until the "
        "forward is over, together up to half of the bytes of these weights; those that backward needs, of frozen "
        "weights, too, are saved, and written, like activations. Where that is too much, use weights of that type "
        '(precision="bf16-true", with OffloadPolicy(master_weights=True) where they are trained; the numbers differ)',
        str(dtype).removeprefix("torch."),
    )
    return True
