"""When a plan is doubted, how patiently, and when a rival replaces it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from lightning_ssd.planning.plan import Plan, PlanObjective, Prediction, TierRates
from lightning_ssd.planning.trace import Trace
from lightning_ssd.scheduling.drift import DriftDetector, Measured, is_worth_switching
from lightning_ssd.scheduling.plan_cursor import StoredPlan

RATES = TierRates(write_bytes_per_s=1e9, read_bytes_per_s=2e9)
AS_PREDICTED = Measured(step_s=1.0, stall_s=0.01, peak_bytes=90, written_bytes=50, read_bytes=50)
PREDICTION = Prediction(step_s=1.0, stall_s=0.01, peak_bytes=100, written_bytes=50, read_bytes=50)


def known(*, goal: PlanObjective | None = None, rates: TierRates = RATES, **prediction: Any) -> StoredPlan:
    return StoredPlan(
        sizes=(1,),
        trace=Trace(storages=(), order=(), forward_end_s=0.5, end_s=1.0),
        goal=goal or PlanObjective(),
        rates=rates,
        plan=Plan(
            placements=(),
            limit_bytes=100,
            ahead_bytes=0,
            prediction=replace(PREDICTION, **prediction),
            keep_step_s=1.0,
        ),
    )


def reason(plan: StoredPlan | None = None, rates: TierRates = RATES, **measured: Any) -> str | None:
    """After two equal passes; the first alone never counts."""
    watch, plan, seen = DriftDetector(), plan or known(), replace(AS_PREDICTED, **measured)
    assert watch.passed(plan, seen, rates) is None
    return watch.passed(plan, seen, rates)


def test_a_pass_as_predicted_is_no_reason() -> None:
    assert reason() is None


@pytest.mark.parametrize(("step_s", "doubted"), [(1.14, False), (1.16, True), (0.86, False), (0.84, True)])
def test_the_time_of_a_pass_has_a_band(step_s: float, doubted: bool) -> None:
    text = reason(step_s=step_s)
    assert (text is not None) is doubted
    assert text is None or text == f"a pass took {step_s} s where 1 s were predicted"


def test_stalls_beyond_what_was_asked_and_predicted() -> None:
    # 0.01 s were predicted, and 2 % of what the pass takes without stalls are granted.
    assert reason(stall_s=0.029) is None
    assert reason(stall_s=0.0305) == "0.0305 s of stalls in a pass of 1 s"
    assert reason(known(goal=PlanObjective(max_slowdown=1.1)), stall_s=0.0305) is None
    assert reason(known(goal=PlanObjective(budget_bytes=100)), stall_s=0.0305) is None, (
        "under a budget stalls are the price"
    )


def test_a_hard_limit_that_was_exceeded() -> None:
    assert reason(peak_bytes=101, limit_bytes=100) == "101 bytes were resident under a budget of 100"
    assert reason(peak_bytes=100, limit_bytes=100) is None
    assert reason(peak_bytes=10**9) is None, "there was no limit"


@pytest.mark.parametrize("factor", [0.8, 1.2])
def test_rates_outside_of_the_band(factor: float) -> None:
    write = replace(RATES, write_bytes_per_s=factor * 1e9)
    assert str(reason(rates=write)).startswith("writing runs at ")
    assert reason(rates=write, written_bytes=0) is None, "nothing is written: its rate is nobody's business"
    read = replace(RATES, read_bytes_per_s=factor * 2e9)
    assert str(reason(rates=read)).startswith("reading runs at ")
    assert reason(rates=read, read_bytes=0) is None


def test_what_is_unknown_is_no_reason() -> None:
    nothing = TierRates(write_bytes_per_s=0.0, read_bytes_per_s=0.0)
    assert reason(rates=nothing) is None
    assert reason(known(rates=nothing)) is None
    assert reason(known(step_s=0.0), step_s=5.0) is None


SLOW = replace(AS_PREDICTED, step_s=2.0)


def verdicts(watch: DriftDetector, passes: list[Measured]) -> list[bool]:
    return [watch.passed(known(), one, RATES) is not None for one in passes]


def test_a_hiccup_is_forgotten() -> None:
    assert not any(verdicts(DriftDetector(), [SLOW, AS_PREDICTED] * 10))


def test_two_passes_with_different_reasons_are_two_doubts() -> None:
    watch = DriftDetector()
    assert watch.passed(known(), SLOW, RATES) is None
    assert watch.passed(known(), replace(AS_PREDICTED, stall_s=0.5), RATES) is not None


def test_pauses_double_up_to_a_limit() -> None:
    told = [index for index, is_told in enumerate(verdicts(DriftDetector(), [SLOW] * 500)) if is_told]
    gaps = [later - earlier for earlier, later in itertools.pairwise(told)]
    assert told[0] == 1
    assert gaps == [4, 6, 10, 18, 34, 66, 66, 66, 66, 66, 66], "a pause, then two doubts"


def test_doubts_from_before_a_pause_do_not_count_after_it() -> None:
    watch = DriftDetector()
    assert verdicts(watch, [SLOW, SLOW]) == [False, True]
    assert verdicts(watch, [SLOW, SLOW, SLOW, AS_PREDICTED, SLOW, SLOW]) == [False] * 5 + [True]


# -- hysteresis -------------------------------------------------------------------------------------------------------


def is_better(limit_bytes: int | None = None, max_step_s: float | None = None, **new: Any) -> bool:
    return is_worth_switching(PREDICTION, replace(PREDICTION, **new), limit_bytes=limit_bytes, max_step_s=max_step_s)


def test_under_a_budget_the_faster_plan_wins_by_a_margin() -> None:
    assert is_better(limit_bytes=100, step_s=0.97)
    assert not is_better(limit_bytes=100, step_s=0.99)
    assert not is_better(limit_bytes=100, step_s=1.5, peak_bytes=1)


def test_a_plan_over_the_budget_goes_whatever_the_rival_costs() -> None:
    assert is_better(limit_bytes=99, step_s=3.0)


def test_without_a_budget_the_lower_peak_wins_by_a_margin() -> None:
    assert is_better(max_step_s=1.02, peak_bytes=94)
    assert not is_better(max_step_s=1.02, peak_bytes=96)
    assert not is_better(max_step_s=1.02, step_s=0.5), "it is fast enough as it is"


def test_a_plan_that_is_too_slow_goes() -> None:
    assert is_better(max_step_s=0.99, peak_bytes=200)
