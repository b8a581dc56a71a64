"""Which plan within a budget is the fastest: found by measuring, on machines of which the model is wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import pytest

from lightning_ssd.planning.plan import PlanObjective
from lightning_ssd.planning.planner import alternatives, make_plan
from lightning_ssd.scheduling.budget_search import BudgetSearch
from lightning_ssd.scheduling.plan_cursor import StoredPlan
from lightning_ssd.scheduling.scheduler import Scheduler
from lightning_ssd.scheduling.search_phase import State
from lightning_ssd.scheduling.step_model import StepModel
from tests.support.fake_passes import FAST, NBYTES, make_trace, opened, run_pass
from tests.support.interrupted_points import PointsIn

COUNT = 24
BUDGET = 10 * NBYTES


@dataclass
class Run:
    """Passes within a budget, on a machine on which moving such a share of all takes so many seconds more."""

    extra_s: Callable[[float], float]
    noise: float = 0.0
    budget: int = BUDGET
    over: Callable[[float], bool] = lambda share: False
    """Whether more is resident than there may be, although nobody has foreseen it."""
    is_full: range = range(0)
    """Passes in which the drive takes nothing, so that more is resident, whatever the plan."""
    shares: dict[int, list[float]] = field(default_factory=dict)
    """That the passes of each number of storages moved."""
    times: list[float] = field(default_factory=list)
    searches: list[BudgetSearch] = field(default_factory=list)
    predicted_peaks: list[int] = field(default_factory=list)

    def __call__(self, passes: int, *, counts: tuple[int, ...] = (COUNT,), seed: int = 1) -> Run:
        dice = random.Random(seed)
        with opened(activation_budget=self.budget) as made:
            for number in range(passes):
                count = counts[number % len(counts)]
                trace = make_trace(count)
                cursor, _ = made.cursor("a", level_bytes=0, available_bytes=1 << 40)
                sizes = (NBYTES,) * count
                known = next((k for k in cursor._candidates if k.sizes == sizes), None)
                share = 0.0 if known is None else known.moved_bytes / (count * NBYTES)
                self.predicted_peaks += [] if known is None else [known.plan.prediction.peak_bytes]
                step_s = (1 + self.extra_s(share)) * (1 + abs(dice.gauss(0, self.noise)))
                is_over = self.over(share) or number in self.is_full
                peak = self.budget + 1 if is_over else min(self.budget, NBYTES)
                run_pass(made, trace, step_s=step_s, available_bytes=1 << 40, peak_bytes=peak)
                made.wait()
                self.shares.setdefault(count, []).append(share)
                self.times.append(step_s)
            self.searches = list(made._kinds["a"].budget_searches.values())
        return self


def test_where_moving_more_is_faster_more_is_moved() -> None:
    """The model thinks all plans equal, and takes the one that moves least."""
    run = Run(lambda share: -0.3 * share)(80)
    favourite = next(share for share in run.shares[COUNT] if share)
    assert run.shares[COUNT][-1] == max(run.shares[COUNT]) > favourite + 0.2
    assert run.searches[0].state is State.SETTLED
    assert set(run.shares[COUNT][-10:]) == {run.shares[COUNT][-1]}


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.03])
def test_a_favourite_that_is_the_fastest_stays(noise: float) -> None:
    run = Run(lambda share: 0.3 * share, noise)(80)
    assert run.shares[COUNT][-1] == min(share for share in run.shares[COUNT] if share)
    assert run.searches[0].num_changes == 0


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
def test_noise_is_not_chased(noise: float) -> None:
    """All plans take the same."""
    changes = [Run(lambda share: 0.0, noise)(200, seed=seed).searches[0].num_changes for seed in range(5)]
    assert sum(changes) <= 2


@pytest.mark.parametrize("cost_s", [0.3, 3.0])
def test_trying_costs_little(cost_s: float) -> None:
    """Plans that move more than the favourite are much slower, whatever the model says."""
    run = Run(lambda share: cost_s * (share > 0.6))(100)
    assert sum(time - 1 for time in run.times) <= 1.6 + 2 * cost_s


@pytest.mark.parametrize("extra_s", [lambda s: -0.3 * s, lambda s: 0.0, lambda s: 0.3 * s])
def test_no_plan_above_the_budget_is_tried(extra_s: Callable[[float], float]) -> None:
    for budget in (2 * NBYTES, 3 * NBYTES, BUDGET, (COUNT - 1) * NBYTES, COUNT * NBYTES, 100 * NBYTES):
        run = Run(extra_s, budget=budget)(40)
        assert max(run.predicted_peaks) <= budget
        if budget >= COUNT * NBYTES:
            assert max(run.shares[COUNT]) == 0, "everything fits"


def test_a_peak_above_the_budget_makes_it_move_more() -> None:
    run = Run(lambda share: 0.0, over=lambda share: 0 < share < 0.7)(40)
    assert all(share > 0.7 for share in run.shares[COUNT][-20:])


def test_a_drive_that_was_full_for_a_while_does_not_slow_training_for_ever() -> None:
    """Moving costs time: meanwhile more and more was moved, in vain."""
    run = Run(lambda share: 0.3 * share, is_full=range(30, 34))(200)
    least = min(share for share in run.shares[COUNT] if share)
    assert max(run.shares[COUNT][34:60]) > least
    assert set(run.shares[COUNT][-20:]) == {least}


def stored_plans() -> list[StoredPlan]:
    """The planner's choice, and its rivals."""
    trace, goal = make_trace(COUNT), PlanObjective(budget_bytes=BUDGET)
    plan = make_plan(trace, FAST, goal)
    made = [plan, *alternatives(trace, FAST, goal, plan)]
    sizes, rates = (NBYTES,) * COUNT, FAST.ssd
    assert rates is not None
    return [StoredPlan(sizes=sizes, trace=trace, goal=goal, rates=rates, plan=one) for one in made]


