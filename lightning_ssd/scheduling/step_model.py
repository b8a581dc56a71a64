"""What a pass that follows a plan will take and hold: the simulator's word, set right by passes that were measured.

The simulator starts from one traced pass, and knows transfers. What else differs between passes is close to a number of
seconds per moved byte, of either sign: where memory that moves is reused and kept memory is mapped anew, moving is
faster than keeping. So for the passes of one sequence of sizes:

* What a plan takes is the median of its last passes, without the first one after passes of another plan: that one maps
  memory which the others had not to map.
* A plan that nobody has followed yet lies between its measured neighbours in moved bytes; beyond them on a line through
  all of them, whose slope is the median of those between each two. A single odd one bends neither. Stalls that the
  simulator predicts come on top.
* A plan that has been followed leans on its own passes, the more of them there are: a posterior between what was
  thought before and what was measured. What was thought weighs as much as it has been worth for other plans.

What was predicted before the first pass of a plan is its *promise*: that is what can be right or wrong.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from statistics import median

from lightning_ssd.planning.plan import Plan, Prediction, Route
from lightning_ssd.scheduling.paired_times import offs, scatter

__all__ = ["StepModel"]

_WINDOW = 8
_MAX_PLANS = 16
_LEAST_SHARE = 0.25
"""Of the fastest measured plan: no line leads below this."""
_FIRST_DOUBT, _MIN_DOUBT = 0.25, 0.02
"""What a promise may be off by before any could be judged, and at least afterwards (relative)."""
_MIN_JUDGED = 3
"""Passes after which a promise is judged."""
_NUM_JUDGED = 4
_PEAK_WEIGHT = 0.25
"""Of what was predicted for a peak, in passes: peaks scatter little."""


@dataclass(slots=True)
class _Followed:
    """A plan that passes have followed; or keeping everything."""

    moved_bytes: int
    stall_s: float
    """Predicted."""
    peak_bytes: int
    """Predicted by the simulator."""
    promise: Prediction | None
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    peaks: deque[int] = field(default_factory=lambda: deque(maxlen=_WINDOW))


@dataclass(frozen=True, slots=True)
class _Point:
    """Passes that move so much: what they took, stalls taken off, and how many passes say so."""

    moved_bytes: int
    seconds: float
    weight: float


class StepModel:
    """Of the passes of one sequence of sizes."""

    def __init__(self) -> None:
        self._followed: OrderedDict[Route | None, _Followed] = OrderedDict()  # None: keeps everything
        self._latest: Route | str | None = "nothing"

    # -- what has happened ---------------------------------------------------------------------------------------

    def kept(self, step_s: float | None) -> None:
        """A pass that kept everything has ended; ``None``: its time is not known."""
        is_first, self._latest = self._latest is not None, None
        if step_s is not None and step_s > 0 and not is_first:
            self._at(None, _Followed(0, 0.0, 0, None)).steps.append(step_s)

    def passed(self, plan: Plan, moved_bytes: int, step_s: float, peak_bytes: int) -> None:
        """A pass has followed the plan to its end.

        Args:
            plan: that it followed.
            moved_bytes: by the plan.
            step_s: that it took.
            peak_bytes: resident saved activations at the worst moment.
        """
        route, prediction = plan.route, plan.prediction
        is_first, self._latest = self._latest != route, route
        promise = self.expected(plan, moved_bytes)  # kept only where there is none yet
        one = self._at(route, _Followed(moved_bytes, prediction.stall_s, prediction.peak_bytes, promise))
        one.stall_s, one.peak_bytes = prediction.stall_s, prediction.peak_bytes
        if step_s > 0 and not is_first:
            one.steps.append(step_s)
            one.peaks.append(peak_bytes)

    def _at(self, route: Route | None, new: _Followed) -> _Followed:
        one = self._followed.setdefault(route, new)
        self._followed.move_to_end(route)
        while len(self._followed) > _MAX_PLANS:
            self._followed.popitem(last=False)
        return one

    # -- what is to be expected ----------------------------------------------------------------------------------

    def promised(self, plan: Plan) -> Prediction | None:
        """What was expected before the first pass that followed it; ``None``: none has."""
        own = self._followed.get(plan.route)
        return None if own is None else own.promise

    def expected(self, plan: Plan, moved_bytes: int) -> Prediction:
        """Of the next pass that follows the plan.

        Args:
            plan: whose prediction is the simulator's.
            moved_bytes: by the plan.
        """
        prediction, own = plan.prediction, self._followed.get(plan.route)
        step_s = max(self._thought_s(plan, moved_bytes), prediction.stall_s)
        peak_bytes: float = self._thought_peak(plan)
        if own is not None and own.steps:
            step_s = _posterior(step_s, self._worth, median(own.steps), len(own.steps))
        if own is not None and own.peaks:
            peak_bytes = _posterior(peak_bytes, _PEAK_WEIGHT, max(own.peaks), len(own.peaks))
        return replace(prediction, step_s=step_s, peak_bytes=round(peak_bytes))

    @property
    def cost_s_per_byte(self) -> float | None:
        """Of moving, besides stalls; below 0 where it is faster than keeping. ``None``: not known yet."""
        return _slope(self._points(without=None))

    def _thought_s(self, plan: Plan, moved_bytes: int) -> float:
        """By what is known of others."""
        prediction, points = plan.prediction, self._points(without=plan)
        if not points:
            return prediction.step_s
        slope = _slope(points)
        if slope is None:
            beyond_s = prediction.step_s - prediction.stall_s - plan.keep_step_s
            slope = beyond_s / moved_bytes if moved_bytes else 0.0
        least_s = _LEAST_SHARE * min(point.seconds for point in points)
        return max(_between(points, slope, moved_bytes), least_s) + prediction.stall_s

    def _thought_peak(self, plan: Plan) -> int:
        """By how the peaks of other plans differed from what the simulator had said."""
        ratios = [
            max(one.peaks) / one.peak_bytes
            for route, one in self._followed.items()
            if route != plan.route and one.peaks and one.peak_bytes
        ]
        return round(plan.prediction.peak_bytes * median(ratios)) if ratios else plan.prediction.peak_bytes

    def _points(self, *, without: Plan | None) -> list[_Point]:
        """Rising in moved bytes; plans that move the same are one point."""
        left = None if without is None else without.route
        alike: dict[int, list[_Followed]] = {}
        for route, one in self._followed.items():
            if one.steps and (without is None or route != left):
                alike.setdefault(one.moved_bytes, []).append(one)
        points = []
        for moved, ones in sorted(alike.items()):
            weight = sum(len(one.steps) for one in ones)
            seconds = sum(len(one.steps) * max(median(one.steps) - one.stall_s, 0.0) for one in ones) / weight
            points.append(_Point(moved, seconds, weight))
        return points

    @property
    def _worth(self) -> float:
        """Of what is thought, in passes that were measured: by how much these scatter, and how good promises were."""
        times = [off for one in self._followed.values() for off in offs(list(one.steps))]
        off_by = [
            abs(one.promise.step_s / median(one.steps) - 1)
            for one in self._followed.values()
            if one.promise is not None and len(one.steps) >= _MIN_JUDGED
        ][-_NUM_JUDGED:]
        doubt = max(median(off_by), _MIN_DOUBT) if len(off_by) > 1 else _FIRST_DOUBT
        return min((scatter(times) / doubt) ** 2, 1.0)


def _posterior(thought: float, worth: float, measured: float, num: int) -> float:
    return (worth * thought + num * measured) / (worth + num)


def _slope(points: Sequence[_Point]) -> float | None:
    """The weighted median of the slopes between each two points (after Theil and Sen); ``None``: there are no two."""
    slopes = sorted(
        (
            (right.seconds - left.seconds) / (right.moved_bytes - left.moved_bytes),
            (right.moved_bytes - left.moved_bytes) * min(left.weight, right.weight),
        )
        for left, right in combinations(points, 2)
    )
    return _weighted_median(slopes) if slopes else None


def _weighted_median(values: Sequence[tuple[float, float]]) -> float:
    """Of sorted values with their weights."""
    half, seen = sum(weight for _, weight in values) / 2, 0.0
    for value, weight in values:
        seen += weight
        if seen >= half:
            return value
    raise ValueError(f"_weighted_median({values!r}); allowed: at least one value")


def _between(points: Sequence[_Point], slope: float, moved_bytes: int) -> float:
    """On a line of this slope beyond the points, between two of them on the line that joins these."""
    level = _weighted_median(sorted((p.seconds - slope * p.moved_bytes, p.weight) for p in points))
    # A single pass is drawn half the way to the line through all.
    drawn = [(p.moved_bytes, _posterior(level + slope * p.moved_bytes, 1.0, p.seconds, int(p.weight))) for p in points]
    (first, first_s), (last, last_s) = drawn[0], drawn[-1]
    if moved_bytes <= first:
        return first_s + slope * (moved_bytes - first)
    for (left, left_s), (right, right_s) in pairwise(drawn):
        if moved_bytes <= right:
            return left_s + (right_s - left_s) * (moved_bytes - left) / (right - left)
    return last_s + slope * (moved_bytes - last)
