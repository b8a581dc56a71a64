"""Which of several plans within one budget is the fastest, by measurement.

The planner's choice is the best one by its model. Others come near it by the same model: they move more, or other
storages, or look further ahead. Which of them is faster on this machine only passes can tell:

* The *best* plan so far is followed, and timed.
* A *rival* is tried that the model, set right by all that was measured (``step_model.py``), thinks near the best: a few
  passes of it between passes of the best one, so that a machine that becomes faster or slower makes neither look good.
* It takes the best one's place where it is surely faster, also beside the passes that come after its own. Else it
  is not tried again for long. What is within the scatter of the passes counts as equal, and changes nothing.
* When no rival is left that comes near, or trying has cost too much, the best one is *settled*. After many passes, or
  when passes have become slower, those that come near it are tried again.

No plan whose peak is thought to be above the limit is ever tried. One whose measured peak was above it is given up at
once for one that moves more, and none that moves as little is tried again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from lightning_ssd.planning.plan import Route
from lightning_ssd.scheduling.paired_times import WINDOW, PairedTimes, offs, scatter, typical
from lightning_ssd.scheduling.plan_cursor import StoredPlan
from lightning_ssd.scheduling.search_phase import State
from lightning_ssd.scheduling.step_model import StepModel

__all__ = ["BudgetSearch"]

_BLOCK, _MAX_TRIED = 3, 9
"""Passes one after the other of the same plan; and of one rival in all. The first of each block does not count."""
_NEAR = 1.05
"""Rivals that are thought to take longer than so many times the best plan's time are not tried."""
_MIN_GAIN = 0.01
"""For less, no plan gives way."""
_WINS_BY, _LOSES_BY = 2.5, 1.3
"""Standard errors: many rivals are looked at, several times each, so that some seem fast by chance."""
_FAR_OFF = 0.1
"""A rival that is slower by this much and its uncertainty loses after one pass."""
_OUT_OF_HAND = 0.5
"""Where it is slower by this much, its very first pass counts, too."""
_SPENT, _SPENT_OVER = 0.016, 100
"""Of the time of all passes, what trying may cost; in the beginning, of this many passes."""
_NUM_SLOWER, _SLOWER = 3, 1.05
_FIRST_RECHECK, _MAX_RECHECK = 64, 512
_MAX_KNOWN = 64


