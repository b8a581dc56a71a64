"""Which plan within a budget is the fastest: found by measuring, on machines of which the model is wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from lightning_ssd.scheduling.budget_search import BudgetSearch
from lightning_ssd.scheduling.search_phase import State
from tests.support.fake_passes import NBYTES, make_trace, opened, run_pass

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
                peak = self.budget + 1 if self.over(share) else min(self.budget, NBYTES)
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
