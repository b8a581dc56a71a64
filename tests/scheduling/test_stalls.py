"""Stalls count what the device lost, not what Python waited."""

import pytest
import torch

from lightning_ssd.activations import tensor_cache
from lightning_ssd.scheduling.clock import HostClock
from lightning_ssd.scheduling.stalls import Stalls
from lightning_ssd.telemetry.events import EventLog, StallEvent
from lightning_ssd.telemetry.stats import OffloadStats
from tests.support.opened import offloader_in


class Device(HostClock):
    """Has got as far as ``passed_s``; nobody may ask for more."""

    noise_s = 0.25

    def __init__(self):
        self.passed_s = 0.0

    def has_passed(self, stamp):
        return stamp <= self.passed_s

    def seconds(self, start, end):
        assert self.has_passed(end), "the host would wait for the device"
        return end - start


class Told:
    def __init__(self):
        self.device = Device()
        self.counters, self.events, self.num_late = OffloadStats(), EventLog(), 0
        self.stalls = Stalls(self.device, self.counters, self.events, self._late_read)

    def _late_read(self):
        self.num_late += 1

    def wait(self, begin, end, *, for_read=True):
        self.stalls.add(7, 100.0, begin, end, for_read=for_read)


def test_a_stall_counts_when_the_device_has_passed_it():
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


def test_the_next_one_settles_those_before():
    told = Told()
    told.device.passed_s = 5.0
    told.wait(6.0, 7.0)
    told.wait(4.0, 5.0)  # behind one that has not been passed: its turn comes
    assert told.counters.stall_s == 0
    told.device.passed_s = 9.0
    told.wait(8.0, 8.5, for_read=False)
    assert (told.counters.stall_s, told.num_late) == (2.5, 2), "waiting for room is no late read"


# -- through the offloader -------------------------------------------------------------------------------------------


class Behind(HostClock):
    passed = True

    @classmethod
    def has_passed(cls, stamp):
        return cls.passed

    @staticmethod
    def seconds(start, end):
        return 1.0


def run(offloader, *, backward=True):
    x = torch.randn(300, 300, requires_grad=True)
    with offloader.saved_tensors():
        loss = x.exp().sin().cos().sum()
    offloader.flush()
    if backward:
        loss.backward()
        offloader.end_backward()
    return loss


@pytest.fixture
def behind(monkeypatch):
    monkeypatch.setattr(tensor_cache, "clock_of", lambda device: Behind())
    monkeypatch.setattr(Behind, "passed", False)
    return Behind


def test_whoever_asks_after_the_device_has_ended_hears_of_all_stalls(spill_dir, behind):
    with offloader_in(spill_dir, activations="offload", min_tensor_bytes=0) as offloader:
        run(offloader)
        assert offloader.stats.stall_s == 0
        behind.passed = True
        assert offloader.stats.stall_s >= 1
        behind.passed = False
        run(offloader)
        before = offloader.stats.stall_s
        behind.passed = True
    assert offloader.stats.stall_s > before, "the last ones count at close"


@pytest.mark.parametrize("activations", ["offload", "auto"])
def test_a_graph_that_lives_on_collects_no_stalls_for_ever(spill_dir, activations, monkeypatch):
    monkeypatch.setattr("lightning_ssd.activations.saved_pass._MAX_STALLS", 5)
    budget = {"activation_budget": 800_000} if activations == "auto" else {}
    with offloader_in(spill_dir, activations=activations, min_tensor_bytes=0, **budget) as offloader:
        kept = run(offloader, backward=False)
        for _ in range(10):
            run(offloader)
        passes = list(offloader._opened()._passes)
        assert passes
        held = max(len(one.stalls) for one in passes)
        assert held == (0 if activations == "offload" else 5)
        assert offloader.stats.stall_s > 0
        del kept, passes


def test_a_pass_that_is_entered_twice_counts_each_stall_once(spill_dir):
    with offloader_in(spill_dir, min_tensor_bytes=0, activation_budget=800_000) as offloader:
        x = torch.randn(300, 300, requires_grad=True)
        entered = offloader.saved_tensors()
        with entered:
            first = x.exp().sin().cos()
        with entered:
            second = x.sin().cos().exp()
        offloader.flush()
        cache = offloader._opened()
        with cache.accounting.lock:
            cache._passes.stalled(1.0, 2.0)
        (current,) = cache._passes
        assert current.stalls.count((1.0, 2.0)) == 1
        (first + second).sum().backward()
        offloader.end_backward()
