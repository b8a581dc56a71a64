"""How much may be moved, by measuring: a plan predicts transfers, but not what moving costs in other ways.

On a CPU freed memory has to be mapped anew, and workers share cores with the model; on every device Python has a share
in each move. No trace of an offloaded pass shows it, because there it is part of the compute time. It is close to a
number of seconds per moved byte, which differs between machines by a factor of ten. The search finds that number, and
the planner makes the plan: with a lower cost it moves more, with a higher one less.

A search goes through these states, and back:

* **Keeping**: a few passes keep everything, and are timed; the last one is traced for the next plan.
* **Trying**: passes follow the plan until their time is known well enough to say that it is longer than asked for, that
  it leaves room for moving more, or neither.
* **Settled**: passes follow the plan; rarer and rarer, or when they become slower, keeping is measured again.
* **Resting**: everything is kept for many passes, because no plan kept its promise, or trying has cost too much.

Where a plan keeps its promise and another one may be better, that is made from the trace that there is, and passes
follow the present one until then.

A decision needs evidence: times scatter, and what is not beyond their scatter counts as equal. The typical time of a
few passes is their lower third, because whatever disturbs a pass makes it longer.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from lightning_ssd.scheduling.paired_times import WINDOW, PairedTimes, offs, scatter, typical
from lightning_ssd.scheduling.search_phase import TRANSITIONS, Phase, PhaseEvent, State
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

__all__ = ["NUM_KEPT", "Learnt", "MoveSearch"]

NUM_KEPT = 3
"""Passes that run with everything kept before the first plan comes into force; the first of them warms up."""
_NUM_KEPT_AGAIN = 2
"""The same later on: the first one maps memory that had been given back."""
_MAX_AWAITED = 16
"""Passes that follow a plan while another one is made: so many show that none comes."""
_MIN_TRIED, _MAX_TRIED = 3, 10
"""Of passes in a trial. Where they are surely faster than keeping everything, more would tell nothing."""
_FAR_OFF = (0.25, 0.1)
"""One pass, two passes are enough, where they are beyond what was asked for by so much more."""
_BAND = 1.2
"""Costs closer than this lead to plans that no measurement tells apart."""
_MAX_GROWTH = 3.0
_FIRST_EXCESS, _MIN_ASKED = 0.2, 0.005
"""The first plan is an experiment: a guess is worth little, and a pass that moves much tells the cost at once. If the
guess is right, such a pass takes this much longer than one that keeps everything."""
_SURE = 2.0
"""So many times the usual error: a plan that could move more is settled without another comparison."""
_NEARLY_ALL = 0.9
"""Of what can be moved: what another plan would free is not worth the passes that keep everything to plan it."""
_GUESSED_REST, _REST, _MAX_REST = 8, 64, 4096


@dataclass(frozen=True, slots=True)
class Learnt:
    """What a search has found, for one that begins where it has ended."""

    cost_s_per_byte: float
    good_bytes: int
    """Moved by a plan that has kept its promise; 0: nothing is worth moving."""
    slowdown: float
    """Of that plan, as measured."""


class MoveSearch:
    """Compares the passes that follow plans with those that keep everything, all of one kind and without a budget.

    Args:
        max_slowdown: time of a pass that was asked for, relative to keeping everything.
        cost_s_per_byte: of moving, beyond waiting for transfers.
        is_guess: nothing has been measured, here or elsewhere: the first plan is there to learn from.
        learnt: in an earlier run, of the same passes on the same machine: the first plan is made with it, and its
            trial is shorter where it moves no more than then.
    """

    def __init__(
        self,
        max_slowdown: float,
        cost_s_per_byte: float = 0.0,
        *,
        is_guess: bool = False,
        learnt: Learnt | None = None,
    ) -> None:
        if learnt is not None:
            cost_s_per_byte, is_guess = learnt.cost_s_per_byte, False
        if is_guess:
            cost_s_per_byte *= min(max(max_slowdown - 1, _MIN_ASKED) / _FIRST_EXCESS, 1.0)
        self.cost_s_per_byte = cost_s_per_byte
        """What the next plan is to be made with."""
        self.slowdown: float | None = None
        """Of the latest plan, as measured."""
        self._limit = max_slowdown
        self._offs: deque[float] = deque(maxlen=2 * WINDOW)  # of earlier passes from their median, relative
        self._kept = PairedTimes()
        self._moved: deque[_Moved] = deque(maxlen=WINDOW)  # that followed the present plan
        self._plan: object = None
        self._phase = Phase.MEASURING
        self._num_to_keep = NUM_KEPT  # passes that are still to keep, in whatever phase
        self._num_to_skip = 1
        self._is_back = False  # keeping has not been timed yet since it began again
        self._num_settled, self._recheck = 0, FIRST_RECHECK
        self._rest = _REST if learnt is not None else _GUESSED_REST  # nothing has been measured yet
        self._is_resting = False
        self._rest_cost = cost_s_per_byte  # with which nothing was worth moving
        self._goes_up: bool | None = None  # the cost, when it was last learnt
        self._num_turns = 0
        self._num_passes = 0
        self._num_tried = 0  # passes of the present trial
        self._spent = 0.0  # on earlier ones, in passes
        # Of the latest plan that has kept its promise.
        self._good_bytes = None if learnt is None else learnt.good_bytes
        self._good_slowdown = 1.0 if learnt is None else learnt.slowdown
        self._is_known = False  # the next plan moves no more than that one
        self._moves_all = False  # or nearly: no other plan would move more than the latest one
        self._is_confirmed = False  # that moving is surely faster than keeping, by what was kept before and after it
        self._num_compared = 0  # passes of the trial after which keeping was last measured
        self._has_restarted = False  # the present trial, because the machine had changed
        self._was_doubted = False  # once: the few passes before the first plan may have been fast ones
        self._was_unsure = False  # once per trial: keeping was compared again, since its passes disagreed
        self._is_again = False  # the next trial is of a plan that was settled: keeping is measured before it alone
        self.wants_plan = False
        """Whether the next plan is to be made from the trace of the present one, which passes follow until then."""
        self._num_awaited: int | None = None  # passes since then; ``None``: no plan is made in this way

    # -- what the next pass does -------------------------------------------------------------------------------------

    @property
    def keeps(self) -> bool:
        """Whether the next pass keeps everything."""
        return self._num_to_keep > 0 or self._phase is Phase.MEASURING or self._phase is Phase.AWAITING

    @property
    def is_at_rest(self) -> bool:
        """Whether the next pass keeps everything, and is none that others are compared with."""
        return self._is_resting and self._num_to_keep > NUM_KEPT

    @property
    def wants_trace(self) -> bool:
        """Whether the next pass is the one to plan from."""
        return self._phase is Phase.MEASURING and self._num_to_keep <= 1

    @property
    def state(self) -> State:
        """For metrics."""
        if self.keeps:
            return State.RESTING if self._is_resting else State.KEEPING
        return State.SETTLED if self._phase is Phase.SETTLED else State.TRYING

    @property
    def learnt(self) -> Learnt | None:
        """For another run; ``None``: nothing yet that would spare it trials."""
        if self._is_resting:
            return Learnt(self._rest_cost, 0, 1.0)
        if self._phase is Phase.SETTLED and self._good_bytes is not None:
            return Learnt(self.cost_s_per_byte, self._good_bytes, self._good_slowdown)
        return None

    @property
    def keep_s(self) -> float | None:
        """Typical time of a pass that keeps everything; ``None``: not known yet."""
        return self._kept.at(self._num_passes) if self._kept else None

    # -- what has happened -------------------------------------------------------------------------------------------

    def kept(self, step_s: float | None) -> None:
        """A pass that kept everything has ended, after so many seconds; ``None``: they are not known."""
        self._num_passes += 1
        was_keeping, was_at_rest = self.keeps, self.is_at_rest
        self._num_to_keep = max(self._num_to_keep - 1, 0)
        if was_at_rest:
            if not self.is_at_rest:
                self._num_to_skip = 1  # the next one has memory as plain PyTorch has it
        elif self._num_to_skip:
            self._num_to_skip -= 1
        elif step_s is not None:
            self._keep_time(step_s)
        if was_keeping and not self.keeps:
            self._num_to_skip = 1  # the first pass that follows a plan maps memory that keeping had not to map

    def _keep_time(self, step_s: float) -> None:
        keep_s = self.keep_s
        if self._is_back and keep_s is not None:
            has_changed = abs(step_s / keep_s - 1) > max(SLOWER - 1, 3 * self._scatter)
            if has_changed and not self._has_restarted:
                self._restart()
            else:
                self._num_compared = max(self._num_compared, len(self._moved))
        self._is_back = False
        self._kept.add(self._num_passes, step_s)

    def _restart(self) -> None:
        """The machine has changed: what was measured before says nothing of it. Once per trial, or none would end."""
        self._offs.extend((*self._kept.offs, *offs(self._slowdowns)))
        self._kept.clear()
        self._moved.clear()
        self._num_compared, self._is_again, self._has_restarted = 0, False, True
        self._is_confirmed = False
        self._num_to_keep = max(self._num_to_keep, 1)

    def submitted(self) -> None:
        """A plan is being made, from the trace of the latest pass or, where it is wanted, of the present plan."""
        if self.wants_plan:
            self.wants_plan = False
        elif not self._num_to_keep:
            self._happened(PhaseEvent.SUBMITTED)

    def planned(self, nbytes: int | None, movable_bytes: int | None = None) -> None:
        """The plan has been made. Where it moves nothing, everything is kept for a while, before less is asked for.

        Args:
            nbytes: that it moves; ``None``: unknown yet, but some.
            movable_bytes: that can be moved; ``None``: unknown.
        """
        self._happened(PhaseEvent.PLANNED)
        self._is_again = False
        self._moves_all = bool(nbytes and movable_bytes and nbytes >= _NEARLY_ALL * movable_bytes)
        self._is_known = bool(nbytes and self._good_bytes and nbytes <= _BAND * self._good_bytes)
        if nbytes != 0 or self._phase is Phase.MEASURING:
            return
        if self.cost_s_per_byte > 0:
            self._keep_for_long()
            self.cost_s_per_byte /= 2
        else:
            self._happened(PhaseEvent.CONVINCED)  # it is not the cost: nothing helps

    def moved(
        self, plan: object, nbytes: int, step_s: float, predicted_stall_s: float, *, has_trace: bool = False
    ) -> str | None:
        """A pass has followed a plan to its end.

        Args:
            plan: any object, the same for all passes that follow it.
            nbytes: that it moves.
            step_s: how long the pass took.
            predicted_stall_s: of these, seconds in which it was to wait for transfers. All others beyond keeping are a
                cost of moving, since nobody knows them better.
            has_trace: whether another plan can be made from the trace of this one.

        Returns:
            Why another plan is wanted, or ``None``.
        """
        self._num_passes += 1
        keep_s = self.keep_s
        if self.keeps or keep_s is None:  # it had begun before that was decided
            return None
        if plan is not self._plan:
            self._plan = plan
            self._try()
        if not nbytes:
            self._happened(PhaseEvent.CONVINCED)  # it recomputes, say: there is no cost of moving to be found
            return None
        if self._num_awaited is not None:
            self._num_awaited += 1
            if self._num_awaited < _MAX_AWAITED:
                return None
            self._num_awaited, self.wants_plan = None, False
        self._num_tried += self._phase is not Phase.SETTLED
        if self._num_to_skip:
            self._num_to_skip -= 1
            if step_s <= (self._limit + OUT_OF_HAND) * keep_s:
                return None
        self._moved.append(_Moved(self._num_passes, step_s, predicted_stall_s))
        self.slowdown = typical(self._slowdowns)
        if self._phase is Phase.SETTLED:
            self._look_again(keep_s)
            return None
        return self._judge(nbytes, keep_s, self.slowdown, has_trace)

    def replan(self, *, has_trace: bool = False) -> bool:
        """Something else than the cost of moving calls for another plan.

        None is made in place of one that moves all there is and keeps its promise. Should it cease to, its passes tell.

        Args:
            has_trace: whether it can be made from the trace of the present one.

        Returns:
            Whether another plan is wanted now.
        """
        is_good = (
            self._moves_all
            and self.slowdown is not None
            and self.slowdown <= min(self._limit, SLOWER * self._good_slowdown)
        )
        if self.keeps or is_good or self._num_awaited is not None:
            return False
        if has_trace and self.slowdown is not None and self.slowdown <= self._limit:
            self._go_on_until_planned()
        else:  # also where the present plan is too slow by now
            self._measure_keeping(PhaseEvent.REPLANNED)
        return True

    # -- decisions ---------------------------------------------------------------------------------------------------

    def _judge(self, nbytes: int, keep_s: float, slowdown: float, has_trace: bool) -> str | None:
        num, excess, error = len(self._moved), slowdown - self._limit, self._error
        is_faster = num >= _MIN_TRIED and slowdown + error < 1
        is_over = is_faster or num >= (_MAX_TRIED // 2 if self._is_known else _MAX_TRIED)
        cost = typical([one.step_s - one.stall_s - self._kept.at(one.number) for one in self._moved])
        is_far_off = excess > _FAR_OFF[min(num, len(_FAR_OFF)) - 1] + error
        if is_far_off or (num >= _MIN_TRIED and excess > error) or (is_over and excess > error / 2):
            if not (is_far_off or self._num_compared or self._was_doubted or self._has_spent):
                self._was_doubted = True
                self._compare()
                return None
            if excess <= NUM_ERRORS * self._kept.error and not (self._was_unsure or self._has_spent):
                # The passes that kept disagree by more than that: one of them may have been a fast one.
                self._was_unsure = True
                self._compare()
                return None
            if is_far_off:
                self._num_turns = 0  # the machine is another one than before, or this is the first plan
            self._forget_good()
            return self._learn(max(cost / nbytes, _BAND * self.cost_s_per_byte), "less is moved")
        if self._has_spent:
            self._keep_for_long()
            return None
        surely = cost + error * keep_s / (2 if is_over else 1)
        self._is_confirmed |= is_faster and self._num_compared > 0
        # Few passes decide here, and nothing is compared after them. Where all is moved nothing else could be tried.
        is_sure = is_faster and self._is_confirmed and (self._moves_all or slowdown + _SURE * error < 1)
        is_compared = is_sure or self._num_compared > 0
        may_be_cheaper = is_compared and self.cost_s_per_byte > 0 and not (self._is_known or self._moves_all)
        if may_be_cheaper and _BAND * surely < self.cost_s_per_byte * nbytes:
            least = 0.0 if is_faster else self.cost_s_per_byte / _MAX_GROWTH
            told = self._learn(max(cost / nbytes, least), "more can be moved", has_trace=has_trace)
            if told is not None:
                self._note_good(nbytes)
                return told
        if is_sure or (is_over and self._num_compared >= num - 1):
            self._note_good(nbytes)
            self._settle()
        elif is_faster or num - self._num_compared >= _MAX_TRIED // 2:
            self._compare()
        return None

    def _compare(self) -> None:
        """Measure keeping once more before the plan is settled: the machine may be faster than it was before."""
        self._is_back = True
        self._num_to_keep, self._num_to_skip = NUM_KEPT, 1

    def _note_good(self, nbytes: int) -> None:
        self._good_bytes, self._good_slowdown = nbytes, self.slowdown or 1.0

    def _forget_good(self) -> None:
        self._good_bytes, self._is_known = None, False

    def _settle(self) -> None:
        self._spent += self._trial_cost
        self._num_tried = self._num_settled = 0
        self._rest = _REST
        self._happened(PhaseEvent.CONVINCED)

    def _learn(self, cost: float, what: str, *, has_trace: bool = False) -> str | None:
        """Approach ``cost``, by less each time that the search turns round.

        Where passes are to move more they go on as they do until there is a plan, if it needs no other trace.

        Source: H. Kesten, Accelerated stochastic approximation (Annals of Mathematical Statistics 29, 1958).
        """
        went_up, goes_up = self._goes_up, cost > self.cost_s_per_byte
        num_turns = self._num_turns + (went_up is not None and went_up is not goes_up)
        if self.cost_s_per_byte > 0:
            cost = self.cost_s_per_byte * (cost / self.cost_s_per_byte) ** (1 / (1 + num_turns))
        if not goes_up and _BAND * cost > self.cost_s_per_byte:
            return None
        self._goes_up, self._num_turns, self.cost_s_per_byte = goes_up, num_turns, cost
        self._rest = max(self._rest, _REST)
        if self._has_spent:
            self._keep_for_long()
        elif has_trace:
            self._go_on_until_planned()
        else:
            self._measure_keeping(PhaseEvent.REPLANNED)
        return (
            f"passes take {self.slowdown:.2f} times as long as with everything kept: {what} "
            f"({cost * 2**30:.3g} s per GiB besides transfers)"
        )

    @property
    def _has_spent(self) -> bool:
        return num_owed(self._spent + self._trial_cost, self._num_passes) > 0

    @property
    def _trial_cost(self) -> float:
        """Of the present trial, in passes; by the typical one, since what disturbs a pass is not its fault."""
        if self.slowdown is None or not self._moved:
            return 0.0
        return self._num_tried * max(self.slowdown - self._limit, 0.0)

    def _look_again(self, keep_s: float) -> None:
        """Keeping is measured again now and then, and when passes have become slower."""
        self._num_settled += 1
        last = [one.step_s for one in self._moved][-NUM_SLOWER:]
        slow_s = max(SLOWER * self._good_slowdown, self._limit + NUM_ERRORS * self._scatter) * keep_s
        is_slower = are_slower(last, slow_s)
        if is_slower or self._num_settled >= self._recheck:
            self._recheck = min(2 * self._recheck, MAX_RECHECK)
            self._forget_good()  # as good as then, or not: the same plan is tried again
            self._measure_keeping(PhaseEvent.DOUBTED)
            self._is_again = not is_slower

    def _measure_keeping(self, why: PhaseEvent) -> None:
        self._happened(why)
        self._spent += self._trial_cost
        self._num_tried, self._is_again = 0, False
        self._num_to_keep, self._num_to_skip = _NUM_KEPT_AGAIN, 1
        self._is_back = True
        self._plan = None  # it is tried anew

    def _go_on_until_planned(self) -> None:
        self._spent += self._trial_cost
        self._num_tried, self._num_awaited, self.wants_plan = 0, 0, True

    def _keep_for_long(self) -> None:
        self._rest_cost = self.cost_s_per_byte
        self._measure_keeping(PhaseEvent.REPLANNED)
        self._num_to_keep = max(self._rest, num_owed(self._spent, self._num_passes))
        self._rest = min(2 * self._rest, _MAX_REST)
        self._is_resting = True

    def _try(self) -> None:
        self._offs.extend(offs(self._slowdowns))
        self._moved.clear()
        self._num_compared = _MAX_TRIED if self._is_again else 0
        self._is_again = self._has_restarted = self._was_unsure = self.wants_plan = False
        self._num_awaited = None
        self._num_to_skip = 1  # the first one maps memory that keeping had not to map
        self._is_resting = False
        self._happened(PhaseEvent.BEGUN)

    def _happened(self, event: PhaseEvent) -> None:
        self._phase = TRANSITIONS.get((self._phase, event), self._phase)

    # -- statistics --------------------------------------------------------------------------------------------------

    @property
    def _scatter(self) -> float:
        """Standard deviation of one pass, relative to it."""
        seen = [*self._offs, *self._kept.offs, *offs(self._slowdowns)]
        return scatter(seen)

    @property
    def _error(self) -> float:
        """What the measured slowdown is uncertain by."""
        return NUM_ERRORS * self._scatter * math.sqrt(1 / len(self._moved) + 1 / self._kept.num_recent)

    @property
    def _slowdowns(self) -> list[float]:
        """Of each pass that has followed the plan, against keeping at its time."""
        return [one.step_s / self._kept.at(one.number) for one in self._moved]


class _Moved(NamedTuple):
    """A pass that has followed a plan."""

    number: int
    step_s: float
    stall_s: float
    """Predicted."""
