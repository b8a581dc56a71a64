"""What autocast makes of weights that wait: copies in another type, and how the same are made again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lightning_ssd.common.accelerators import device_types
from lightning_ssd.common.tensors import Region

__all__ = ["cast", "is_cast", "plain_tensors", "tell_of_casts"]

_log = logging.getLogger(__name__)
_CHUNK_NUMEL = (1 << 15) - 64
"""Of a cast: so few that PyTorch does not share them among threads. A NaN that is cast alone has other bits than one in
a vector, and where vectors end may depend on where threads begin."""


def tell_of_casts(module: torch.nn.Module, waits: Callable[[torch.Tensor], bool]) -> bool:
    """Log what autocast's copies of the weights take, where it may cast those of a module that is about to run.

    It casts float32 alone, and holds copies of trained weights (unless ``cache_enabled=False``) until its own end. Of
    frozen weights it holds none, and on a CPU backward has them made again.

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
        is_held = weight.requires_grad or weight.device.type != "cpu"
        if is_held and weight.dtype is torch.float32 and weight.device.type in kinds and waits(weight):
            break
    else:
        return False
    dtype = torch.get_autocast_dtype(weight.device.type)
    if dtype is torch.float32:
        return False
    _log.warning(
        "autocast computes with copies in %s of weights that wait: those of trained weights stay in memory until the "
        "forward is over, together up to half of the bytes of these weights; those that backward needs%s are saved, "
        "and written, like activations. Where that is too much, use weights of that type "
        '(precision="bf16-true", with OffloadPolicy(master_weights=True) where they are trained; the numbers differ)',
        str(dtype).removeprefix("torch."),
        "" if weight.device.type == "cpu" else ", of frozen weights, too,",
    )
    return True


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Compute outside of whatever modes and transforms the caller is in: they are meant for what it computes itself."""
    with torch._C._DisableFuncTorch(), _disable_current_modes(), torch.inference_mode(False):
        yield


def cast(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy in another type, whose bits are the same each time, whatever the threads.

    Args:
        flat: one dimension, whole in memory.
        dtype: of the copy.
    """
    copy = torch.empty(flat.numel(), dtype=dtype, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK_NUMEL):
        chunk = slice(start, start + _CHUNK_NUMEL)
        copy[chunk].copy_(flat[chunk])
    return copy


def is_cast(copy: Region, dtype: torch.dtype, flat: torch.Tensor) -> bool:
    """Whether memory of the host has the bits that :func:`cast` gives. Of most that has not, a glance tells.

    Args:
        copy: that may be one.
        dtype: of the copy.
        flat: one dimension, whole in memory.
    """
    expected = torch.empty(_CHUNK_NUMEL, dtype=dtype, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK_NUMEL):
        source = flat[start : start + _CHUNK_NUMEL]
        expected[: source.numel()].copy_(source)
        nbytes = source.numel() * dtype.itemsize
        found = Region(copy.address + start * dtype.itemsize, nbytes)
        if not found.equals(Region(expected.data_ptr(), nbytes)):
            return False
    return True
