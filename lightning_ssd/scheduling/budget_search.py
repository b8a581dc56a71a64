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

No plan whose peak is thought to be above the limit is ever tried. One whose measured peak was above it, such as where a
drive has refused writes, is given up at once for one that moves more, and none that moves as little is tried before the
others are tried again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_ssd.planning.plan import Route
from lightning_ssd.scheduling.paired_times import WINDOW, PairedTimes, offs, scatter, typical
from lightning_ssd.scheduling.plan_cursor import StoredPlan
from lightning_ssd.scheduling.search_phase import State
from lightning_ssd.scheduling.step_model import StepModel
from lightning_ssd.scheduling.trial_rules import (
    FIRST_RECHECK,
    MAX_RECHECK,
    NUM_ERRORS,
    NUM_SLOWER,
    OUT_OF_HAND,
    SLOWER,
    are_slower,
    num_owed,
)

__all__ = ["BudgetSearch"]

_BLOCK, _MAX_TRIED = 3, 9
"""Passes one after the other of the same plan; and of one rival in all. The first of each block does not count."""
_NEAR = 1.05
"""Rivals that are thought to take longer than so many times the best plan's time are not tried."""
_MIN_GAIN = 0.01
"""For less, no plan gives way."""
_WINS_BY = 2.5
"""Standard errors: many rivals are looked at, several times each, so that some seem fast by chance."""
_FAR_OFF = 0.1
"""A rival that is slower by this much and its uncertainty loses after one pass."""
_MAX_KNOWN = 64


