"""Tiers of host memory, closed after the test; copies that wait until they are let through."""

from types import SimpleNamespace

import pytest

from lightning_ssd.telemetry.events import EventLog
from lightning_ssd.tiers import transfer_queue
from lightning_ssd.tiers.host import HostTier
from lightning_ssd.tiers.streams import HostCopies
from tests.support.host_traffic import MIB
from tests.support.late import HeldCopies


@pytest.fixture
def make_tier():
    tiers = []

    def make(copies=None, *, capacity=8 * MIB, events=None, **extra):
        tier = HostTier(capacity, copies or HostCopies(), pin=False, events=events or EventLog(), **extra)
        tiers.append(tier)
        return tier

    yield make
    for tier in tiers:
        if isinstance(tier.copies, HeldCopies):
            tier.copies.free_run()
        tier.close()


@pytest.fixture
def held():
    return HeldCopies()


@pytest.fixture
def worker_clock(monkeypatch):
    """The time of all transfers, as a list of one number: it stands still, however busy the machine is."""
    now_s = [0.0]
    stopped = SimpleNamespace(perf_counter=lambda: now_s[0], thread_time=lambda: now_s[0])
    monkeypatch.setattr(transfer_queue, "time", stopped)
    return now_s
