"""The simulator: by hand, and the laws that every played pass obeys."""

import time
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ssd.planning.bound import bound
from lightning_ssd.planning.lifetimes import Lifetimes
from lightning_ssd.planning.placement import Placement
from lightning_ssd.planning.plan import Machine
from lightning_ssd.planning.simulator import predict
from lightning_ssd.planning.trace import Trace
from tests.support.traces import HOST, KEEP, SSD, machines, network, passes, placements, simulate, ssd, storage, trace


def three(*, last_used=None):
    """Packed at 0, 1, 2 s, wanted back at 5, 4, 3 s; 100 bytes each, each freed when the next one is wanted."""
    storages = [storage(100, i, 5 - i, 6 - i, last_used=None if last_used is None else last_used) for i in range(3)]
    return trace(storages, forward_end=3, end=6)


def played(case, places, machine, *, limit=None, ahead=100):
    return simulate(case, places, machine, limit_bytes=limit, ahead_bytes=ahead)


def moves(done):
    return [(one.what, one.number, one.start_s, one.end_s) for one in done.moves]


def stalls(done):
    return [(one.start_s, one.end_s, one.number, one.what) for one in done.stalls]


def test_a_drive_that_keeps_up_costs_nothing():
    done = played(three(), [SSD, SSD, KEEP], ssd(100))
    assert moves(done) == [("write", 0, 0, 1), ("write", 1, 1, 2), ("read", 1, 3, 4), ("read", 0, 4, 5)]
    assert done.stalls == []
    # 2 is there from 2 s to 4 s; 1 comes back from 3 s on, 0 from 4 s on, when 2 has just gone.
    assert done.resident == [
        (0, 100),
        (1, 0),
        (1, 100),
        (2, 0),
        (2, 100),
        (3, 200),
        (4, 100),
        (4, 200),
        (5, 100),
        (6, 0),
        (6, 0),
    ]
    p = done.prediction
    assert (p.step_s, p.stall_s, p.peak_bytes, p.written_bytes, p.read_bytes) == (6, 0, 200, 200, 200)
    assert p.host_bytes == 0


def test_slow_reads_are_waited_for():
    done = played(three(), [SSD, SSD, KEEP], ssd(100, 50))
    # 1 is read from 3 s to 5 s and wanted at 4 s; 0 is issued then, and wanted one second later.
    assert moves(done)[2:] == [("read", 1, 3, 5), ("read", 0, 5, 7)]
    assert stalls(done) == [(4, 5, 1, "late"), (6, 7, 0, "late")]
    assert done.prediction.step_s == 8
    # Had both been issued at once, the second would have been under way while the first was waited for: no gain here.
    assert played(three(), [SSD, SSD, KEEP], ssd(100, 50), ahead=200).prediction.step_s == 8


def test_pack_waits_for_room_and_reads_respect_the_limit():
    done = played(three(), [SSD, SSD, KEEP], ssd(50, 100), limit=150, ahead=200)
    # Writes of 2 s each: 1 is let in at 2 s, 2 (due at 3 s by then) at 4 s. Nothing may be read beside 2, or beside 1.
    assert stalls(done) == [(1, 2, 1, "room"), (3, 4, 2, "room"), (6, 7, 1, "late"), (8, 9, 0, "late")]
    assert done.prediction.peak_bytes == 100
    assert done.prediction.step_s == 10


def test_nothing_left_to_wait_for_exceeds_the_limit():
    done = played(three(), [SSD, KEEP, KEEP], ssd(50), limit=150)
    assert done.prediction.peak_bytes == 200
    assert stalls(done)[0] == (1, 2, 1, "room")


def test_what_has_not_left_is_forwarded_and_its_write_cancelled():
    done = played(three(), [SSD, SSD, KEEP], ssd(10), ahead=200)
    assert moves(done) == [("write", 0, 0, 10)]  # under way: it ends. That of 1 never begins.
    p = done.prediction
    assert (p.written_bytes, p.read_bytes, p.stall_s, p.peak_bytes) == (100, 0, 0, 300)


def test_a_cancelled_write_takes_no_time_of_the_channel():
    storages = [
        storage(100, 0, 7, 8),
        storage(100, 0, 1, 2),  # taken back at 1 s, while 0 is still written
        storage(100, 0, 6, 7),
    ]
    done = played(trace(storages, end=8), [SSD, SSD, SSD], ssd(50, 100), ahead=0)
    # Window 0: one storage goes ahead alone. At 1 s that is 2 (forwarded: it has not begun either).
    assert moves(done)[0] == ("write", 0, 0, 2)
    assert all(m[1] == 0 for m in moves(done))
    storages[2] = storage(100, 3, 6, 7)
    done = played(trace(storages, end=8), [SSD, SSD, SSD], ssd(50, 100), ahead=0)
    assert ("write", 2, 3, 5) in moves(done)  # not after a write of 1 from 2 s to 4 s


