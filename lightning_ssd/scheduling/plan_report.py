"""Predicted against measured, for the passes that followed a plan."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import NamedTuple

from lightning_ssd.common.formatting import format_sizes, pluralize
from lightning_ssd.planning.plan import Prediction
from lightning_ssd.scheduling.drift import Measured
from lightning_ssd.scheduling.plan_cursor import StoredPlan
from lightning_ssd.scheduling.search_phase import State

__all__ = ["DAY_S", "Comparison", "PlanReport"]

DAY_S = 86_400
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
    slowdown: float | None = None
    """Typical time of the passes that moved, relative to those that kept everything, both measured."""
    state: State | None = None
    """What the search for how much may be moved is doing; ``None``: under a budget there is none, and the plan of
    the latest pass may be one on trial."""
    promised_step_s: float | None = None
    """What was predicted before the first pass that followed the plan. :attr:`predicted_step_s` is of the latest pass,
    and leans on what those before it took."""
    promised_peak_bytes: int | None = None

    allowed_bytes_per_day: int | None = None
    """What the wear budget lets this process write."""
    refused_bytes_per_day: float = 0.0
    """Where that is not even enough for one storage per pass: what the plan would write if it might. Else 0."""

    def text(self) -> str:
        """One sentence; one more each where moving was given up, and where the wear budget forbids it."""
        predicted, measured = format_sizes(self.predicted_peak_bytes, self.measured_peak_bytes)
        return (
            f"Plan: {self.predicted_step_s:.3g} s per pass predicted, {self.measured_step_s:.3g} s measured "
            f"({_off(self.predicted_step_s, self.measured_step_s)}); stall {self.predicted_stall_s:.3g} s predicted, "
            f"{self.measured_stall_s:.3g} s measured; peak of resident activations "
            f"{predicted} predicted, {measured} measured "
            f"({_off(self.predicted_peak_bytes, self.measured_peak_bytes)}); "
            f"{pluralize(self.num_passes, 'pass', 'passes')}, {pluralize(self.num_plans, 'plan', 'plans')}."
            f"{self._against_keeping()}{self._refused()}"
        )

    def _against_keeping(self) -> str:
        if self.slowdown is None:
            return ""
        told = f"asses that moved took {self.slowdown:.2f} times as long as with everything kept"
        if self.state is not State.RESTING:
            return f" P{told}."
        return f" Moving was given up for a while, because p{told}; a budget (activation_budget) moves all the same."

    def _refused(self) -> str:
        if self.allowed_bytes_per_day is None or not self.refused_bytes_per_day:
            return ""
        # Each in a unit of its own: they may be far apart, and the smaller one is the setting.
        (allowed,) = format_sizes(self.allowed_bytes_per_day, decimal=True)
        (needed,) = format_sizes(self.refused_bytes_per_day, decimal=True)
        return (
            f" Nothing is written to the drives, because wear_budget allows this process {allowed} per day and the "
            f"plan would need {needed} per day."
        )


def _off(predicted: float, measured: float) -> str:
    return f"{100 * (measured / predicted - 1):+.0f} %" if predicted > 0 else "nothing predicted"


class _Followed(NamedTuple):
    """A plan, the latest passes that followed it, and what was said of them."""

    known: StoredPlan
    measured: tuple[Measured, ...]
    expected: Prediction
    promised: Prediction


class Comparison:
    """Collects the passes that followed one plan; begins anew with another.

    Args:
        wear_bytes_per_day: that this process may write; ``None``: there is no such limit.
    """

    def __init__(self, *, wear_bytes_per_day: int | None = None) -> None:
        self._wear_bytes_per_day = wear_bytes_per_day
        # Replaced as a whole: other threads than the one that trains may ask for numbers meanwhile.
        self._followed: _Followed | None = None

    def add(
        self,
        known: StoredPlan,
        measured: Measured,
        *,
        expected: Prediction | None = None,
        promised: Prediction | None = None,
    ) -> None:
        """A pass followed ``known`` to its end.

        Args:
            known: the plan.
            measured: the pass.
            expected: of it, before it ran; ``None``: what the simulator says.
            promised: of the plan, before any pass had followed it; ``None``: the same.
        """
        followed, simulated = self._followed, known.plan.prediction
        before = followed.measured if followed is not None and followed.known is known else ()
        passes = (*before, measured)[-_WINDOW:]
        self._followed = _Followed(known, passes, expected or simulated, promised or simulated)

    @property
    def latest(self) -> tuple[StoredPlan, Measured, Prediction] | None:
        """The last pass that followed a plan, and what was expected of it."""
        followed = self._followed
        return None if followed is None else (followed.known, followed.measured[-1], followed.expected)

    def report(self, num_plans: int, *, slowdown: float | None = None, state: State | None = None) -> PlanReport | None:
        """``None`` before the first pass that followed a plan."""
        if self._followed is None:
            return None
        known, measured, prediction, promised = self._followed
        passes_per_day = DAY_S / max(known.trace.end_s, 1e-9)
        return PlanReport(
            predicted_step_s=prediction.step_s,
            measured_step_s=statistics.median(one.step_s for one in measured),
            predicted_stall_s=prediction.stall_s,
            measured_stall_s=statistics.median(one.stall_s for one in measured),
            predicted_peak_bytes=prediction.peak_bytes,
            measured_peak_bytes=max(one.peak_bytes for one in measured),
            predicted_written_bytes=prediction.written_bytes,
            measured_written_bytes=round(statistics.median(one.written_bytes for one in measured)),
            keep_step_s=known.plan.keep_step_s,
            num_passes=len(measured),
            num_plans=num_plans,
            slowdown=slowdown,
            state=state,
            promised_step_s=promised.step_s,
            promised_peak_bytes=promised.peak_bytes,
            allowed_bytes_per_day=self._wear_bytes_per_day,
            refused_bytes_per_day=known.plan.refused_bytes * passes_per_day,
        )
