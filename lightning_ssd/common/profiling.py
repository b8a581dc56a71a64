"""Name the phases of the package in a profiler's trace.

The names are ``record_function`` ranges of PyTorch's profiler, on any device; workers show with
``experimental_config=torch.profiler._ExperimentalConfig(profile_all_threads=True)``. For Nsight Systems
``torch.autograd.profiler.emit_nvtx()`` makes NVTX ranges of those of the training thread.

| range | thread | what happens |
|---|---|---|
| ``lightning_ssd::begin`` | worker | a move begins: the producer is waited for, and room on the drive is taken |
| ``lightning_ssd::copy`` | worker | a copy between the device and a staging buffer is queued |
| ``lightning_ssd::device`` | any | waits until the device has got to a mark |
| ``lightning_ssd::write``, ``::read`` | worker | bytes of a chunk go to the file, or come from it |
| ``lightning_ssd::stall`` | training | waits for a read, or for room |
| ``lightning_ssd::fetch`` | training | gets the states of a subgroup |
| ``lightning_ssd::update`` | training | the optimizer updates a subgroup |
| ``lightning_ssd::flush`` | training | lays the states out again and gives them to the writers |
| ``lightning_ssd::plan`` | planner | a plan is made |

There is no range per saved tensor: what stays in memory costs nothing here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd import profiler

__all__ = ["span", "spanned"]

P = ParamSpec("P")
R = TypeVar("R")

_NOTHING: AbstractContextManager[Any] = nullcontext()


def span(name: str) -> AbstractContextManager[Any]:
    """Return a context for one phase. Without a profiler it is always the same context, which does nothing."""
    # Set by a profiler of any thread; reading it is cheaper than calling what tells it.
    return torch.profiler.record_function(name) if profiler._is_profiler_enabled else _NOTHING


def spanned(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function whose every call is one phase."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def within_span(*args: P.args, **kwargs: P.kwargs) -> R:
            if not profiler._is_profiler_enabled:  # to enter what does nothing costs two more calls
                return function(*args, **kwargs)
            with torch.profiler.record_function(name):
                return function(*args, **kwargs)

        return within_span

    return decorate
