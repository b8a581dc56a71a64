"""When a plan is doubted, how patiently, and when a rival replaces it."""

import itertools
from dataclasses import replace

import pytest

from lightning_ssd.planning.plan import PlanObjective, TierRates
from lightning_ssd.scheduling.drift import DriftDetector, Measured, is_worth_switching
from lightning_ssd.scheduling.overhead import Overhead
from tests.support.stored_plans import PREDICTION, stored_plan
from tests.support.traces import HOST, KEEP, SSD, storage

RATES = TierRates(write_bytes_per_s=1e9, read_bytes_per_s=2e9)
AS_PREDICTED = Measured(step_s=1.03, overhead=Overhead(stall_s=0.03), peak_bytes=90, written_bytes=50, read_bytes=50)


def known(*placements, goal=None, rates=RATES, movable=True, step_s=1.03, **prediction):
    return stored_plan(
        *placements or (SSD, KEEP),
        sizes=(50, 50),
        storages=(storage(50, 0.0, 0.9, 1.0), storage(50, 0.1, 0.8, 0.9, movable=movable)),
        goal=goal,
        rates=rates,
        prediction=replace(PREDICTION, step_s=step_s, **prediction),
    )


def reason(plan=None, rates=RATES, **measured):
    watch, plan, seen = DriftDetector(), plan or known(), replace(AS_PREDICTED, **measured)
    assert watch.passed(plan, seen, rates) is None
    return watch.passed(plan, seen, rates)


def test_a_pass_as_predicted_is_no_reason():
    assert reason() is None


@pytest.mark.parametrize(
    ("there", "plan", "written"), [(101, (SSD, SSD), 50), (101, (HOST, KEEP), 0), (125, (HOST, HOST), 0)]
)
def test_more_host_memory_is_a_reason_where_a_plan_lacks_it(there, plan, written):
    """It is locked while training goes on. A plan that has all of it in host memory gains nothing."""
    watch, plan = DriftDetector(), replace(known(*plan), host_bytes=80)
    seen = replace(AS_PREDICTED, written_bytes=written)
    told = watch.passed(plan, seen, RATES, host_bytes=there)
    assert told == ("101 bytes of host memory are there, not 80" if there == 101 else None)
    assert watch.passed(plan, seen, RATES, host_bytes=there) is None, "it was asked for"
    assert watch.passed(plan, seen, RATES, host_bytes=100) is None


def test_other_writers_that_leave_less_of_the_wear_budget_are_a_reason():
    assert reason(may_write_bytes=45) is None, "rates vary"
    assert "50 bytes are written where wear_budget leaves 40" in (reason(may_write_bytes=40) or "")
    assert reason(written_bytes=0, may_write_bytes=0) is None


def overhead_of(stall_s=0.0, hook_s=0.0, cpu_s=0.0):
    overhead = Overhead(stall_s=stall_s, hook_s=hook_s, cpu_s=cpu_s)
    return {"overhead": overhead, "step_s": 1 + overhead.total_s}


@pytest.mark.parametrize("step_s", [0.5, 5.0])
def test_how_long_a_pass_takes_is_no_reason(step_s):
    """Whole passes scatter, and batches differ."""
    assert reason(overhead=Overhead(stall_s=0.03 * step_s), step_s=1.03 * step_s) is None


@pytest.mark.parametrize("cause", ["stall_s", "hook_s", "cpu_s"])
def test_overhead_beyond_what_was_asked_and_predicted(cause):
    assert reason(**overhead_of(**{cause: 0.049})) is None
    assert reason(**overhead_of(**{cause: 0.051})) == "an overhead of 5.1 % where 3.0 % was predicted"
    assert reason(known(goal=PlanObjective(max_slowdown=1.1)), **overhead_of(**{cause: 0.051})) is None
    assert reason(known(step_s=1.06), **overhead_of(**{cause: 0.051})) is None, "as predicted"
    within = known(goal=PlanObjective(budget_bytes=100))
    assert reason(within, limit_bytes=100, **overhead_of(**{cause: 0.051})) is None, "under a budget it is the price"
    assert reason(known(KEEP, KEEP, step_s=1.0), **overhead_of(**{cause: 0.051})) is None, "nothing can be moved less"


