"""Predicted against measured, in numbers and in one sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from lightning_ssd.planning.plan import Plan, PlanObjective, Prediction, TierRates
from lightning_ssd.planning.trace import Trace
from lightning_ssd.scheduling.drift import Measured
from lightning_ssd.scheduling.overhead import Overhead
from lightning_ssd.scheduling.plan_cursor import StoredPlan
from lightning_ssd.scheduling.plan_report import Comparison

GIB = 1 << 30


def known(prediction: Prediction) -> StoredPlan:
    return StoredPlan(
        sizes=(1,),
        trace=Trace(storages=(), order=(), forward_end_s=0.5, end_s=1.0),
        goal=PlanObjective(),
        rates=TierRates(write_bytes_per_s=1.0, read_bytes_per_s=1.0),
        plan=Plan(placements=(), limit_bytes=1, ahead_bytes=0, prediction=prediction, keep_step_s=0.95),
    )


PLAN = known(Prediction(step_s=1.0, stall_s=0.02, peak_bytes=2 * GIB, written_bytes=GIB, read_bytes=GIB))
ONE = Measured(step_s=1.1, overhead=Overhead(stall_s=0.05), peak_bytes=GIB, written_bytes=GIB, read_bytes=GIB)


def test_nothing_is_said_before_a_pass_has_followed_a_plan() -> None:
    comparison = Comparison()
    assert comparison.report(3) is None
    assert comparison.latest is None


def test_medians_and_the_largest_peak() -> None:
    comparison = Comparison()
    for step_s, stall_s, peak, written in ((1.1, 0.0, 1, 10), (9.0, 5.0, 3, 13), (1.2, 0.1, 2, 11)):
        overhead = Overhead(stall_s=stall_s, hook_s=stall_s / 5, cpu_s=stall_s / 2)
        comparison.add(
            PLAN, replace(ONE, step_s=step_s, overhead=overhead, peak_bytes=peak * GIB, written_bytes=written)
        )
    report = comparison.report(2)
    assert report is not None
    assert (report.predicted_step_s, report.measured_step_s, report.keep_step_s) == (1.0, 1.2, 0.95)
    assert (report.predicted_stall_s, report.measured_stall_s) == (0.02, 0.1)
    assert (report.measured_hook_s, report.measured_cpu_s) == (0.02, 0.05)
    assert report.predicted_overhead == pytest.approx(0.05 / 0.95)
    assert report.measured_overhead == pytest.approx(0.17 / 1.03)
    assert (report.predicted_peak_bytes, report.measured_peak_bytes) == (2 * GIB, 3 * GIB)
    assert (report.predicted_written_bytes, report.measured_written_bytes) == (GIB, 11)
    assert (report.num_passes, report.num_plans) == (3, 2)
    assert comparison.latest is not None
    assert comparison.latest[0] is PLAN
    assert comparison.latest[1].step_s == 1.2
    assert report.text() == (
        "Plan: <0.1 MiB of <0.1 MiB saved activations moved in each pass; cost 16.5 % (stalls 9.7, hooks 1.9, "
        "CPU 4.9), 5.3 % predicted; peak 3.00 GiB, 2.00 GiB predicted; 3 passes, 2 plans."
    )
    moved = replace(report, saved_bytes=6 * GIB, moved_bytes=5 * GIB)
    assert "Plan: 5.00 GiB of 6.00 GiB saved activations moved in each pass; cost" in moved.text()
    assert "each pass, 2.00 GiB of it to host memory; cost" in replace(moved, host_bytes=2 * GIB).text()


def test_numbers_may_be_asked_for_at_any_moment() -> None:
    """Another thread may come between any two lines; this one plays it."""
    comparison, seen = Comparison(), []

    def ask(frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        if frame.f_code is not Comparison.add.__code__:
            return None
        sys.settrace(None)
        report, latest = comparison.report(1), comparison.latest
        seen.append((latest is None) == (report is None))
        sys.settrace(ask)
        return ask

    before = sys.gettrace()
    for plan in (PLAN, PLAN, known(PLAN.plan.prediction)):
        sys.settrace(ask)
        try:
            comparison.add(plan, ONE)
        finally:
            sys.settrace(before)
    assert len(seen) > 6
    assert all(seen)


def test_another_plan_begins_anew_and_so_does_one_with_a_new_prediction() -> None:
    comparison = Comparison()
    comparison.add(PLAN, ONE)
    comparison.add(PLAN, ONE)
    for other in (known(PLAN.plan.prediction), replace(PLAN, rates=TierRates(write_bytes_per_s=2, read_bytes_per_s=2))):
        comparison.add(other, replace(ONE, step_s=7.0))
        report = comparison.report(1)
        assert report is not None
        assert (report.num_passes, report.measured_step_s) == (1, 7.0)


def test_a_long_run_is_judged_by_its_latest_passes() -> None:
    comparison = Comparison()
    for step in range(1000):
        comparison.add(PLAN, replace(ONE, step_s=float(step)))
    report = comparison.report(1)
    assert report is not None
    assert report.num_passes == 64
    assert report.measured_step_s == 967.5


def test_zeros_are_told_as_zeros() -> None:
    comparison = Comparison()
    comparison.add(
        known(Prediction(step_s=0.0, stall_s=0.0, peak_bytes=0, written_bytes=0, read_bytes=0)),
        Measured(step_s=0.0, peak_bytes=0, written_bytes=0, read_bytes=0),
    )
    report = comparison.report(0)
    assert report is not None
    assert report.text() == (
        "Plan: all <0.1 MiB of saved activations stayed in memory; cost 0.0 % (stalls 0.0, hooks 0.0, CPU 0.0), 0.0 % "
        "predicted; peak 0.0 MiB, 0.0 MiB predicted; 1 pass, 0 plans."
    )


def test_both_peaks_are_told_in_one_unit() -> None:
    comparison = Comparison()
    comparison.add(PLAN, replace(ONE, peak_bytes=3 << 20))
    report = comparison.report(1)
    assert report is not None
    assert "; peak <0.01 GiB, 2.00 GiB predicted; 1 pass, 1 plan." in report.text()


def test_a_wear_budget_that_lets_nothing_move_is_told_of() -> None:
    """The trace takes a second, so that a day has 86,400 passes."""
    comparison = Comparison(wear_bytes_per_day=500_000_000_000)
    comparison.add(replace(PLAN, plan=replace(PLAN.plan, refused_bytes=100_000_000)), ONE)
    report = comparison.report(1)
    assert report is not None
    assert report.refused_bytes_per_day == 8_640_000_000_000
    assert report.text().endswith(
        "1 plan. Nothing is written to the drives, because wear_budget allows this process 0.50 TB per day and the "
        "plan would need 8.64 TB per day."
    )


def test_a_wear_budget_is_told_even_if_it_is_a_small_part() -> None:
    comparison = Comparison(wear_bytes_per_day=2_000_000)
    comparison.add(replace(PLAN, plan=replace(PLAN.plan, refused_bytes=100_000_000)), ONE)
    report = comparison.report(1)
    assert report is not None
    assert "allows this process 2.0 MB per day and the plan would need 8.64 TB per day" in report.text()


def test_a_wear_budget_that_is_not_in_the_way_is_not_told_of() -> None:
    comparison = Comparison(wear_bytes_per_day=1)
    comparison.add(PLAN, ONE)
    report = comparison.report(1)
    assert report is not None
    assert "wear_budget" not in report.text()