def test_memory_goes_with_the_last_use():
    done = played(three(last_used=2.5), [SSD, KEEP, KEEP], ssd(100))
    assert (2.5, 200) in done.resident  # 0 has been written since 1 s, and goes only now
    late = played(trace([storage(100, 0, 2, 4, last_used=3)], end=4), [SSD], ssd(100))
    assert late.prediction.read_bytes == 0  # wanted before anybody let go: no read
    assert late.prediction.peak_bytes == 100


def test_never_wanted_is_just_freed():
    done = played(trace([storage(100, 0, None, 5), storage(100, 0, None, 0.5)], end=6), [SSD, SSD], ssd(100))
    assert moves(done) == [("write", 0, 0, 1)]  # the other one was freed before its turn
    assert done.prediction.peak_bytes == 200


@pytest.mark.parametrize(
    ("places", "machine", "match"),
    [
        ([KEEP], Machine(), "1 placements for 3"),
        ([SSD, KEEP, KEEP], Machine(), "allowed here"),
        ([HOST, KEEP, KEEP], ssd(1), "allowed here"),
        ([Placement.RECOMPUTE, KEEP, KEEP], ssd(1), "allowed here"),
        ([SSD, KEEP, KEEP], ssd(0), "rates above 0"),
    ],
)
def test_what_cannot_be_played_is_refused(places, machine, match):
    with pytest.raises(ValueError, match=match):
        played(three(), places, machine)


def test_an_order_that_contradicts_the_storages_is_refused():
    case = three()
    with pytest.raises(ValueError, match=r"Trace\.order"):
        Lifetimes(Trace(storages=case.storages, order=(2, 1), forward_end_s=3, end_s=6))


@st.composite
def played_passes(draw):
    case, machine = draw(passes()), draw(machines())
    limit = draw(st.one_of(st.none(), st.integers(0, 500)))
    return case, machine, draw(placements(case, machine)), limit, draw(st.integers(0, 300))


@given(played_passes())
@settings(derandomize=True, deadline=None, max_examples=150, database=None)
def test_laws(drawn):
    case, machine, places, limit, ahead = drawn
    done = simulate(case, places, machine, limit_bytes=limit, ahead_bytes=ahead)
    p = done.prediction
    assert p == predict(Lifetimes(case), places, machine, limit_bytes=limit, ahead_bytes=ahead)
    assert p.step_s == pytest.approx(case.end_s + sum(s.end_s - s.start_s for s in done.stalls))
    assert p.stall_s == pytest.approx(p.step_s - case.end_s)
    # Memory.
    levels = [nbytes for _, nbytes in done.resident]
    assert min(levels) >= 0
    assert max(levels) == p.peak_bytes
    assert levels[-1] == 0
    # Channels: one transfer at a time, at the rate; hence no more bytes in any window than the rate allows.
    ended = {}
    for tier, rate in ((SSD, machine.ssd), (HOST, machine.host)):
        for direction in ("write", "read"):
            booked = [t for t in done.moves if (t.placement, t.what) == (tier, direction)]
            assert all(a.end_s <= b.start_s for a, b in pairwise(booked))
            for t in booked:
                speed = rate.write_bytes_per_s if direction == "write" else rate.read_bytes_per_s
                assert t.end_s - t.start_s == pytest.approx(t.nbytes / speed, abs=1e-9)
                ended[t.what, t.number] = t.end_s
                if direction == "read":
                    assert ended["write", t.number] <= t.start_s
                else:
                    assert case.storages[t.number].packed_s <= t.start_s
    assert len(ended) == len(done.moves)  # nothing moves twice in a direction
    moved = {(t.placement, t.what): 0 for t in done.moves}
    for t in done.moves:
        moved[t.placement, t.what] += t.nbytes
    assert p.written_bytes == moved.get((SSD, "write"), 0)
    assert p.read_bytes == moved.get((SSD, "read"), 0)
    assert p.host_bytes == moved.get((HOST, "write"), 0)


