"""When something happened on the device: the host's clock on CPU, events in the stream on CUDA.

On CUDA the Python thread runs ahead of the device, so that its own clock says nothing of when a tensor was made. A
*stamp* is taken where things happen and turned into seconds later, when the device has passed it.
"""

from __future__ import annotations

import time
from typing import Any, Protocol, cast

import torch

__all__ = ["Clock", "CudaClock", "HostClock", "Stamp", "clock_of"]

Stamp = Any
"""What a clock's ``stamp`` returned; only that clock can read it."""


class Clock(Protocol):
    """Takes stamps cheaply, reads them later."""

    lag: int
    """How many passes later a stamp can be read without waiting."""
    noise_s: float
    """Two stamps may be so far apart although nothing happened between them."""

    def stamp(self) -> Stamp:
        """This moment of the current stream."""

    def has_passed(self, stamp: Stamp) -> bool:
        """Whether the device has got there."""

    def seconds(self, start: Stamp, end: Stamp) -> float:
        """From one stamp to another; waits until the device has passed both."""


class HostClock:
    """Work is done when a call returns."""

    lag = 0
    noise_s = 0.0
    stamp = staticmethod(time.perf_counter)

    @staticmethod
    def has_passed(stamp: Stamp) -> bool:
        return True

    @staticmethod
    def seconds(start: Stamp, end: Stamp) -> float:
        return cast(float, end - start)


class CudaClock:
    """Timing events in the current stream of one CUDA device."""

    lag = 1
    noise_s = 20e-6  # some microseconds lie between two events with nothing between; a guess, measured on no GPU yet

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stamp(self) -> Stamp:
        constructor: Any = torch.cuda.Event  # PyTorch leaves it without types
        event = constructor(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    @staticmethod
    def has_passed(stamp: Stamp) -> bool:
        return cast(bool, stamp.query())

    @staticmethod
    def seconds(start: Stamp, end: Stamp) -> float:
        start.synchronize()  # it may come from another stream, and so not lie before the end
        end.synchronize()
        return cast(float, start.elapsed_time(end)) / 1000


def clock_of(device: torch.device) -> Clock:
    """The clock that tells when work on ``device`` is done."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
