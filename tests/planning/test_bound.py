"""The bound is a bound, and nothing better makes it worse."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ssd.planning.bound import bound
from lightning_ssd.planning.lifetimes import Lifetimes
from lightning_ssd.planning.placement import Placement
from lightning_ssd.planning.plan import Machine, TierRates
from lightning_ssd.planning.simulator import predict
from lightning_ssd.planning.trace import Trace
from tests.support.traces import KEEP, SSD, machines, passes, placements, ssd, storage, trace

laws = settings(derandomize=True, deadline=None, max_examples=150, database=None)
_SLACK_S = 1e-9


@st.composite
def plans(draw: st.DrawFn) -> tuple[Lifetimes, tuple[Placement, ...], Machine, int]:
    case, machine = draw(passes()), draw(machines())
    return Lifetimes(case), draw(placements(case, machine)), machine, draw(st.integers(0, 300))


def three() -> Trace:
    return trace([storage(100, i, 5 - i, 6 - i) for i in range(3)], forward_end=3, end=6)


def test_by_hand() -> None:
    fast = bound(Lifetimes(three()), [SSD, SSD, KEEP], ssd(100), limit_bytes=None, ahead_bytes=100)
    assert (fast.step_s, fast.peak_bytes, fast.min_peak_bytes) == (6, 200, 200)
    # 0 is written until 10 s and 1 until 20 s; then they are read, 1 (wanted at 4 s) until 30 s, 0 until 40 s.
    slow = bound(Lifetimes(three()), [SSD, SSD, KEEP], ssd(10), limit_bytes=None, ahead_bytes=100)
    assert (slow.step_s, slow.peak_bytes, slow.min_peak_bytes) == (41, 300, 200)
    tight = bound(Lifetimes(three()), [SSD, SSD, KEEP], ssd(50, 100), limit_bytes=100, ahead_bytes=100)
    # Packs wait until 2 s and 4 s, so that backward begins at 5 s; 1 is read from 6 s to 7 s, and 0 from 8 s to 9 s.
    assert tight.step_s == 10
    assert tight.min_peak_bytes == 100


def test_stalls_give_writes_no_more_time() -> None:
    """0 is waited for from 1 s to 2 s. 1, packed a second later, is gone a second later, with or without that wait."""
    case = trace([storage(100, 0, 1, 1.5), storage(100, 2, None, 9), storage(100, 3.5, None, 9)], end=9)
    found = bound(Lifetimes(case), [SSD, SSD, KEEP], ssd(100), limit_bytes=None, ahead_bytes=0)
    assert (found.step_s, found.peak_bytes) == (10, 100)


@given(plans())
@laws
def test_it_bounds_the_simulator(plan: tuple[Lifetimes, tuple[Placement, ...], Machine, int]) -> None:
    lives, places, machine, ahead = plan
    limits = bound(lives, places, machine, limit_bytes=None, ahead_bytes=ahead)
    real = predict(lives, places, machine, limit_bytes=None, ahead_bytes=ahead)
    assert real.step_s <= limits.step_s + _SLACK_S
    assert real.peak_bytes <= limits.peak_bytes
    assert limits.min_peak_bytes <= limits.peak_bytes


def faster(rates: TierRates | None, write: int, read: int) -> TierRates | None:
    return rates and replace(
        rates, write_bytes_per_s=rates.write_bytes_per_s + write, read_bytes_per_s=rates.read_bytes_per_s + read
    )


@given(plans(), st.one_of(st.none(), st.integers(0, 500)), st.integers(0, 300), st.integers(0, 300))
@laws
def test_a_faster_machine_is_never_worse(
    plan: tuple[Lifetimes, tuple[Placement, ...], Machine, int], limit: int | None, write: int, read: int
) -> None:
    lives, places, machine, ahead = plan
    better = Machine(ssd=faster(machine.ssd, write, read), host=faster(machine.host, read, write))
    before = bound(lives, places, machine, limit_bytes=limit, ahead_bytes=ahead)
    after = bound(lives, places, better, limit_bytes=limit, ahead_bytes=ahead)
    assert after.step_s <= before.step_s + _SLACK_S
    assert after.min_peak_bytes == before.min_peak_bytes
    if limit is None:
        assert after.peak_bytes <= before.peak_bytes


@given(plans(), st.integers(0, 500), st.integers(0, 300))
@laws
def test_a_larger_limit_is_never_worse(
    plan: tuple[Lifetimes, tuple[Placement, ...], Machine, int], limit: int, more: int
) -> None:
    lives, places, machine, ahead = plan
    before = bound(lives, places, machine, limit_bytes=limit, ahead_bytes=ahead)
    after = bound(lives, places, machine, limit_bytes=limit + more, ahead_bytes=ahead)
    free = bound(lives, places, machine, limit_bytes=None, ahead_bytes=ahead)
    assert free.step_s - _SLACK_S <= after.step_s <= before.step_s + _SLACK_S
    if before.min_peak_bytes <= limit:
        assert after.min_peak_bytes <= limit + more
    if not lives.is_simple:
        assert free.min_peak_bytes == after.min_peak_bytes == before.min_peak_bytes


@given(plans(), st.one_of(st.none(), st.integers(0, 500)), st.integers(0, 300))
@laws
def test_a_wider_window_is_faster_and_larger(
    plan: tuple[Lifetimes, tuple[Placement, ...], Machine, int], limit: int | None, more: int
) -> None:
    lives, places, machine, ahead = plan
    before = bound(lives, places, machine, limit_bytes=limit, ahead_bytes=ahead)
    after = bound(lives, places, machine, limit_bytes=limit, ahead_bytes=ahead + more)
    assert after.step_s <= before.step_s + _SLACK_S
    if limit is None or not lives.is_simple:
        assert after.min_peak_bytes >= before.min_peak_bytes
    elif after.min_peak_bytes <= limit:
        assert before.min_peak_bytes <= limit
