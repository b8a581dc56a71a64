"""Predicted against measured, for the passes that followed a plan."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import NamedTuple

from lightning_ssd.scheduling.drift import Measured
from lightning_ssd.scheduling.overhead import Overhead
from lightning_ssd.scheduling.plan_cursor import StoredPlan

__all__ = ["DAY_S", "Comparison", "PlanReport"]

DAY_S = 86_400
_WINDOW = 64
_MAX_PLANS = 16
_CAUSES = ("stall_s", "hook_s", "cpu_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanReport:
    """The plan of the passes that save most, and what those that followed it took: medians, and the largest peak."""

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
    """Length of this pass with everything kept, as far as the profile tells."""
    saved_bytes: int
    """Bytes that one pass saves."""
    moved_bytes: int
    """Bytes of these that went to a drive or to host memory."""
    host_bytes: int
    """Bytes of these that went to host memory."""
    num_passes: int
    """How many passes were measured."""
    num_plans: int
    """How many plans have been put in force, for all kinds of passes together."""
    predicted_overhead: float = 0.0
    """Relative to the same pass with everything kept."""
    measured_overhead: float = 0.0
    """Overhead measured where it arises: see :class:`~lightning_ssd.scheduling.overhead.Overhead`."""
    measured_hook_s: float = 0.0
    measured_cpu_s: float = 0.0


class _Followed(NamedTuple):
    """A plan, and the latest passes that followed it."""

    known: StoredPlan
    measured: tuple[Measured, ...]


class Comparison:
    """Collects the passes that followed plans, by the sizes that they save; begins anew with another plan for these."""

    def __init__(self) -> None:
        # Replaced as a whole: other threads than the one that trains may ask for numbers meanwhile. The latest is last.
        self._followed: tuple[_Followed, ...] = ()

    def add(self, known: StoredPlan, measured: Measured) -> None:
        """Take note of a pass that followed ``known`` to its end."""
        before = next((one.measured for one in self._followed if one.known is known), ())
        others = [one for one in self._followed if one.known.sizes != known.sizes]
        self._followed = (*others[1 - _MAX_PLANS :], _Followed(known, (*before, measured)[-_WINDOW:]))

    @property
    def latest(self) -> tuple[StoredPlan, Measured] | None:
        """The last pass that followed a plan."""
        followed = self._followed
        return (followed[-1].known, followed[-1].measured[-1]) if followed else None

    def report(self, num_plans: int) -> PlanReport | None:
        """Return ``None`` before the first pass that followed a plan."""
        followed = self._followed
        if not followed:
            return None
        known, measured = max(followed, key=lambda one: sum(one.known.sizes))
        prediction = known.plan.prediction
        overhead = Overhead(*(statistics.median(getattr(one.overhead, name) for one in measured) for name in _CAUSES))
        step_s = statistics.median(one.step_s for one in measured)
        return PlanReport(
            predicted_step_s=prediction.step_s,
            measured_step_s=step_s,
            predicted_stall_s=prediction.stall_s,
            measured_stall_s=overhead.stall_s,
            measured_hook_s=overhead.hook_s,
            measured_cpu_s=overhead.cpu_s,
            predicted_overhead=known.predicted_overhead,
            measured_overhead=overhead.ratio(step_s),
            predicted_peak_bytes=prediction.peak_bytes,
            measured_peak_bytes=max(one.peak_bytes for one in measured),
            predicted_written_bytes=prediction.written_bytes,
            measured_written_bytes=round(statistics.median(one.written_bytes for one in measured)),
            keep_step_s=known.plan.keep_step_s,
            saved_bytes=sum(known.sizes),
            moved_bytes=round(statistics.median(one.written_bytes + one.host_bytes for one in measured)),
            host_bytes=round(statistics.median(one.host_bytes for one in measured)),
            num_passes=len(measured),
            num_plans=num_plans,
        )
