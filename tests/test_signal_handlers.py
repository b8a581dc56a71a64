"""A signal handler, or a finalizer, that runs while its thread holds a lock of ours asks for numbers, and gets some."""

import gc
import signal
import threading

import pytest
import torch

from lightning_ssd import offloader as offloader_module
from lightning_ssd.telemetry.stats import OffloadStats
from tests.support.helpers import EAGER, PLANNING, open_offloader, within
from tests.support.offloader_steps import step


@pytest.fixture
def at_a_lock(monkeypatch, tmp_path):
    """An offloader, and what is called while a pack holds the lock of its accounting."""
    calls = []
    with open_offloader(tmp_path, EAGER) as offloader:
        accounting = offloader._opened().accounting
        note_peaks = accounting._note_peaks

        def wrapped():
            assert accounting.lock.locked()
            while calls:
                calls.pop()()
            note_peaks()

        monkeypatch.setattr(accounting, "_note_peaks", wrapped)
        yield offloader, calls


def pack(offloader):
    with offloader.saved_tensors():
        torch.randn(64, 64, requires_grad=True).exp().sin().sum()


def numbers(offloader):
    return offloader.stats, offloader.optimizer_stats, offloader.drain_metrics()["io/write_gib"], offloader.drive_rates


def test_a_signal_handler(at_a_lock):
    offloader, calls = at_a_lock
    step(offloader)
    known, found = offloader.stats, list[OffloadStats]()
    calls.append(lambda: signal.raise_signal(signal.SIGUSR1))
    before = signal.signal(signal.SIGUSR1, lambda *_: found.append(offloader.stats))
    try:
        pack(offloader)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert found == [known]


def test_a_finalizer(at_a_lock):
    offloader, calls = at_a_lock
    found = []

    class Dashboard:
        def __init__(self):
            self.me = self

        def __del__(self):
            found.append(numbers(offloader)[:3])

    def die():
        Dashboard()
        gc.collect()

    calls.append(die)
    within(60, lambda: step(offloader))
    assert found == [(OffloadStats(), (), 0.0)]


def test_a_lock_that_comes_later_in_the_order(tmp_path, monkeypatch):
    """A worker that holds it asks, while the thread that trains holds the first one and waits for the second."""
    found = []
    with open_offloader(tmp_path, EAGER) as offloader:
        cache = offloader._opened()
        queue, lock = cache._tiers.ssd._writes, cache.accounting.lock
        claim, claims, holds = queue._claim, threading.Event(), threading.Event()

        def claimed(lane):
            if not found:
                claims.set()
                assert holds.wait(30)
                found.append(offloader.stats)
            return claim(lane)

        monkeypatch.setattr(queue, "_claim", claimed)

        def train():
            with offloader.saved_tensors():
                y = torch.randn(64, 64, requires_grad=True).exp()
            assert claims.wait(30), "else all may be over before the worker has begun"
            with lock:
                holds.set()
                with queue._lock:
                    assert found
            y.sum().backward()

        within(60, train)
    assert len(found) == 1


def test_whoever_holds_the_lock_of_a_queue_gets_all_numbers(tmp_path):
    with open_offloader(tmp_path, EAGER) as offloader:
        step(offloader)
        ssd = offloader._opened()._tiers.ssd
        expected, found = offloader.stats, list[OffloadStats]()

        def ask():
            with ssd._writes._lock, ssd._reads._lock:
                found.append(offloader.stats)

        within(60, ask)
        assert found == [expected]


@pytest.mark.parametrize(
    ("name", "setup"), [("close", EAGER), ("flush", EAGER), ("wait_for_plan", PLANNING)], ids=lambda one: str(one)[:13]
)
def test_what_has_to_wait_is_refused(name, setup, tmp_path, monkeypatch):
    monkeypatch.setattr(offloader_module, "_PATIENCE_S", 0.1)
    with open_offloader(tmp_path, setup) as offloader:
        step(offloader)
        with offloader._opened().accounting.lock, pytest.raises(RuntimeError, match=rf"^{name}\(\) has waited 0.1 s"):
            within(60, getattr(offloader, name))
        assert offloader.is_open
        step(offloader)
        within(60, getattr(offloader, name))
        assert offloader.is_open == (name != "close")
