"""What the scheduler decides: when it traces and plans, what is bounded, what its numbers say."""

import math
import re

import pytest

from lightning_ssd.planning.placement import Placement
from lightning_ssd.planning.plan import Machine, PlanObjective, TierRates
from lightning_ssd.planning.planner import make_plan, smallest_budget
from lightning_ssd.scheduling.clock import HostClock
from lightning_ssd.telemetry.metrics import METRICS
from tests.support.fake_passes import (
    COUNT,
    FAST,
    NBYTES,
    SLOW,
    LateClock,
    machine_of,
    make_trace,
    opened,
    planned,
    run_pass,
)
from tests.support.stored_plans import plan_by

# -- tracing and planning ---------------------------------------------------------------------------------------------


def test_the_first_pass_moves_and_is_traced_and_so_is_the_second_which_follows_a_plan():
    trace = make_trace()
    with opened() as made:
        cursor, wants_trace = run_pass(made, trace)
        assert wants_trace
        assert cursor.followed is None
        assert cursor.limit_bytes is None, "it waits for nothing"
        made.wait()
        cursor, wants_trace = run_pass(made, trace)
        known = cursor.completed()
        assert wants_trace
        assert known.trace.storages is trace.storages
        assert known.trace.moved_bytes == COUNT * NBYTES, "everything"
        assert Placement.SSD in known.plan.placements
        made.wait()
        cursor, wants_trace = run_pass(made, trace)
        known = cursor.completed()
        assert not wants_trace
        assert known.trace is made.trace
        assert 0 < known.trace.moved_bytes < COUNT * NBYTES


@pytest.mark.parametrize("clock", [HostClock, LateClock])
def test_a_plan_is_not_left_to_a_pass_that_warmed_up(clock):
    """The first ones map memory and take longer; where drives need that time, the others stall."""
    with opened() as made:
        for step_s in (9.0, 5.0, *10 * [2.0]):
            plans = made._kinds["a"].plans.values() if made._kinds else ()
            stall_s = 0.5 * any(known.plan.keep_step_s > step_s for known in plans)
            trace = make_trace(step_s=step_s)
            end_s = step_s + stall_s
            cursor, _ = planned(made, trace, step_s=end_s, stall_s=stall_s, clock=clock, available_bytes=1 << 40)
        assert cursor.followed.plan.keep_step_s == 2.0


def test_passes_of_two_lengths_have_their_plans_and_are_not_traced_for_ever():
    """Tracing takes time itself, and one signature may stand for short passes and long ones, in turns."""
    with opened() as made:
        num_traced = 0
        for number in range(60):
            count = 12 if number % 2 else 6
            trace = make_trace(count, step_s=count / 6)
            cursor, wants_trace = run_pass(made, trace, step_s=count / 6, available_bytes=1 << 40)
            num_traced += wants_trace
            made.wait()
            assert cursor.followed is not None or number < 6
        assert 2 <= num_traced <= 5


def test_each_signature_and_each_sequence_of_sizes_has_its_plan():
    with opened() as made:
        for count, signature in ((12, "a"), (8, "a"), (6, "b")):
            for _ in range(2):
                planned(made, make_trace(count), signature=signature)
        for count, signature in ((12, "a"), (6, "b"), (8, "a")):
            cursor, wants_trace = run_pass(made, make_trace(count), signature=signature)
            assert not wants_trace
            known = cursor.completed()
            assert len(known.sizes) == count
        assert made.num_plans == 3


@pytest.mark.parametrize("counts", [(12,), (6, 12)], ids=["one size", "two in turns"])
def test_one_pass_that_hiccups_changes_nothing_and_two_do(counts):
    """Also where passes of one kind save other sizes in turns: each has a plan."""
    with opened() as made:
        for _ in range(4):
            for count in counts:
                planned(made, make_trace(count), available_bytes=1 << 40)

        def wants(*stalls):
            return [
                run_pass(made, make_trace(count), step_s=1 + s, stall_s=s, available_bytes=1 << 40)[1]
                for s in stalls
                for count in counts
            ]

        calm = [0.0] if len(counts) == 1 else []  # two of them hiccup one after the other
        assert not any(wants(*calm, *(4.0, 0.0) * len(calm)))
        is_wanted = [*wants(4.0, 4.0), made.cursor("a", level_bytes=0, available_bytes=1 << 40)[1]]
        assert any(is_wanted), "the next pass was to be traced"
        assert made._kinds["a"].model.excess > 1


def test_passes_for_which_nothing_may_move_need_no_hooks_and_are_planned_again_more_and_more_rarely(monkeypatch):
    """The pass in which a rest ends is traced, and planned for."""
    planned = []

    def counted(*args):
        planned.append(number)
        return make_plan(*args)

    plan_by(monkeypatch, counted)
    ample = 1 << 40
    with opened(machine=machine_of(Machine())) as made:
        for number in range(500):
            cursor, _ = run_pass(made, make_trace(), available_bytes=ample)
            assert cursor.keeps(COUNT * NBYTES) is (number > 0)
            made.wait()
        assert planned == [0, 65, 193, 449]