@dataclass(slots=True)
class _Trial:
    """Of a rival. It begins and ends by one assignment, since Ctrl-C may come before and after each call."""

    rival: StoredPlan
    is_rivals_turn: bool = True
    num_passes: int = 0
    tried: list[tuple[int, float]] = field(default_factory=list)
    """Passes that counted: their numbers and seconds."""


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
        self._is_compared = False  # with another one, by measurement
        self._trial: _Trial | None = None
        self._num_to_skip = 1
        self._in_block = 0  # passes that counted since the turn began
        self._times = PairedTimes()  # of the best plan
        self._offs: deque[float] = deque(maxlen=2 * WINDOW)  # of earlier rivals' passes
        self._ratios: dict[Route, float] = {}  # measured time relative to the best plan
        self._over_bytes = -1  # moved by a plan that was above the limit, as measured: no other one moves so little
        self._num_passes = 0
        self._spent = 0.0  # in passes
        self._num_settled, self._recheck = 0, FIRST_RECHECK
        self._limit_bytes: int | None = None

    # -- what the next pass does ---------------------------------------------------------------------------------

    @property
    def best(self) -> StoredPlan | None:
        """The fastest plan as far as it is known; ``None``: there is none yet."""
        return self._best

    @property
    def chosen(self) -> StoredPlan | None:
        """What the next pass is to follow."""
        trial = self._trial
        return self._best if trial is None or not trial.is_rivals_turn else trial.rival

    @property
    def state(self) -> State:
        """For metrics."""
        return State.SETTLED if self._trial is None and self._num_settled else State.TRYING

    @property
    def is_proven(self) -> bool:
        """Whether no model knows better than to follow the best plan: it has been measured beside another one, or has
        taken the place of one that was above the limit.
        """
        return self._is_compared or (self._best is not None and 0 <= self._over_bytes < self._best.moved_bytes)

    def renew(self, best: StoredPlan, others: Sequence[StoredPlan], limit_bytes: int | None) -> None:
        """Plans have been made from a new trace. What was measured of those that do the same is kept.

        Args:
            best: to go on with.
            others: that may be tried.
            limit_bytes: of resident saved activations.
        """
        has_changed = self._best is None or self._best.plan.route != best.plan.route
        self._limit_bytes = limit_bytes
        if self._trial is not None:
            self._end(self._trial)
        if has_changed:
            self._times.clear()
            self._ratios.clear()
            self._is_compared = False
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
        chosen, best, trial = self.chosen, self._best, self._trial
        if limit_bytes is not None and peak_bytes > limit_bytes:
            return self._leave(known, peak_bytes, limit_bytes)
        if chosen is None or best is None or known.plan.route != chosen.plan.route:
            return None  # it had begun before that was decided
        if trial is not None and trial.is_rivals_turn:
            self._rival_passed(trial, step_s)
            return None
        if self._num_to_skip:
            self._num_to_skip -= 1
            return None
        self._times.add(self._num_passes, step_s)
        self._in_block += 1
        if self._in_block < _BLOCK:
            return None
        if trial is not None:
            return self._decide(best, trial)
        self._look_for_rival(best)
        return None

    def _rival_passed(self, trial: _Trial, step_s: float) -> None:
        trial.num_passes += 1
        ratio = step_s / self._times.at(self._num_passes)
        if self._num_to_skip:
            self._num_to_skip -= 1
            if ratio > 1 + OUT_OF_HAND:
                trial.tried.append((self._num_passes, step_s))
                self._give_up(trial, ratio)
            return
        trial.tried.append((self._num_passes, step_s))
        self._in_block += 1
        slowdown = self._slowdown(trial)
        if slowdown > 1 + _FAR_OFF + self._error(trial):
            self._give_up(trial, slowdown)
        elif self._in_block >= _BLOCK:
            if self._goes_on(trial):
                self._turn(trial, is_rivals=False)
            else:
                self._give_up(trial, slowdown)

    def _decide(self, best: StoredPlan, trial: _Trial) -> str | None:
        """The best plan has been timed again after its rival."""
        rival, slowdown = trial.rival, self._slowdown(trial)
        if slowdown + self._error(trial) * _WINS_BY / NUM_ERRORS < 1 and slowdown <= 1 - _MIN_GAIN:
            self._take_over(rival, slowdown, trial.tried)
            return (
                f"another plan takes {slowdown:.2f} of the time under the same budget "
                f"({rival.moved_bytes} bytes moved, not {best.moved_bytes})"
            )
        if len(trial.tried) < _MAX_TRIED and self._goes_on(trial):
            self._turn(trial, is_rivals=True)
        else:
            self._give_up(trial, slowdown)
        return None

    # -- decisions -----------------------------------------------------------------------------------------------

    def _look_for_rival(self, best: StoredPlan) -> None:
        if self._num_settled:
            self._num_settled += 1
            if not self._is_due:
                return
            self._recheck = min(2 * self._recheck, MAX_RECHECK)
            self._ratios = {route: ratio for route, ratio in self._ratios.items() if ratio > _NEAR}
            self._over_bytes = -1  # what was in the way may have gone, such as a full drive
        rival = None if self._has_spent(None) else self._nearest(best)
        if rival is None:
            self._num_settled = 1
            return
        trial = _Trial(rival)
        self._trial, self._num_settled, self._num_to_skip, self._in_block = trial, 0, 1, 0

    @property
    def _is_due(self) -> bool:
        """Whether rivals are tried again: after many passes, or because passes have become slower."""
        slow_s = max(SLOWER, 1 + NUM_ERRORS * self._scatter) * self._times.middle
        is_slower = are_slower(self._times.last(NUM_SLOWER), slow_s) and self._num_settled > FIRST_RECHECK // 4
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
        route, trial = known.plan.route, self._trial
        self._over_bytes = max(self._over_bytes, known.moved_bytes)
        if trial is not None and route == trial.rival.plan.route:
            self._end(trial)
        if self._best is None or route != self._best.plan.route:
            return None
        lower = [
            (self.model.expected(one.plan, one.moved_bytes).step_s, index)
            for index, one in enumerate(self._others)
            if self._fits(one)
        ]
        if not lower:
            return None
        if trial is not None:
            self._end(trial)
        chosen = self._others[min(lower)[1]]
        self._take_over(chosen, self._ratios.get(chosen.plan.route, 1.0))
        self._is_compared = False
        return f"{peak_bytes} bytes were resident under a budget of {limit_bytes}: a plan that moves more is followed"

    def _take_over(self, rival: StoredPlan, slowdown: float, tried: Sequence[tuple[int, float]] = ()) -> None:
        """Follow a rival that takes so many times the time of the best plan, as some passes have shown."""
        old, times = self._best, PairedTimes()
        for number, step_s in tried:
            times.add(number, step_s)
        ratios = {route: ratio / slowdown for route, ratio in self._ratios.items()}
        others = [one for one in self._others if one.plan.route != rival.plan.route]
        if old is not None:
            ratios[old.plan.route] = 1 / slowdown
            others.insert(0, old)
        ratios.pop(rival.plan.route, None)
        self._trial, self._num_to_skip, self._in_block = None, 1, 0
        self._best, self._times, self._ratios, self._others = rival, times, ratios, others
        self._is_compared, self.num_changes = True, self.num_changes + 1

    def _give_up(self, trial: _Trial, slowdown: float) -> None:
        self._ratios[trial.rival.plan.route] = slowdown
        self._is_compared = True
        while len(self._ratios) > _MAX_KNOWN:
            del self._ratios[next(iter(self._ratios))]
        self._end(trial)

    def _end(self, trial: _Trial) -> None:
        self._spent += self._cost(trial)
        self._offs.extend(offs([step_s for _, step_s in trial.tried]))
        self._trial, self._num_to_skip, self._in_block = None, 1, 0

    def _turn(self, trial: _Trial, *, is_rivals: bool) -> None:
        """Passes of the other plan follow; the first one maps memory that the one before had not to map."""
        trial.is_rivals_turn, self._num_to_skip, self._in_block = is_rivals, 1, 0

    def _goes_on(self, trial: _Trial) -> bool:
        """Whether the rival may still win."""
        may_win = self._slowdown(trial) - self._error(trial) <= 1 - _MIN_GAIN
        return may_win and not self._has_spent(trial)

    # -- statistics ----------------------------------------------------------------------------------------------

    def _slowdown(self, trial: _Trial) -> float:
        """Of the rival, beside the best plan at the time of each of its passes."""
        return typical([step_s / self._times.at(number) for number, step_s in trial.tried])

    @property
    def _scatter(self) -> float:
        """Standard deviation of one pass, relative to it."""
        tried = [] if self._trial is None else [step_s for _, step_s in self._trial.tried]
        return scatter([*self._offs, *self._times.offs, *offs(tried)])

    def _error(self, trial: _Trial) -> float:
        """What the rival's slowdown is uncertain by."""
        return NUM_ERRORS * self._scatter * math.sqrt(1 / len(trial.tried) + 1 / self._times.num_recent)

    def _cost(self, trial: _Trial) -> float:
        """Of a trial, in passes."""
        return trial.num_passes * max(self._slowdown(trial) - 1, 0.0) if trial.tried else 0.0

    def _has_spent(self, trial: _Trial | None) -> bool:
        """Whether trying has cost all that it may, with the present trial."""
        cost = 0.0 if trial is None else self._cost(trial)
        return num_owed(self._spent + cost, self._num_passes) > 0
