"""Tiers of host memory, closed after the test, and copies that wait until they are let through."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightning_ssd.events import EventLog
from lightning_ssd.storage.host_tier import HostTier
from lightning_ssd.storage.streams import Copies
from tests.storage.host_traffic import MIB, MakeTier
from tests.storage.late import HeldCopies


@pytest.fixture
def make_tier() -> Iterator[MakeTier]:
    tiers: list[HostTier] = []

    def make(
        copies: Copies | None = None, *, capacity: int = 8 * MIB, events: EventLog | None = None, **extra: int
    ) -> HostTier:
        tier = HostTier(capacity, copies, pin=False, events=events or EventLog(), **extra)
        tiers.append(tier)
        return tier

    yield make
    for tier in tiers:
        if isinstance(tier.copies, HeldCopies):
            tier.copies.free_run()
        tier.close()


@pytest.fixture
def held() -> HeldCopies:
    return HeldCopies()