class BudgetSearch:
    """Of the passes of one sequence of sizes, under one limit.

    Args:
        model: of these passes; told of each by whoever tells this search.
    """

    def __init__(self, model: StepModel) -> None:
        self.model = model
        self.num_changes = 0
        """How often another plan has become the best one."""
        self._best: StoredPlan | None = None
        self._others: list[StoredPlan] = []
        self._rival: StoredPlan | None = None  # on trial
        self._is_rivals_turn = False
        self._num_to_skip = 1
        self._in_block = 0  # passes that counted since the turn began
        self._times = PairedTimes()  # of the best plan
        self._tried: list[tuple[int, float]] = []  # passes of the rival that counted
        self._num_rivals_passes = 0
        self._offs: deque[float] = deque(maxlen=2 * WINDOW)  # of earlier rivals' passes
        self._ratios: dict[Route, float] = {}  # measured time relative to the best plan
        self._over_bytes = -1  # moved by a plan that was above the limit, as measured: no other one moves so little
        self._num_passes = 0
        self._spent = 0.0  # in passes
        self._num_settled, self._recheck = 0, _FIRST_RECHECK
        self._limit_bytes: int | None = None

    # -- what the next pass does ---------------------------------------------------------------------------------

    @property
    def best(self) -> StoredPlan | None:
        """The fastest plan as far as it is known; ``None``: there is none yet."""
        return self._best

    @property
    def chosen(self) -> StoredPlan | None:
        """What the next pass is to follow."""
        return self._rival if self._is_rivals_turn else self._best

    @property
    def state(self) -> State:
        """For metrics."""
        return State.SETTLED if self._rival is None and self._num_settled else State.TRYING

    @property
    def is_proven(self) -> bool:
        """Whether the best plan has been measured beside another one, so that no model knows better."""
        return bool(self._ratios)

    def renew(self, best: StoredPlan, others: Sequence[StoredPlan], limit_bytes: int | None) -> None:
        """Plans have been made from a new trace. What was measured of those that do the same is kept.

        Args:
            best: to go on with.
            others: that may be tried.
            limit_bytes: of resident saved activations.
        """
        has_changed = self._best is None or self._best.plan.route != best.plan.route
        self._limit_bytes = limit_bytes
        self._end_trial()
        if has_changed:
            self._times.clear()
            self._ratios.clear()
        self._best, self._num_settled = best, 0
        self._others = [one for one in others if one.plan.route != best.plan.route]

    # -- what has happened ---------------------------------------------------------------------------------------

    def passed(self, known: StoredPlan, step_s: float, peak_bytes: int, limit_bytes: int | None) -> str | None:
        """A pass has followed a plan to its end.

        Args:
            known: the plan.
            step_s: that the pass took.
            peak_bytes: resident saved activations at its worst moment.
            limit_bytes: that was in force.

        Returns:
            What has been found out, or ``None``.
        """
        self._num_passes += 1
        if limit_bytes is not None:
            self._limit_bytes = limit_bytes
        route, chosen, best = known.plan.route, self.chosen, self._best
        if limit_bytes is not None and peak_bytes > limit_bytes:
            return self._leave(known, peak_bytes, limit_bytes)
        if chosen is None or best is None or route != chosen.plan.route:
            return None  # it had begun before that was decided
        if self._is_rivals_turn:
            return self._rival_passed(best, step_s)
        if self._num_to_skip:
            self._num_to_skip -= 1
            return None
        self._times.add(self._num_passes, step_s)
        self._in_block += 1
        if self._rival is not None:
            return self._decide(best) if self._in_block >= _BLOCK else None
        if self._in_block >= _BLOCK:
            self._look_for_rival(best, step_s)
        return None

    def _rival_passed(self, best: StoredPlan, step_s: float) -> str | None:
        self._num_rivals_passes += 1
        ratio = step_s / self._times.at(self._num_passes)
        if self._num_to_skip:
            self._num_to_skip -= 1
            if ratio > 1 + _OUT_OF_HAND:
                self._tried.append((self._num_passes, step_s))
                self._give_up(ratio)
            return None
        self._tried.append((self._num_passes, step_s))
        self._in_block += 1
        if self._slowdown > 1 + _FAR_OFF + self._error:
            self._give_up(self._slowdown)
        elif self._in_block >= _BLOCK:
            if self._may_win and not self._has_spent:
                self._turn(is_rivals=False)
            else:
                self._give_up(self._slowdown)
        return None

    def _decide(self, best: StoredPlan) -> str | None:
        """The best plan has been timed again after its rival."""
        rival, slowdown = self._rival, self._slowdown
        if rival is None:
            return None
        if slowdown + self._error * _WINS_BY / _LOSES_BY < 1 and slowdown <= 1 - _MIN_GAIN:
            self._take_over(rival, slowdown)
            return (
                f"another plan takes {slowdown:.2f} of the time under the same budget "
                f"({rival.moved_bytes} bytes moved, not {best.moved_bytes})"
            )
        if self._may_win and len(self._tried) < _MAX_TRIED and not self._has_spent:
            self._turn(is_rivals=True)
        else:
            self._give_up(slowdown)
        return None

    # -- decisions -----------------------------------------------------------------------------------------------

    def _look_for_rival(self, best: StoredPlan, step_s: float) -> None:
        if self._num_settled:
            self._num_settled += 1
            if not self._is_due:
                return
            self._recheck = min(2 * self._recheck, _MAX_RECHECK)
            self._ratios = {route: ratio for route, ratio in self._ratios.items() if ratio > _NEAR}
        rival = None if self._has_spent else self._nearest(best)
        if rival is None:
            self._num_settled = 1
            return
        self._rival, self._num_settled = rival, 0
        self._turn(is_rivals=True)

    @property
    def _is_due(self) -> bool:
        """Whether rivals are tried again: after many passes, or because passes have become slower."""
        last, middle = self._times.last(_NUM_SLOWER), self._times.middle
        slow_s = max(_SLOWER, 1 + _LOSES_BY * self._scatter) * middle
        is_slower = len(last) == _NUM_SLOWER and min(last) > slow_s and self._num_settled > _FIRST_RECHECK // 4
        return is_slower or self._num_settled >= self._recheck

    def _nearest(self, best: StoredPlan) -> StoredPlan | None:
        """Of those that may be tried, the one that is thought the fastest; ``None``: none comes near."""
        best_s = self.model.expected(best.plan, best.moved_bytes).step_s
        thought = [
            (self.model.expected(one.plan, one.moved_bytes).step_s / best_s, index)
            for index, one in enumerate(self._others)
            if one.plan.route not in self._ratios and self._fits(one)
        ]
        ratio, index = min(thought, default=(math.inf, 0))
        return self._others[index] if ratio <= _NEAR else None

    def _fits(self, one: StoredPlan) -> bool:
        """Whether nobody thinks its peak above the limit."""
        if one.moved_bytes <= self._over_bytes:
            return False
        thought = max(one.plan.prediction.peak_bytes, self.model.expected(one.plan, one.moved_bytes).peak_bytes)
        return self._limit_bytes is None or thought <= self._limit_bytes

    def _leave(self, known: StoredPlan, peak_bytes: int, limit_bytes: int) -> str | None:
        """More was resident than there may be: follow the fastest one of those that move more."""
        route = known.plan.route
        self._over_bytes = max(self._over_bytes, known.moved_bytes)
        if self._rival is not None and route == self._rival.plan.route:
            self._end_trial()
        if self._best is None or route != self._best.plan.route:
            return None
        lower = [
            (self.model.expected(one.plan, one.moved_bytes).step_s, index)
            for index, one in enumerate(self._others)
            if self._fits(one)
        ]
        if not lower:
            return None
        self._end_trial()
        self._take_over(self._others[min(lower)[1]], self._ratios.get(route, 1.0))
        return f"{peak_bytes} bytes were resident under a budget of {limit_bytes}: a plan that moves more is followed"

    def _take_over(self, rival: StoredPlan, slowdown: float) -> None:
        old = self._best
        tried, self._tried = self._tried, []
        self._end_trial()
        self._times.clear()
        for number, step_s in tried:
            self._times.add(number, step_s)
        self._ratios = {route: ratio / slowdown for route, ratio in self._ratios.items()}
        if old is not None:
            self._ratios[old.plan.route] = 1 / slowdown
            self._others = [old, *(one for one in self._others if one.plan.route != rival.plan.route)]
        self._ratios.pop(rival.plan.route, None)
        self._best, self.num_changes = rival, self.num_changes + 1

    def _give_up(self, slowdown: float) -> None:
        if self._rival is not None:
            self._ratios[self._rival.plan.route] = slowdown
            while len(self._ratios) > _MAX_KNOWN:
                del self._ratios[next(iter(self._ratios))]
        self._end_trial()

    def _end_trial(self) -> None:
        self._spent += self._trial_cost
        if self._tried:
            self._offs.extend(offs([step_s for _, step_s in self._tried]))
        self._rival, self._tried, self._num_rivals_passes = None, [], 0
        self._turn(is_rivals=False)

    def _turn(self, *, is_rivals: bool) -> None:
        """Passes of the other plan follow; the first one maps memory that the one before had not to map."""
        self._is_rivals_turn, self._num_to_skip, self._in_block = is_rivals, 1, 0

    # -- statistics ----------------------------------------------------------------------------------------------

    @property
    def _slowdown(self) -> float:
        """Of the rival, beside the best plan at the time of each of its passes."""
        return typical([step_s / self._times.at(number) for number, step_s in self._tried])

    @property
    def _may_win(self) -> bool:
        return self._slowdown - self._error <= 1 - _MIN_GAIN

    @property
    def _scatter(self) -> float:
        """Standard deviation of one pass, relative to it."""
        seen = [*self._offs, *self._times.offs, *offs([step_s for _, step_s in self._tried])]
        return scatter(seen)

    @property
    def _error(self) -> float:
        """What the rival's slowdown is uncertain by."""
        return _LOSES_BY * self._scatter * math.sqrt(1 / len(self._tried) + 1 / self._times.num_recent)

    @property
    def _trial_cost(self) -> float:
        """Of the present trial, in passes."""
        if not self._tried:
            return 0.0
        return self._num_rivals_passes * max(self._slowdown - 1, 0.0)

    @property
    def _has_spent(self) -> bool:
        return self._spent + self._trial_cost > _SPENT * max(self._num_passes, _SPENT_OVER)
