"""Predicted against measured, in numbers."""

import sys
from dataclasses import replace

import pytest

from lightning_ssd.planning.plan import Prediction, TierRates
from lightning_ssd.scheduling.drift import Measured
from lightning_ssd.scheduling.overhead import Overhead
from lightning_ssd.scheduling.plan_report import Comparison
from tests.support.stored_plans import stored_plan

GIB = 1 << 30


def known():
    prediction = Prediction(step_s=1.0, stall_s=0.02, peak_bytes=2 * GIB, written_bytes=GIB, read_bytes=GIB)
    return stored_plan(prediction=prediction, keep_step_s=0.95)


PLAN = known()
ONE = Measured(step_s=1.1, overhead=Overhead(stall_s=0.05), peak_bytes=GIB, written_bytes=GIB, read_bytes=GIB)


def test_nothing_is_said_before_a_pass_has_followed_a_plan():
    comparison = Comparison()
    assert comparison.report(3) is None
    assert comparison.latest is None


def test_medians_and_the_largest_peak():
    comparison = Comparison()
    for step_s, stall_s, peak, written in ((1.1, 0.0, 1, 10), (9.0, 5.0, 3, 13), (1.2, 0.1, 2, 11)):
        overhead = Overhead(stall_s=stall_s, hook_s=stall_s / 5, cpu_s=stall_s / 2)
        comparison.add(
            PLAN, replace(ONE, step_s=step_s, overhead=overhead, peak_bytes=peak * GIB, written_bytes=written)
        )
    report = comparison.report(2)
    assert (report.predicted_step_s, report.measured_step_s, report.keep_step_s) == (1.0, 1.2, 0.95)
    assert (report.predicted_stall_s, report.measured_stall_s) == (0.02, 0.1)
    assert (report.measured_hook_s, report.measured_cpu_s) == (0.02, 0.05)
    assert report.predicted_overhead == pytest.approx(0.05 / 0.95)
    assert report.measured_overhead == pytest.approx(0.17 / 1.03)
    assert (report.predicted_peak_bytes, report.measured_peak_bytes) == (2 * GIB, 3 * GIB)
    assert (report.predicted_written_bytes, report.measured_written_bytes) == (GIB, 11)
    assert (report.num_passes, report.num_plans) == (3, 2)
    assert comparison.latest[0] is PLAN
    assert comparison.latest[1].step_s == 1.2


def test_numbers_may_be_asked_for_at_any_moment():
    """Another thread may come between any two lines; this one plays it."""
    comparison, seen = Comparison(), []

    def ask(frame, event, arg):
        if frame.f_code is not Comparison.add.__code__:
            return None
        sys.settrace(None)
        report, latest = comparison.report(1), comparison.latest
        seen.append((latest is None) == (report is None))
        sys.settrace(ask)
        return ask

    before = sys.gettrace()
    for plan in (PLAN, PLAN, known()):
        sys.settrace(ask)
        try:
            comparison.add(plan, ONE)
        finally:
            sys.settrace(before)
    assert len(seen) > 6
    assert all(seen)


def test_another_plan_begins_anew_and_so_does_one_with_a_new_prediction():
    comparison = Comparison()
    comparison.add(PLAN, ONE)
    comparison.add(PLAN, ONE)
    for other in (known(), replace(PLAN, rates=TierRates(write_bytes_per_s=2, read_bytes_per_s=2))):
        comparison.add(other, replace(ONE, step_s=7.0))
        report = comparison.report(1)
        assert (report.num_passes, report.measured_step_s) == (1, 7.0)


def test_a_short_last_batch_takes_no_place_of_the_passes_that_save_most():
    comparison = Comparison()
    for step in range(40):
        comparison.add(PLAN, ONE)
        short = replace(PLAN, sizes=(0, step % 20))
        comparison.add(short, replace(ONE, step_s=0.1))
    comparison.add(replace(PLAN, sizes=(300,)), replace(ONE, step_s=3.0))
    comparison.add(short, replace(ONE, step_s=0.1))
    report = comparison.report(1)
    assert report.measured_step_s == 3.0
    assert comparison.latest[0] is short
    assert len(comparison._followed) <= 16