def test_a_plan_that_costs_little_may_move_more():
    assert reason(**overhead_of(0.016)) is None
    assert reason(**overhead_of(0.014)) == "an overhead of 1.4 % where 3.0 % was predicted"
    assert reason(known(step_s=1.2), **overhead_of(0.024)) == "an overhead of 2.4 % where 20.0 % was predicted", (
        "half of what was asked for"
    )
    assert reason(known(SSD, SSD), **overhead_of(0.0)) is None, "everything moves already"
    assert reason(known(movable=False), **overhead_of(0.0)) is None, "everything that can be moved is"
    assert reason(known(KEEP, KEEP), **overhead_of(0.0)) is None, "rest ends by itself"
    assert reason(known(goal=PlanObjective(budget_bytes=100)), limit_bytes=100, **overhead_of(0.0)) is None


def test_a_hard_limit_that_was_exceeded():
    assert reason(peak_bytes=101, limit_bytes=100) == "101 bytes were resident under a budget of 100"
    assert reason(peak_bytes=100, limit_bytes=100) is None
    assert reason(peak_bytes=10**9) is None, "there was no limit"


def test_a_plan_within_a_limit_that_holds_no_more():
    within = known(goal=PlanObjective(budget_bytes=100))
    assert reason(within, limit_bytes=120) is None
    assert reason(within) == "memory is no longer scarce"


@pytest.mark.parametrize("factor", [0.8, 1.2])
def test_rates_outside_of_the_band(factor):
    write = replace(RATES, write_bytes_per_s=factor * 1e9)
    assert str(reason(rates=write)).startswith("writing runs at ")
    assert reason(rates=write, written_bytes=0) is None, "nothing is written: its rate is nobody's business"
    read = replace(RATES, read_bytes_per_s=factor * 2e9)
    assert str(reason(rates=read)).startswith("reading runs at ")
    assert reason(rates=read, read_bytes=0) is None


def test_what_is_unknown_is_no_reason():
    nothing = TierRates(write_bytes_per_s=0.0, read_bytes_per_s=0.0)
    assert reason(rates=nothing) is None
    assert reason(known(rates=nothing)) is None


SLOW = replace(AS_PREDICTED, **overhead_of(stall_s=1.0))


def verdicts(watch, passes):
    return [watch.passed(known(), one, RATES) is not None for one in passes]


def test_a_hiccup_is_forgotten():
    assert not any(verdicts(DriftDetector(), [SLOW, AS_PREDICTED] * 10))


def test_pauses_double_up_to_a_limit():
    told = [index for index, is_told in enumerate(verdicts(DriftDetector(), [SLOW] * 500)) if is_told]
    gaps = [later - earlier for earlier, later in itertools.pairwise(told)]
    assert told[0] == 1
    assert gaps == [4, 6, 10, 18, 34, 66, 66, 66, 66, 66, 66], "a pause, then two doubts"


def test_doubts_from_before_a_pause_do_not_count_after_it():
    watch = DriftDetector()
    assert verdicts(watch, [SLOW, SLOW]) == [False, True]
    assert verdicts(watch, [SLOW, SLOW, SLOW, AS_PREDICTED, SLOW, SLOW]) == [False] * 5 + [True]


# -- hysteresis -------------------------------------------------------------------------------------------------------


def is_better(limit_bytes=None, max_step_s=None, **new):
    return is_worth_switching(PREDICTION, replace(PREDICTION, **new), limit_bytes=limit_bytes, max_step_s=max_step_s)


def test_under_a_budget_the_faster_plan_wins_by_a_margin():
    assert is_better(limit_bytes=100, step_s=0.97)
    assert not is_better(limit_bytes=100, step_s=0.99)
    assert not is_better(limit_bytes=100, step_s=1.5, peak_bytes=1)


def test_a_plan_over_the_budget_goes_whatever_the_rival_costs():
    assert is_better(limit_bytes=99, step_s=3.0)


def test_without_a_budget_the_lower_peak_wins_by_a_margin():
    assert is_better(max_step_s=1.02, peak_bytes=94)
    assert not is_better(max_step_s=1.02, peak_bytes=96)
    assert not is_better(max_step_s=1.02, step_s=0.5), "it is fast enough as it is"


def test_a_plan_that_is_too_slow_goes():
    assert is_better(max_step_s=0.99, peak_bytes=200)
