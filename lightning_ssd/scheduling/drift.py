"""When to plan again: measured against promised, with patience and hysteresis. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_ssd.planning.bandwidth import leaves_band
from lightning_ssd.planning.placement import Placement
from lightning_ssd.planning.plan import Prediction, TierRates
from lightning_ssd.scheduling.overhead import Overhead
from lightning_ssd.scheduling.plan_cursor import StoredPlan

__all__ = ["DriftDetector", "Measured", "is_worth_switching"]

_PATIENCE = 2
_FIRST_PAUSE = 2
_MAX_PAUSE = 64
_MIN_GAIN = 0.02
_MIN_RELIEF = 0.05
_MIN_SPARED = 0.2
_MIN_EXCESS = 0.01
"""Part of the step that an old plan must exceed its promise by: costs that are measured scatter by more."""
_MORE_HOST = 1.25
"""So many times the host memory that a plan was made for is worth another plan."""
_LITTLE = 0.5
"""Share of the promised overhead: a plan that takes less may move more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One pass that followed a plan."""

    step_s: float
    overhead: Overhead = field(default_factory=Overhead)
    peak_bytes: int
    written_bytes: int
    read_bytes: int
    host_bytes: int = 0
    """That went to host memory."""
    limit_bytes: int | None = None
    """The hard limit that was in force."""
    may_write_bytes: int | None = None
    """Bytes that ``wear_budget`` leaves for it by now."""

    @property
    def overhead_ratio(self) -> float:
        """The overhead relative to the pass without it."""
        return self.overhead.ratio(self.step_s)


class DriftDetector:
    """Looks at the passes that follow one kind of plan.

    A reason must hold in two passes one after the other before it counts, since a machine hiccups. After each new plan
    it pauses for a number of passes that doubles, since a machine that is noisy by nature would be planned for ever.
    """

    def __init__(self) -> None:
        self._num_doubts = 0
        self._pause = _FIRST_PAUSE
        self._num_to_skip = 0
        self._host_bytes = 0  # that a plan was asked for last

    def passed(self, known: StoredPlan, measured: Measured, rates: TierRates, *, host_bytes: int = 0) -> str | None:
        """Return why to plan again, or ``None``.

        Args:
            known: the plan that was followed.
            measured: the pass.
            rates: of the drives by now.
            host_bytes: host memory that there is by now. More of it is no hiccup.
        """
        is_more = host_bytes > _MORE_HOST * max(known.host_bytes, self._host_bytes)
        if is_more and (measured.written_bytes or _may_move_more(known)):
            self._host_bytes = host_bytes
            return f"{host_bytes} bytes of host memory are there, not {known.host_bytes}"
        if self._num_to_skip:
            self._num_to_skip -= 1
            return None
        reason = _doubt(known, measured, rates)
        self._num_doubts = 0 if reason is None else self._num_doubts + 1
        if self._num_doubts < _PATIENCE:
            return None
        self._num_doubts = 0
        self._num_to_skip, self._pause = self._pause, min(2 * self._pause, _MAX_PAUSE)
        return reason


def _doubt(known: StoredPlan, measured: Measured, rates: TierRates) -> str | None:
    if measured.limit_bytes is not None and measured.peak_bytes > measured.limit_bytes:
        return f"{measured.peak_bytes} bytes were resident under a budget of {measured.limit_bytes}"
    if measured.limit_bytes is None and known.goal.budget_bytes is not None:
        return "memory is no longer scarce"
    if known.goal.budget_bytes is None and known.plan.moves:
        allowed, ratio = known.goal.max_slowdown - 1, measured.overhead_ratio
        told = f"an overhead of {100 * ratio:.1f} % where {100 * known.predicted_overhead:.1f} % was predicted"
        if ratio > allowed and ratio > known.predicted_overhead:
            return told
        if ratio < _LITTLE * min(allowed, known.predicted_overhead) and _may_move_more(known):
            return told
    if measured.may_write_bytes is not None and measured.written_bytes > (1 + _MIN_SPARED) * measured.may_write_bytes:
        return f"{measured.written_bytes} bytes are written where wear_budget leaves {measured.may_write_bytes}"
    if measured.written_bytes and _left(known.rates.write_bytes_per_s, rates.write_bytes_per_s):
        return f"writing runs at {rates.write_bytes_per_s:.3g} bytes/s, not {known.rates.write_bytes_per_s:.3g}"
    if measured.read_bytes and _left(known.rates.read_bytes_per_s, rates.read_bytes_per_s):
        return f"reading runs at {rates.read_bytes_per_s:.3g} bytes/s, not {known.rates.read_bytes_per_s:.3g}"
    return None


def _may_move_more(known: StoredPlan) -> bool:
    """Return whether a plan keeps what could move."""
    return any(
        placement is Placement.KEEP and storage.movable
        for placement, storage in zip(known.plan.placements, known.trace.storages, strict=True)
    )


def _left(expected: float, got: float) -> bool:
    """Whether ``got`` lies outside of the band around ``expected``; 0: nothing is known."""
    return expected > 0 and got > 0 and leaves_band(got, expected)


def is_worth_switching(old: Prediction, new: Prediction, *, limit_bytes: int | None, max_step_s: float | None) -> bool:
    """Whether a new plan replaces the old one, both predicted on the same trace with the same rates.

    Args:
        old: of the plan in force.
        new: of its rival.
        limit_bytes: the hard limit, if there is one.
        max_step_s: the longest pass that was asked for, if there is no limit.
    """
    if limit_bytes is not None and old.peak_bytes > limit_bytes:
        return True
    if max_step_s is not None:
        if old.step_s > (1 + _MIN_EXCESS) * max_step_s:
            return True
        better = new.peak_bytes < (1 - _MIN_RELIEF) * old.peak_bytes
    else:
        better = new.step_s < (1 - _MIN_GAIN) * old.step_s
    # A plan that is no worse and moves much less wears the drive less.
    moves_less = new.written_bytes < (1 - _MIN_SPARED) * old.written_bytes
    return better or (moves_less and new.step_s <= old.step_s and new.peak_bytes <= old.peak_bytes)
