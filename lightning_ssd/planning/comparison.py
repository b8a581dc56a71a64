"""Predicted against measured, for the passes that followed a plan."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from lightning_ssd.planning.guide import StoredPlan
from lightning_ssd.planning.watch import Measured

__all__ = ["Comparison", "PlanReport"]

_GIB = 1 << 30
_WINDOW = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanReport:
    """The plan of the latest pass, and what the passes that followed it took: medians, and the largest peak."""

    predicted_step_s: float
    """Forward and backward of one pass, stalls included."""
    measured_step_s: float
    predicted_stall_s: float
    measured_stall_s: float
    predicted_peak_bytes: int
    """Resident saved activations at the worst moment."""
    measured_peak_bytes: int
    predicted_written_bytes: int
    measured_written_bytes: int
    keep_step_s: float
    """The same pass with everything kept, as far as the profile tells."""
    num_passes: int
    """How many passes were measured."""
    num_plans: int
    """How many plans have been put in force, for all kinds of passes together."""
    given_up_at: float | None = None
    """How many times as long as keeping everything the planned passes took when moving was given up for a while."""

    def text(self) -> str:
        """One sentence."""
        return (
            f"Plan: {self.predicted_step_s:.3g} s per pass predicted, {self.measured_step_s:.3g} s measured "
            f"({_off(self.predicted_step_s, self.measured_step_s)}); stall {self.predicted_stall_s:.3g} s predicted, "
            f"{self.measured_stall_s:.3g} s measured; peak of resident activations "
            f"{self.predicted_peak_bytes / _GIB:.3g} GiB predicted, {self.measured_peak_bytes / _GIB:.3g} GiB measured "
            f"({_off(self.predicted_peak_bytes, self.measured_peak_bytes)}); {self.num_passes} passes, "
            f"{self.num_plans} plans.{self._given_up()}"
        )

    def _given_up(self) -> str:
        if self.given_up_at is None:
            return ""
        return (
            f" Moving was given up for a while, because passes took {self.given_up_at:.2f} times as long as with "
            "everything kept; a budget (activation_budget) moves all the same."
        )


def _off(predicted: float, measured: float) -> str:
    return f"{100 * (measured / predicted - 1):+.0f} %" if predicted > 0 else "nothing predicted"


class Comparison:
    """Collects the passes that followed one plan; begins anew with another."""

    def __init__(self) -> None:
        self._known: StoredPlan | None = None
        self._measured: deque[Measured] = deque(maxlen=_WINDOW)

    def add(self, known: StoredPlan, measured: Measured) -> None:
        """A pass followed ``known`` to its end."""
        if known is not self._known:
            self._known = known
            self._measured.clear()
        self._measured.append(measured)

    @property
    def latest(self) -> tuple[StoredPlan, Measured] | None:
        """The last pass that followed a plan."""
        return None if self._known is None else (self._known, self._measured[-1])

    def report(self, num_plans: int, given_up_at: float | None = None) -> PlanReport | None:
        """``None`` before the first pass that followed a plan."""
        if self._known is None:
            return None
        prediction, measured = self._known.plan.prediction, self._measured
        return PlanReport(
            predicted_step_s=prediction.step_s,
            measured_step_s=statistics.median(one.step_s for one in measured),
            predicted_stall_s=prediction.stall_s,
            measured_stall_s=statistics.median(one.stall_s for one in measured),
            predicted_peak_bytes=prediction.peak_bytes,
            measured_peak_bytes=max(one.peak_bytes for one in measured),
            predicted_written_bytes=prediction.written_bytes,
            measured_written_bytes=round(statistics.median(one.written_bytes for one in measured)),
            keep_step_s=self._known.plan.keep_step_s,
            num_passes=len(measured),
            num_plans=num_plans,
            given_up_at=given_up_at,
        )
