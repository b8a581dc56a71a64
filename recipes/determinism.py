"""Bits that repeat, for recipes that compare bits.

On a CUDA device atomic additions come in any order, and attention's backward and some of cuBLAS use them: without
:func:`make_deterministic` not even plain training equals itself.

A CPU repeats its bits with equal numbers of threads, but for the first call of a vectorised function. MKL (2024.2,
which PyTorch's CPU builds carry; mended in 2025.0) looks a function's kernel up then. Where two threads of one
operation make that call together, one of them can get the kernel of low accuracy. So the first ``tanh`` of a process
is now and then wrong in its last bits. See https://github.com/pytorch/pytorch/issues/188792.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch

__all__ = ["FUNCTIONS", "make_deterministic", "settle_first_calls"]

FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "expm1", "lgamma", "log", "log10"),
    *("log1p", "log2", "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
)
"""Functions of :mod:`torch` with one argument that may be computed by MKL's vector library."""

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


@functools.cache
def settle_first_calls() -> None:
    """Call each function once, on one element and so on one thread. Once per process, 30 ms; changes no result."""
    for dtype in (torch.float32, torch.float64):
        number = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for function in FUNCTIONS:
            getattr(torch, function)(number)