@given(passes())
@settings(derandomize=True, deadline=None, max_examples=100, database=None)
def test_keeping_all_is_the_trace(case):
    p = predict(Lifetimes(case), [KEEP] * len(case.storages), Machine(), limit_bytes=None, ahead_bytes=0)
    assert p.step_s == case.end_s
    # Equal unless something lives for no time at all: the trace's own sum lets that go before it comes.
    assert p.peak_bytes >= case.saved_peak_bytes
    if all(s.packed_s < s.freed_s for s in case.storages):
        lively = all(s.wanted_s is None or s.wanted_s < s.freed_s for s in case.storages)
        assert not lively or p.peak_bytes == case.saved_peak_bytes


def test_speed():
    case = network(80, 50, nbytes=1_000_000, forward_s=0.02, backward_s=0.04)
    lives, best = Lifetimes(case), float("inf")
    for _ in range(5):
        begin = time.thread_time()
        predict(lives, [SSD] * 4000, ssd(1e9), limit_bytes=None, ahead_bytes=100_000_000)
        best = min(best, time.thread_time() - begin)
    assert best < 0.2  # measured: 0.012 s; of this thread, since the machine of a test may be busy


laws = settings(derandomize=True, deadline=None, max_examples=150, database=None)
_SLACK_S = 1e-9


@st.composite
def plans(draw):
    case, machine = draw(passes()), draw(machines())
    return Lifetimes(case), draw(placements(case, machine)), machine, draw(st.integers(0, 300))


def test_by_hand():
    fast = bound(Lifetimes(three()), [SSD, SSD, KEEP], ssd(100), limit_bytes=None, ahead_bytes=100)
    assert (fast.step_s, fast.peak_bytes, fast.min_peak_bytes) == (6, 200, 200)
    # 0 is written until 10 s and 1 until 20 s; then they are read, 1 (wanted at 4 s) until 30 s, 0 until 40 s.
    slow = bound(Lifetimes(three()), [SSD, SSD, KEEP], ssd(10), limit_bytes=None, ahead_bytes=100)
    assert (slow.step_s, slow.peak_bytes, slow.min_peak_bytes) == (41, 300, 200)
    tight = bound(Lifetimes(three()), [SSD, SSD, KEEP], ssd(50, 100), limit_bytes=100, ahead_bytes=100)
    # Packs wait until 2 s and 4 s, so that backward begins at 5 s; 1 is read from 6 s to 7 s, and 0 from 8 s to 9 s.
    assert tight.step_s == 10
    assert tight.min_peak_bytes == 100


def test_stalls_give_writes_no_more_time():
    """0 is waited for from 1 s to 2 s. 1, packed a second later, is gone a second later, with or without that wait."""
    case = trace([storage(100, 0, 1, 1.5), storage(100, 2, None, 9), storage(100, 3.5, None, 9)], end=9)
    found = bound(Lifetimes(case), [SSD, SSD, KEEP], ssd(100), limit_bytes=None, ahead_bytes=0)
    assert (found.step_s, found.peak_bytes) == (10, 100)


@given(plans())
@laws
def test_it_bounds_the_simulator(plan):
    lives, places, machine, ahead = plan
    limits = bound(lives, places, machine, limit_bytes=None, ahead_bytes=ahead)
    real = predict(lives, places, machine, limit_bytes=None, ahead_bytes=ahead)
    assert real.step_s <= limits.step_s + _SLACK_S
    assert real.peak_bytes <= limits.peak_bytes
    assert limits.min_peak_bytes <= limits.peak_bytes


def faster(rates, write, read):
    return rates and replace(
        rates, write_bytes_per_s=rates.write_bytes_per_s + write, read_bytes_per_s=rates.read_bytes_per_s + read
    )


@given(plans(), st.one_of(st.none(), st.integers(0, 500)), st.integers(0, 300), st.integers(0, 300))
@laws
def test_a_faster_machine_is_never_worse(plan, limit, write, read):
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
def test_a_larger_limit_is_never_worse(plan, limit, more):
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
def test_a_wider_window_is_faster_and_larger(plan, limit, more):
    lives, places, machine, ahead = plan
    before = bound(lives, places, machine, limit_bytes=limit, ahead_bytes=ahead)
    after = bound(lives, places, machine, limit_bytes=limit, ahead_bytes=ahead + more)
    assert after.step_s <= before.step_s + _SLACK_S
    if limit is None or not lives.is_simple:
        assert after.min_peak_bytes >= before.min_peak_bytes
    elif after.min_peak_bytes <= limit:
        assert before.min_peak_bytes <= limit
