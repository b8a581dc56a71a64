"""Bits that repeat on a CUDA device, for recipes that compare bits.

Atomic additions come in any order there, and attention's backward and some of cuBLAS use them: without this not even
plain training equals itself. A CPU repeats its bits as it is (with equal numbers of threads), so nothing is set there.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

__all__ = ["make_deterministic"]

_WORKSPACE = ":4096:8"
"""Of cuBLAS, per stream: eight buffers of 4 MiB. The smaller of the two values that PyTorch allows costs speed."""
_REFUSED = "does not have a deterministic implementation"
"""In PyTorch's error about an operation."""


def make_deterministic(device: str | torch.device, trial: Callable[[], None] | None = None) -> str:
    """Let this process choose operations that repeat their bits; on a CUDA device alone, before it is first used.

    Fused attention repeats its bits only where PyTorch is told to *fail* without a deterministic operation, not where
    it is told to warn. So failing is what is asked for, and ``trial`` finds out what would fail: if anything does,
    PyTorch is told to warn instead, and the answer names the operation.

    Args:
        device: that trains.
        trial: runs every operation once; without one, an operation that cannot repeat its bits is an error later on.

    Returns:
        A sentence for the results; empty where nothing was set.
    """
    if torch.device(device).type != "cuda":
        return ""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _WORKSPACE)  # read when cuBLAS is first called
    # The filling shows uses of memory that nobody has written. It costs a kernel for each empty tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        if trial is not None:
            trial()
    except RuntimeError as error:
        if _REFUSED not in str(error):
            raise
        torch.use_deterministic_algorithms(True, warn_only=True)
        return f"NOT deterministic: {str(error).partition(_REFUSED)[0].strip()} {_REFUSED} on CUDA"
    return "deterministic operations only"
