"""Stalls count what the device lost, not what Python waited."""

from __future__ import annotations

from lightning_ssd.clock import HostClock
from lightning_ssd.events import EventLog, StallEvent
from lightning_ssd.stalls import Stalls
from lightning_ssd.stats import Counters


class Device(HostClock):
    """Has got as far as ``passed_s``; nobody may ask for more."""

    noise_s = 0.25

    def __init__(self) -> None:
        self.passed_s = 0.0

    def has_passed(self, stamp: float) -> bool:  # type: ignore[override]
        return stamp <= self.passed_s

    def seconds(self, start: float, end: float) -> float:  # type: ignore[override]
        assert self.has_passed(end), "the host would wait for the device"
        return end - start


class Told:
    def __init__(self) -> None:
        self.device = Device()
        self.counters, self.events, self.num_late = Counters(), EventLog(), 0
        self.stalls = Stalls(self.device, self.counters, self.events, self._late_read)

    def _late_read(self) -> None:
        self.num_late += 1

    def wait(self, begin: float, end: float, *, for_read: bool = True) -> None:
        self.stalls.add(7, 100.0, begin, end, for_read=for_read)


def test_a_stall_counts_when_the_device_has_passed_it() -> None:
    told = Told()
    told.wait(1.0, 3.0)
    assert (told.counters.stall_s, told.num_late) == (0, 0)
    told.device.passed_s = 2.0
    told.stalls.settle()
    assert told.counters.stall_s == 0
    told.device.passed_s = 3.0
    told.stalls.settle()
    told.stalls.settle()
    assert (told.counters.stall_s, told.num_late) == (2, 1)
    assert told.events.drain() == [StallEvent(7, 100.0, 102.0)]


def test_the_next_one_settles_those_before() -> None:
    told = Told()
    told.device.passed_s = 5.0
    told.wait(6.0, 7.0)
    told.wait(4.0, 5.0)  # behind one that has not been passed: its turn comes
    assert told.counters.stall_s == 0
    told.device.passed_s = 9.0
    told.wait(8.0, 8.5, for_read=False)
    assert (told.counters.stall_s, told.num_late) == (2.5, 2), "waiting for room is no late read"


def test_a_wait_that_cost_the_device_nothing_is_no_stall() -> None:
    """Python waited, and the device was busy all the time: both stamps lie next to each other in its stream."""
    told = Told()
    told.device.passed_s = 9.0
    told.wait(4.0, 4.25)
    assert (told.counters.stall_s, told.num_late, told.events.drain()) == (0, 0, [])
