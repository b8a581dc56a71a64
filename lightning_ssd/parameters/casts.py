"""What autocast makes of weights that wait: copies, which nobody here looks after."""

from __future__ import annotations

import logging

import torch

__all__ = ["tell_of_casts"]

_log = logging.getLogger(__name__)


def tell_of_casts(module: torch.nn.Module) -> bool:
    """Log once what autocast's copies of the weights take, where it casts those of a module that is about to run.

    Returns:
        Whether it was told.
    """
    weight = next((p for p in module.parameters() if p.dtype.is_floating_point), None)
    if weight is None or not torch.is_autocast_enabled(weight.device.type):
        return False
    dtype = torch.get_autocast_dtype(weight.device.type)
    if weight.dtype is dtype:
        return False
    _log.warning(
        "autocast computes with copies of the weights that wait, in %s: those of trained weights stay in memory until "
        "the forward is over, together %.0f%% of the weights' bytes, and those that backward needs are saved like "
        'activations. Where that is too much, use weights of that type (precision="bf16-true", with '
        "OffloadPolicy(master_weights=True) where they are trained; the numbers differ)",
        str(dtype).removeprefix("torch."),
        100 * dtype.itemsize / weight.dtype.itemsize,
    )
    return True
