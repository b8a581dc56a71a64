"""Stamps become seconds; the CUDA clock asks nothing that the device has not passed."""

import time

import pytest
import torch

from lightning_ssd.scheduling.clock import EventClock, HostClock, clock_of


class FakeEvent:
    """An event that refuses, as CUDA does, to tell its time before somebody has waited for it."""

    def __init__(self, now_ms):
        self.now_ms = now_ms
        self.passed = False

    def synchronize(self):
        self.passed = True

    def query(self):
        return self.passed

    def elapsed_time(self, end):
        if not (self.passed and end.passed):
            raise RuntimeError("device not ready")
        return end.now_ms - self.now_ms


def test_the_host_clock_counts_seconds():
    clock = clock_of(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    assert clock.lag == 0
    begin = clock.stamp()
    time.sleep(0.02)
    seconds = clock.seconds(begin, clock.stamp())
    assert 0.02 <= seconds < 10
    assert clock.seconds(begin, begin) == 0


def test_the_cuda_clock_waits_for_both_ends_and_converts_milliseconds():
    begin, end = FakeEvent(1000.0), FakeEvent(1250.0)
    assert not EventClock.has_passed(end)
    assert EventClock.seconds(begin, end) == 0.25
    assert EventClock.has_passed(end)
    assert EventClock.seconds(FakeEvent(3.0), FakeEvent(1.0)) == pytest.approx(-0.002), "another stream may be ahead"


def test_the_cuda_clock_stamps_the_stream_that_is_current_at_the_call(monkeypatch):
    recorded = []

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self, stream):
            recorded.append(stream)

    streams = iter(["first", "second"])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: (next(streams), device))
    device = torch.device("cuda", 3)
    clock = clock_of(device)
    assert isinstance(clock, EventClock)
    assert clock.lag == 1, "the pass before the one that is being queued is over"
    assert type(clock.stamp()) is type(clock.stamp()) is Event
    assert recorded == [("first", device), ("second", device)]


@pytest.mark.gpu
def test_the_cuda_clock_counts_what_the_device_does_not_what_the_host_does():
    device = torch.device("cuda", torch.cuda.current_device())
    clock, side = clock_of(device), torch.cuda.Stream(device)
    # CUDA loads a kernel when it is first launched, and waits for the device meanwhile: not between the stamps.
    torch.cuda._sleep(1)
    torch.cuda.synchronize(device)
    begin_s, begin = time.perf_counter(), clock.stamp()
    torch.cuda._sleep(100_000_000)
    end, queued_s = clock.stamp(), time.perf_counter() - begin_s
    with torch.cuda.stream(side):
        elsewhere = clock.stamp()
    seconds = clock.seconds(begin, end)
    assert queued_s < seconds < time.perf_counter() - begin_s
    assert clock.seconds(elsewhere, end) > 0.5 * seconds, "the side stream did not wait"