def test_a_drive_that_has_become_slow_is_given_less():
    trace, now = make_trace(), [FAST]
    with opened(machine=lambda: now[0]) as made:
        planned(made, trace)
        before = made.cursor("a", level_bytes=0, available_bytes=None)[0]
        # Ten storages per second. (One per second would not slow the pass down: nearly all writes would be taken back.)
        now[0] = Machine(ssd=TierRates(write_bytes_per_s=1e7, read_bytes_per_s=1e7))
        for _ in range(6):
            planned(made, trace)
        after = made.cursor("a", level_bytes=0, available_bytes=None)[0]
        placed = [[cursor.place(NBYTES) for _ in range(COUNT)] for cursor in (before, after)]
        assert placed[0].count(Placement.SSD) > placed[1].count(Placement.SSD) + 2
        assert made.num_plans == 2


def test_a_plan_that_recomputes_is_traced_again():
    """Its pass saves other things: until it has been seen, nothing is known of it."""
    trace = make_trace(blocks=True)
    floor = smallest_budget(trace, SLOW, PlanObjective(recompute=True))
    with opened(machine=machine_of(SLOW), activation_budget=max(floor, 6 * NBYTES), recompute=True) as made:
        planned(made, trace)
        cursor, wants_trace = made.cursor("a", level_bytes=0, available_bytes=None)
        assert cursor.recompute, "on a drive as slow as this, recomputing was expected"
        assert wants_trace
        assert cursor.followed is None


@pytest.mark.parametrize("limit", [{"activation_budget": 6 * NBYTES}, {"wear_bytes_per_day": 1}, {}])
def test_without_consent_nothing_is_recomputed(limit):
    """Neither for a budget, nor for wear, nor where memory is scarce."""
    with opened(machine=machine_of(SLOW), **limit) as made:
        for _ in range(4):
            cursor, _ = planned(made, make_trace(blocks=True), available_bytes=5 * NBYTES)
            assert not cursor.recompute
            assert not made.cursor("a", level_bytes=0, available_bytes=5 * NBYTES)[0].recompute


def test_an_error_of_the_planner_is_not_swallowed(monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("injected")

    plan_by(monkeypatch, broken)
    with opened() as made:
        run_pass(made, make_trace())
        with pytest.raises(ZeroDivisionError, match="injected"):
            made.wait()


# -- bounds and numbers -----------------------------------------------------------------------------------------------


def test_kinds_and_plans_are_bounded():
    with opened() as made:
        for number in range(100):
            planned(made, make_trace(3), signature=str(number))
        for count in range(1, 21):
            planned(made, make_trace(count), signature="x")
        assert len(made._kinds) == 64
        assert max(len(kind.plans) for kind in made._kinds.values()) == 8


def test_readings_are_those_of_the_last_pass():
    trace = make_trace()
    with opened() as made:
        run_pass(made, trace)
        assert made.readings() is None
        made.wait()
        cursor, _ = run_pass(made, trace, step_s=1.25)
        known, readings = cursor.completed(), made.readings()
        assert set(readings) == {metric.key for metric in METRICS if metric.key.startswith("plan/")}
        assert readings["plan/predicted_step_s"] == known.plan.prediction.step_s
        assert readings["plan/predicted_peak_gib"] == known.plan.prediction.peak_bytes
        assert readings["plan/measured_step_s"] == 1.25
        assert readings["plan/measured_peak_gib"] == NBYTES
        assert (readings["plan/num_plans"], readings["plan/recomputed_gib"]) == (1, 0)


@pytest.mark.parametrize(("wear", "others", "left"), [(4, 0, 4), (6, 2, 4), (4, 5, 0)])
def test_the_limit_of_wear_is_that_of_one_pass_beside_other_writers(wear, others, left):
    per_day = 86_400 * NBYTES  # a storage per second, and a pass takes one
    with opened(wear_bytes_per_day=wear * per_day, max_slowdown=9.0) as made:
        made.other_writes = lambda: others * per_day
        planned(made, make_trace())
        known = run_pass(made, make_trace())[0].completed()
        assert known.goal.written_bytes == left * NBYTES
        assert known.plan.prediction.written_bytes <= left * NBYTES
        assert (known.plan.prediction.written_bytes > 0) is (left > 0)
        assert math.isfinite(known.plan.prediction.step_s)


@pytest.mark.parametrize(
    ("wear", "machine", "is_told"), [(5_000_000, FAST, True), (10**12, FAST, False), (5_000_000, Machine(), False)]
)
def test_a_wear_budget_that_blocks_every_move_is_told_of(wear, machine, is_told):
    with opened(machine=machine_of(machine), wear_bytes_per_day=wear) as made:
        for _ in range(2):
            planned(made, make_trace())
        # Nearly all of twelve storages, in a pass of a second.
        told = r"wear_budget allows this process 5.0 MB per day and the plan needs 1\.\d+ TB per day"
        assert bool(re.fullmatch(told, str(made.unusable))) is is_told
