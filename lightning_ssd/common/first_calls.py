"""The first call of a vectorised CPU function must not come from two threads at once.

MKL (2024.2, which PyTorch's CPU builds carry; mended in 2025.0) looks a function's kernel up at its first call. Where
two threads of one operation make that call together, one of them can get the kernel of low accuracy, for that call
alone: the first ``tanh`` of a process is then now and then wrong in its last bits, and two equal trainings part at
their first step. See https://github.com/pytorch/pytorch/issues/188792.
"""

from __future__ import annotations

import functools

import torch

__all__ = ["FUNCTIONS", "settle_first_calls"]

FUNCTIONS = (
    "acos",
    "asin",
    "atan",
    "cos",
    "cosh",
    "erf",
    "erfc",
    "erfinv",
    "exp",
    "expm1",
    "lgamma",
    "log",
    "log10",
    "log1p",
    "log2",
    "rsqrt",
    "sigmoid",
    "sin",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
    "trunc",
)
"""Functions of :mod:`torch` with one argument that may be computed by MKL's vector library."""


@functools.cache
def settle_first_calls() -> None:
    """Call each function once, on one element and so on one thread. Once per process, 30 ms; changes no result."""
    for dtype in (torch.float32, torch.float64):
        number = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for function in FUNCTIONS:
            getattr(torch, function)(number)
