"""How long training waited for transfers, which on CUDA is known only when the device has got there.

Python runs ahead of a CUDA device. That it waits there for a transfer costs nothing while the device has work left;
what counts is the time between two stamps in the stream, one before the wait and one after it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lightning_ssd.scheduling.clock import Clock, Stamp
from lightning_ssd.telemetry.events import EventLog, StallEvent
from lightning_ssd.telemetry.stats import OffloadStats

__all__ = ["Stalls", "stall_seconds"]


def stall_seconds(clock: Clock, begin: Stamp, end: Stamp) -> float:
    """Return the seconds that the device lost between two stamps that it has passed; 0 for noise of the clock."""
    seconds = clock.seconds(begin, end)
    return seconds if seconds > clock.noise_s else 0.0


@dataclass(frozen=True, slots=True)
class _Stall:
    nbytes: int
    start_s: float
    begin: Stamp
    end: Stamp
    for_read: bool
    in_backward: bool


class Stalls:
    """The accounting lock is held by every caller.

    Args:
        clock: of the device.
        counters: get the seconds.
        events: get one event per stall.
        late_read: told of each read that was waited for.
    """

    def __init__(self, clock: Clock, counters: OffloadStats, events: EventLog, late_read: Callable[[], None]) -> None:
        self._clock = clock
        self._counters = counters
        self._events = events
        self._late_read = late_read
        self._pending: deque[_Stall] = deque()
        self.waited_s = 0.0
        """Seconds that the threads themselves waited, by the host's clock."""

    def add(self, nbytes: int, start_s: float, begin: Stamp, end: Stamp, *, for_read: bool) -> None:
        """This thread has waited.

        Args:
            nbytes: of what it waited for.
            start_s: when it began to, by ``time.perf_counter``.
            begin: the clock's stamp of then.
            end: and of when it was over.
            for_read: what was waited for is a read; else room for something.
        """
        self.waited_s += time.perf_counter() - start_s
        in_backward = torch._C._current_autograd_node() is not None
        self._pending.append(_Stall(nbytes, start_s, begin, end, for_read, in_backward))
        self.settle()

    def settle(self) -> None:
        """Count the stalls that the device has passed."""
        while self._pending and self._clock.has_passed(self._pending[0].end):
            stall = self._pending.popleft()
            seconds = stall_seconds(self._clock, stall.begin, stall.end)
            if not seconds:
                continue
            self._counters.stall_s += seconds
            self._counters.stall_backward_s += seconds if stall.in_backward else 0.0
            self._events.append(StallEvent(stall.nbytes, stall.start_s, stall.start_s + seconds))
            if stall.for_read:
                self._late_read()
