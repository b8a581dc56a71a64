"""When something happened on the device: the host's clock on CPU, events in the stream on a device.

There the Python thread runs ahead of the device, so that its own clock says nothing of when a tensor was made. A
*stamp* is taken where things happen and turned into seconds later, when the device has passed it.
"""

from __future__ import annotations

import time
from typing import Any, Protocol, cast

import torch

from lightning_ssd.common.accelerators import Accelerator, accelerator_of

__all__ = ["Clock", "EventClock", "HostClock", "Stamp", "clock_of"]

Stamp = Any
"""The return value of a clock's ``stamp``; only that clock can read it."""


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


class EventClock:
    """Timing events in the current stream of one device."""

    lag = 1
    noise_s = 20e-6  # some microseconds lie between two events with nothing between; a guess, measured on no GPU yet

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def stamp(self) -> Stamp:
        event = self._accelerator.timing_event()
        event.record(self._accelerator.current_stream())
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
    accelerator = accelerator_of(device)
    return HostClock() if accelerator is None else EventClock(accelerator)