def test_what_was_measured_stays_true_when_a_plan_that_moves_more_takes_over() -> None:
    """The times of all plans are known relative to the one that is followed."""
    best, *others = stored_plans()
    others = [one for one in others if one.moved_bytes > best.moved_bytes]
    search = BudgetSearch(StepModel())
    search.renew(best, others, BUDGET)
    passes = 0
    while not search._ratios and passes < 100:
        chosen = search.chosen
        assert chosen is not None
        search.passed(chosen, 1.0 if chosen is best else 1.4, NBYTES, BUDGET)
        passes += 1
    (slow,) = search._ratios
    search._others = [one for one in others if one.plan.route == slow]
    search.passed(best, 1.0, BUDGET + 1, BUDGET)
    assert search.best is not None
    assert search.best.plan.route == slow
    assert search._ratios == {best.plan.route: pytest.approx(1 / 1.4)}
    assert search.is_proven, "no model knows better than that the other one went above the limit"


class PathsIn(PointsIn):
    """Each point once for each line that leads there."""

    def key(self, frame: FrameType, event: str) -> tuple[Any, ...]:
        caller = frame.f_back
        came_from = () if caller is None else (caller.f_code.co_qualname, caller.f_lasti)
        return *super().key(frame, event), *came_from


def test_ctrl_c_at_each_point_of_the_search() -> None:
    """Who goes on training after it gets plans that are compared as before."""
    points, num = PathsIn("scheduling/budget_search.py", "scheduling/paired_times.py"), 0
    slow = 0.3
    trace, sizes = make_trace(COUNT), (NBYTES,) * COUNT

    def one_pass(made: Scheduler) -> float:
        cursor, _ = made.cursor("a", level_bytes=0, available_bytes=1 << 40)
        known = next((k for k in cursor._candidates if k.sizes == sizes), None)
        share = 0.0 if known is None else known.moved_bytes / (COUNT * NBYTES)
        run_pass(made, trace, step_s=1 - slow * share, available_bytes=1 << 40, peak_bytes=NBYTES)
        made.wait()
        return share

    while True:
        where = None
        with opened(activation_budget=BUDGET) as made:
            for _ in range(60):
                where = where or points.interrupt(lambda made=made: one_pass(made))
            shares = [one_pass(made) for _ in range(60)][-8:]
            (search,) = made._kinds["a"].budget_searches.values()
        if where is None:
            break
        num += 1
        assert len(set(shares)) == 1, (where, shares)
        assert shares[0] > 0.9, (where, shares)
        assert search.state is State.SETTLED, where
    assert num > 50


def test_two_shapes_converge_without_disturbing_each_other() -> None:
    """They begin with the same sizes."""
    run = Run(lambda share: -0.3 * share)(160, counts=(COUNT, 16))
    assert len(run.searches) == 2
    for shares, search in zip(run.shares.values(), run.searches, strict=True):
        assert search.state is State.SETTLED
        assert set(shares[-10:]) == {max(shares)}


def test_the_first_plan_of_a_search_that_is_renewed_stays_if_it_was_measured() -> None:
    run = Run(lambda share: -0.3 * share)(80)
    search = run.searches[0]
    best = search.best
    assert best is not None
    assert search.is_proven
    search.renew(best, search._others, BUDGET)
    assert search.chosen is best
