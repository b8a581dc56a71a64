"""Writes give way to urgent reads, for a while."""

from __future__ import annotations

import threading
import time

import pytest

from lightning_ssd.tiers.read_priority import UrgentGate, patience_s

LONG_S = 60.0
"""Only what has waited in vain takes as long."""


@pytest.mark.parametrize(
    ("chunk_s", "expected"), [(0.0, 0.05), (0.012, 0.05), (0.02, 0.08), (0.1, 0.4), (0.125, 0.5), (9.0, 0.5)]
)
def test_patience_is_bounded(chunk_s: float, expected: float) -> None:
    assert patience_s(chunk_s) == pytest.approx(expected)


def test_open_while_nothing_is_urgent() -> None:
    start = time.perf_counter()
    UrgentGate().wait(LONG_S)
    assert time.perf_counter() - start < LONG_S


def test_waits_for_the_last_and_no_longer_than_asked() -> None:
    gate = UrgentGate()
    gate.enter(1)
    gate.enter(2)
    gate.leave(1)
    start = time.perf_counter()
    gate.wait(0.05)
    assert time.perf_counter() - start >= 0.05
    assert gate.num_urgent == 1
    threading.Timer(0.05, gate.leave, args=(2,)).start()
    gate.wait(LONG_S)
    assert 0.09 <= time.perf_counter() - start < LONG_S
    assert gate.num_urgent == 0
