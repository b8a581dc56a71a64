"""The search for what moving costs, without a planner: amounts that move are made from its cost as a planner does."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import product
from statistics import mean, median

import pytest

from lightning_ssd.scheduling.move_search import NUM_KEPT, MoveSearch
from lightning_ssd.scheduling.search_phase import State

LIMIT = 1.02
TOTAL = 1000
"""Bytes that could be moved."""
MIN_MOVED = 50


@pytest.fixture(autouse=True)
def plans_are_followed() -> None:
    """Here they are measured."""


class Machine:
    """Passes of one second that take longer where they move, and where something disturbs them."""

    def __init__(
        self,
        extra_s: Callable[[float], float],
        *,
        guess_s: float = 0.1,
        noise: float = 0.0,
        seed: int = 0,
        max_slowdown: float = LIMIT,
    ) -> None:
        self.extra_s = extra_s
        self.search = MoveSearch(max_slowdown, guess_s / TOTAL, is_guess=True)
        self.pace = 1.0
        self.moved: list[float] = []
        """Share of all bytes that each pass moved."""
        self.excess = 0.0
        self._limit = max_slowdown
        self._noise = noise
        self._dice = random.Random(seed)
        self._plan: tuple[object, int] | None = None
        self.has_trace = True
        self.planning_takes = 1
        """Passes that follow a plan while another one is made from its trace."""
        self._planned_in = -1

    def run(self, passes: int) -> Machine:
        for _ in range(passes):
            self._pass()
        return self

    def _pass(self) -> None:
        search = self.search
        if search.keeps or self._plan is None or not self._plan[1]:
            was_wanted, number = search.wants_trace, len(self.moved)
            was_moving = bool(self.moved) and self.moved[-1] > 0
            search.kept(self._clocked(self.pace * (3 if not number else 1.1 if was_moving else 1)))
            self.moved.append(0.0)
            if was_wanted:
                search.submitted()
                self._plan = object(), self._amount()
                search.planned(self._plan[1], TOTAL)
            return
        if self._planned_in == 0:
            self._plan = object(), self._amount()
            search.planned(self._plan[1], TOTAL)
        self._planned_in = max(self._planned_in - 1, -1)
        plan, nbytes = self._plan
        share = nbytes / TOTAL
        slowdown = 1 + self.extra_s(share)
        self.excess += max(slowdown - self._limit, 0)
        self.moved.append(share)
        search.moved(plan, nbytes, self._clocked(self.pace * slowdown), 0.0, has_trace=self.has_trace)
        if search.wants_plan:
            search.submitted()
            self._planned_in = self.planning_takes

    def _amount(self) -> int:
        keep_s = self.search.keep_s or 1.0
        cost = self.search.cost_s_per_byte
        most = TOTAL if cost <= 0 else min(TOTAL, math.floor((self._limit - 1) * keep_s / cost))
        return most if most >= MIN_MOVED else 0

    def _clocked(self, seconds: float) -> float:
        disturbed = self._dice.random() < 0.05 and self._noise
        return seconds * (1 + abs(self._dice.gauss(0, self._noise)) + (0.5 * self._dice.random() if disturbed else 0))


def test_the_first_passes_keep() -> None:
    search = MoveSearch(LIMIT)
    for number in range(NUM_KEPT):
        assert search.keeps
        assert search.wants_trace is (number == NUM_KEPT - 1)
        search.kept(1.0 + 9 * (number == 0))
    assert search.keeps, "until there is a plan"
    search.submitted()
    assert search.keeps
    search.planned(TOTAL)
    assert not search.keeps
    assert search.keep_s == 1.0, "the first one warms up, and must not make everything else look fast"


def test_without_evidence_nothing_is_changed() -> None:
    """A plan that keeps its promise is followed; one slow pass among others says nothing."""
    machine = Machine(lambda share: 0.01, guess_s=0.0).run(30)
    assert machine.search.state is State.SETTLED
    assert machine.moved[NUM_KEPT:].count(1.0) == 30 - 3 * NUM_KEPT, (
        "keeping is measured again, in between and before the end"
    )
    search = machine.search
    for number in range(30):
        assert search.moved(machine._plan and machine._plan[0], TOTAL, 1.01 if number % 3 else 4.0, 0.0) is None
    assert search.state is State.SETTLED


def feed(
    search: MoveSearch,
    keep_s: Callable[[int], float | None],
    moved_s: float,
    passes: int,
    *,
    movable: int | None = None,
) -> list[float]:
    """Run passes that keep or move everything, and return the share that each moved.

    Args:
        keep_s: seconds of a pass that keeps everything, by how many have kept before.
    """
    plan, shares, num_kept = object(), [], 0
    for _ in range(passes):
        if not search.keeps:
            shares.append(1.0)
            search.moved(plan, TOTAL, moved_s, 0.0)
            continue
        shares.append(0.0)
        was_wanted = search.wants_trace
        search.kept(keep_s(num_kept))
        num_kept += 1
        if was_wanted:
            plan = object()
            search.submitted()
            search.planned(TOTAL, movable)
    return shares


def test_a_plan_is_not_given_up_because_the_first_passes_were_fast() -> None:
    """The two that are timed before the first plan may be so by chance: keeping is measured after the trial, too."""
    search = MoveSearch(LIMIT)
    shares = feed(search, lambda num: 0.78 if num < NUM_KEPT else 0.88, 0.83, 40)
    assert search.state is State.SETTLED
    assert search.cost_s_per_byte == 0.0, "nothing was given up"
    assert shares.count(0.0) <= 3 * NUM_KEPT


def test_a_plan_is_given_up_where_keeping_is_as_fast_as_before() -> None:
    search = MoveSearch(LIMIT)
    shares = feed(search, lambda num: 0.78, 0.83, 2 * NUM_KEPT + 7)
    assert search.cost_s_per_byte > 0
    assert shares.count(1.0) <= 6, "once more after keeping"


def test_keeping_that_cannot_be_timed_is_asked_for_once() -> None:
    """Another thread beside each pass, say: then what is known has to do."""
    search = MoveSearch(LIMIT)
    feed(search, lambda num: 0.78 if num < NUM_KEPT else None, 0.83, 2 * NUM_KEPT + 7)
    assert search.cost_s_per_byte > 0


def test_what_is_faster_than_keeping_is_settled_soon() -> None:
    """On a CPU where memory that moves is reused, and what is kept is mapped anew."""
    machine = Machine(lambda share: -0.2 * share, guess_s=0.0).run(4 * NUM_KEPT)
    assert machine.search.state is State.SETTLED
    assert machine.moved.count(0.0) == 2 * NUM_KEPT, "keeping is measured again before that"
    almost = Machine(lambda share: -0.005 * share, guess_s=0.0).run(4 * NUM_KEPT)
    assert almost.search.state is not State.SETTLED, "within the scatter of passes"


@pytest.mark.parametrize("guess_s", [0.0, 0.3])
@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
def test_what_is_faster_than_keeping_takes_few_passes_that_keep(guess_s: float, noise: float) -> None:
    """These are the dear ones: three at first, three to compare with. Where the first plan moves less, two to trace if
    none has been traced."""
    for seed, has_trace in product(range(5), (True, False)):
        machine = Machine(lambda share: -0.3 * share, guess_s=guess_s, noise=noise, seed=seed)
        machine.has_trace = has_trace
        machine.run(50)
        most = 2 * NUM_KEPT + (2 if guess_s and not has_trace else 0)
        assert machine.search.state is State.SETTLED
        assert machine.moved[-1] == 1.0
        assert machine.moved.count(0.0) <= most


@pytest.mark.parametrize(("movable", "is_planned"), [(TOTAL, False), (TOTAL * 10 // 9, False), (2 * TOTAL, True)])
def test_what_moves_all_and_keeps_its_promise_is_not_planned_again(movable: int, is_planned: bool) -> None:
    search = MoveSearch(LIMIT)
    feed(search, lambda num: 1.0, 0.9, 30, movable=movable)
    assert search.state is State.SETTLED
    assert search.replan() is is_planned
    assert search.keeps is is_planned


def test_what_moves_all_is_looked_at_where_it_becomes_slow() -> None:
    machine = Machine(lambda share: -0.3 * share, guess_s=0.0).run(20)
    assert machine.search.state is State.SETTLED
    machine.extra_s = lambda share: 0.3 * share
    machine.run(20)
    machine.search.replan()
    assert machine.moved[20:].count(0.0) >= 2, "keeping is measured again"
    machine.run(40)
    assert 0 < machine.moved[-1] < 0.2, "and less is moved"


def test_one_fast_pass_among_slow_ones_does_not_show_that_moving_is_slow() -> None:
    """Times of a run on two cores, in which a plan that was as fast as keeping was given up for a single pass."""
    search = MoveSearch(LIMIT, 0.03 / TOTAL)
    for step_s in (2.43, 1.50, 1.51):
        search.kept(step_s)
    search.submitted()
    search.planned(900, TOTAL)
    plan = object()
    for step_s in (1.55, 1.45, 1.46, 1.38):
        assert search.moved(plan, 900, step_s, 0.0) is None
    for step_s in (1.74, 1.84, 1.22):
        assert search.keeps, "it is compared once more"
        search.kept(step_s)
    for step_s in (1.54, 1.41, 1.39):
        assert search.moved(plan, 900, step_s, 0.0) is None
    for step_s in (1.69, 1.48, 1.52):
        assert search.keeps, "and again, since two passes disagree"
        search.kept(step_s)
    for step_s in (1.54, 1.41, 1.40, 1.42, 1.39):
        assert search.moved(plan, 900, step_s, 0.0) is None
        assert not search.is_at_rest


def test_what_moves_all_is_compared_once_where_it_is_faster() -> None:
    """Times of 48 thin layers on two cores, or nearly: to compare again would cost half a pass, and change nothing."""
    search = MoveSearch(LIMIT, 0.5 / TOTAL)
    for step_s in (14.47, 11.58, 9.12):
        search.kept(step_s)
    search.submitted()
    search.planned(900, 950)
    plan = object()
    for step_s in (9.81, 8.8, 8.76, 9.0, 10.05, 8.8):
        assert search.moved(plan, 900, step_s, 0.0) is None
    for step_s in (13.48, 8.71, 8.87):
        assert search.keeps
        search.kept(step_s)
    for step_s in (9.31, 8.9, 8.6, 8.4):
        assert search.moved(plan, 900, step_s, 0.0) is None
    assert search.state is State.SETTLED


def test_one_slow_pass_among_those_that_keep_excuses_no_plan() -> None:
    """What disturbs a pass makes it longer: the other one tells. It is compared once more, and no more."""
    search = MoveSearch(LIMIT, 0.03 / TOTAL)
    for step_s in (2.0, 1.0, 1.4):
        search.kept(step_s)
    search.submitted()
    search.planned(900, TOTAL)
    plan, told = object(), None
    for _ in range(20):
        if search.keeps:
            for step_s in (1.3, 1.0, 1.4):
                search.kept(step_s)
        told = told or search.moved(plan, 900, 1.1, 0.0)
    assert told is not None
    assert "less is moved" in told


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_where_moving_is_faster_than_keeping_the_second_plan_moves_everything(noise: float) -> None:
    """However little the first one dared: no third of the way at a time."""
    machine = Machine(lambda share: -0.3 * share, guess_s=2.0, noise=noise).run(30)
    plans = list(dict.fromkeys(share for share in machine.moved if share))
    assert plans[0] < 0.3
    assert plans[1:] == [1.0]
    assert machine.moved.index(1.0) <= 16
    assert machine.search.state is State.SETTLED


@pytest.mark.parametrize("noise", [0.0, 0.005, 0.02])
@pytest.mark.parametrize(
    ("extra_s", "best"),
    [
        (lambda share: 0.0, 1.0),
        (lambda share: 0.01 * share, 1.0),
        (lambda share: 0.05 * share, 0.4),
        (lambda share: 0.1 * share, 0.2),
        (lambda share: 0.15 * share**2, 0.37),
        (lambda share: 0.01 + 0.03 * share, 0.33),
    ],
)
def test_about_as_much_is_moved_as_was_asked_for(extra_s: Callable[[float], float], best: float, noise: float) -> None:
    """Where passes scatter by 2 %, two per cent cannot be told from nothing: the typical run of many counts."""
    runs = [Machine(extra_s, noise=noise, seed=seed).run(200) for seed in range(15)]
    moved = [mean(run.moved[150:]) for run in runs]
    slowdowns = [mean(1 + extra_s(share) if share else 1.0 for share in run.moved[150:]) for run in runs]
    assert median(moved) >= 0.3 * best
    assert median(slowdowns) <= LIMIT + 0.005
    assert sorted(slowdowns)[12] <= LIMIT + 0.015


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
@pytest.mark.parametrize("pace", [5, 15, 30])
@pytest.mark.parametrize("cost_s", [0.05, 0.2])
def test_a_machine_that_becomes_faster_all_along_makes_no_plan_look_cheap(
    cost_s: float, pace: int, noise: float
) -> None:
    """As a machine does whose host finds memory for it page by page. Keeping had been measured while it was slow."""
    runs = []
    for seed in range(9):
        runs.append(Machine(lambda share: cost_s * share, noise=noise, seed=seed))
        for number in range(100):
            runs[-1].pace = 1 + 0.6 * math.exp(-number / pace)
            runs[-1].run(1)
    slowdowns = [mean(1 + cost_s * share for share in run.moved[60:]) for run in runs]
    assert median(slowdowns) <= LIMIT + 0.01
    assert mean(mean(run.moved[60:]) for run in runs) > 0


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.02])
@pytest.mark.parametrize(("cost_s", "guess_s"), [(0.05, 0.1), (0.2, 0.1), (0.5, 0.1), (1.0, 0.1), (4.0, 0.8)])
def test_trying_costs_two_passes_in_a_hundred(cost_s: float, guess_s: float, noise: float) -> None:
    runs = [
        Machine(lambda share: cost_s * share, guess_s=guess_s, noise=noise, seed=seed).run(100) for seed in range(15)
    ]
    assert median(run.excess for run in runs) <= 1.2
    assert max(run.excess for run in runs) <= 2.5, "the last plan may still be on trial"


def test_a_guess_that_was_far_too_low_costs_one_pass_for_long() -> None:
    machine = Machine(lambda share: 4.0 * share, guess_s=0.1).run(200)
    assert sum(share > 0 for share in machine.moved) == 1
    assert machine.run(1800).excess <= 4 + 0.02 * 2000


@pytest.mark.parametrize("guess_s", [0.0, 0.05, 0.5, 2.0])
def test_the_first_plan_moves_enough_to_learn_from_and_no_more(guess_s: float) -> None:
    machine = Machine(lambda share: guess_s * share, guess_s=guess_s).run(NUM_KEPT + 1)
    assert machine.moved[-1] == pytest.approx(min(1.0, 0.2 / guess_s if guess_s else 1.0), abs=0.01)


@pytest.mark.parametrize("cost_s", [0.2, 0.6, 3.0])
def test_moving_that_never_pays_is_tried_rarer_and_rarer(cost_s: float) -> None:
    machine = Machine(lambda share: cost_s * (share > 0)).run(1000)
    tried = [number for number, share in enumerate(machine.moved) if share]
    assert 1 <= len(tried) <= 60
    assert machine.excess <= 2 + 0.02 * 1000
    assert machine.moved[-1] == 0.0


def followed(search: MoveSearch, plan: object, nbytes: int, step_s: float) -> int:
    """Passes that follow a plan, until it is settled or another one is wanted; in between some keep everything."""
    for number in range(40):
        if search.wants_trace or search.state is State.SETTLED:
            return number
        if search.keeps:
            search.kept(1.0)
        else:
            search.moved(plan, nbytes, step_s, 0.0)
    raise AssertionError("no end")


def replanned(search: MoveSearch, nbytes: int) -> None:
    while not search.wants_trace:
        search.kept(1.0)
    search.kept(1.0)
    search.submitted()
    search.planned(nbytes)


def test_the_trial_of_a_plan_that_moves_no_more_goes_on() -> None:
    """Something else than its cost limits what can be moved."""
    search = MoveSearch(LIMIT, 0.01 / TOTAL)
    replanned(search, TOTAL)
    before = followed(search, "first", TOTAL, 0.95)
    assert search.wants_trace or search.keeps, "there is room for moving more"
    replanned(search, TOTAL)
    assert before + followed(search, "second", TOTAL, 0.95) <= 12 + 4 * NUM_KEPT
    assert search.state is State.SETTLED


@pytest.mark.parametrize("by_itself", [True, False])
def test_what_was_good_is_tried_again_when_something_has_changed(by_itself: bool) -> None:
    search = MoveSearch(LIMIT, 0.01 / TOTAL)
    replanned(search, TOTAL)
    followed(search, "first", TOTAL, 0.95)
    replanned(search, TOTAL)
    followed(search, "second", TOTAL, 0.95)
    if not by_itself:
        search.replan()
        replanned(search, TOTAL)
    for number in range(20):
        if search.keeps and number < 4:
            break
        search.moved("third", TOTAL, 1.5, 0.0)
    while search.keeps and not search.wants_trace:
        search.kept(1.0)
    if not search.wants_trace:  # it had been settled: the same is tried again
        assert followed(search, "fourth", TOTAL, 1.5) <= 3
    assert search.keeps, "less is moved"


def test_what_disturbs_a_few_passes_is_not_what_trying_costs() -> None:
    search = MoveSearch(LIMIT)
    replanned(search, TOTAL)
    disturbed = (1.0, 1.0, 3.0, 1.0, 3.0, 1.0, 1.0, 1.0, 3.0, 1.0, 1.0)
    for step_s in disturbed:
        search.moved("first", TOTAL, step_s, 0.0)
    for _ in range(2):
        while search.keeps:
            search.kept(1.0)
        for step_s in disturbed:
            search.moved("first", TOTAL, step_s, 0.0)
    assert search.state is State.SETTLED


def test_keeping_that_was_measured_while_the_machine_was_slow_settles_nothing() -> None:
    """Beside it, a plan that costs a third looked fast."""
    search = MoveSearch(LIMIT)
    while not search.wants_trace:
        search.kept(1.6)
    search.kept(1.6)
    search.submitted()
    search.planned(TOTAL)
    for _ in range(20):
        if search.keeps:
            break
        search.moved("first", TOTAL, 1.33, 0.0)
    while search.keeps and not search.wants_trace:
        search.kept(1.0)
    for _ in range(5):
        if not search.keeps:
            search.moved("first", TOTAL, 1.33, 0.0)
    assert search.keeps, "less is moved"
    assert search.cost_s_per_byte * TOTAL == pytest.approx(0.33, rel=0.05)


def test_a_guess_that_was_too_high_is_corrected() -> None:
    machine = Machine(lambda share: 0.06 * share, guess_s=0.9).run(200)
    assert mean(machine.moved[150:]) > 0.15


def test_a_machine_that_becomes_slower_as_a_whole_moves_as_before() -> None:
    machine = Machine(lambda share: 0.01 * share).run(60)
    machine.pace = 2.0
    machine.run(60)
    assert machine.moved[-1] == 1.0
    assert machine.moved[60:].count(0.0) <= 2 + 2 * NUM_KEPT + 1, "keeping is measured anew"
    assert machine.search.keep_s == pytest.approx(2.0)


def test_where_moving_becomes_dear_less_is_moved_and_more_again_later() -> None:
    cost = [0.01]
    machine = Machine(lambda share: cost[0] * share).run(60)
    assert machine.moved[-1] == 1.0
    cost[0] = 0.3
    machine.run(60)
    assert 0 <= machine.moved[-1] < 0.2
    assert machine.excess < 3
    cost[0] = 0.01
    machine.run(600)
    assert machine.moved[-1] > 0.6


def test_keeping_is_measured_again_rarer_and_rarer() -> None:
    machine = Machine(lambda share: 0.0, guess_s=0.0).run(1500)
    kept = [number for number, share in enumerate(machine.moved) if not share][NUM_KEPT:]
    assert len(kept) == 2 * NUM_KEPT + 2 * 4, "twice before it settles, and after 64, 128, 256 and 512 passes"


def test_waiting_that_was_planned_is_not_a_cost_of_moving() -> None:
    """It is known otherwise, and would be counted twice."""
    search = MoveSearch(1.02, 0.01 / TOTAL)
    for step_s in (9.0, 1.0, 1.0):
        search.kept(step_s)
    search.submitted()
    search.planned(TOTAL)
    plan = object()
    while search.moved(plan, TOTAL, 1.2, 0.19) is None:
        pass
    assert search.cost_s_per_byte * TOTAL == pytest.approx(0.012, rel=0.1)


def test_where_no_plan_moves_anything_the_search_has_ended() -> None:
    search = MoveSearch(1.02)
    for step_s in (9.0, 1.0, 1.0):
        search.kept(step_s)
    search.submitted()
    search.planned(0)
    assert search.state is State.SETTLED
    assert not search.keeps
    assert not search.wants_trace


def test_passes_that_keep_for_another_reason_hide_none_that_follow_the_plan() -> None:
    """Another search of the same passes keeps, say."""
    search = MoveSearch(LIMIT, 0.01 / TOTAL)
    replanned(search, TOTAL)
    for _ in range(20):
        search.kept(1.0)
        search.moved("first", TOTAL, 1.4, 0.0)
    assert search.cost_s_per_byte * TOTAL == pytest.approx(0.4, rel=0.05)


def test_a_plan_that_is_tried_again_is_compared_again_where_the_machine_has_changed() -> None:
    search = MoveSearch(LIMIT)
    replanned(search, TOTAL)
    followed(search, "first", TOTAL, 1.0)
    while not search.keeps:
        search.moved("first", TOTAL, 1.0, 0.0)
    while search.keeps:
        search.kept(1.6)  # a slow minute
    num_slow = 0
    for _ in range(40):
        if search.wants_trace or search.state is State.RESTING:
            break
        if search.keeps:
            search.kept(1.0)
        else:
            search.moved("first", TOTAL, 1.33, 0.0)
            num_slow += 1
    assert search.keeps, "it is given up"
    assert num_slow <= 10


def test_a_plan_that_moves_nothing_is_no_end_wherever_it_comes() -> None:
    search = MoveSearch(LIMIT, 0.01 / TOTAL)
    replanned(search, TOTAL)
    while not search.keeps:
        search.moved("first", TOTAL, 1.011, 0.0)
    search.planned(0)  # in the middle of a comparison
    for _ in range(200):
        if search.wants_trace:
            return
        search.kept(1.0)
    pytest.fail("keeps for ever")


def test_a_plan_that_only_recomputes_tells_no_cost_of_moving() -> None:
    search = MoveSearch(LIMIT, 0.01 / TOTAL)
    replanned(search, TOTAL)
    for _ in range(20):
        assert search.moved("recomputes", 0, 1.5, 0.0) is None
    assert search.state is State.SETTLED


def test_comparisons_without_a_clock_settle_nothing() -> None:
    search = MoveSearch(LIMIT)
    replanned(search, TOTAL)
    for _ in range(60):
        if search.keeps:
            search.kept(None)
        else:
            search.moved("first", TOTAL, 1.0, 0.0)
    assert search.state is not State.SETTLED


def settled(guess_s: float = 0.0) -> Machine:
    machine = Machine(lambda share: -0.2 * share, guess_s=guess_s).run(4 * NUM_KEPT)
    assert machine.search.state is State.SETTLED
    return machine


@pytest.mark.parametrize("planning_takes", [1, 4])
def test_passes_follow_the_present_plan_while_the_next_one_is_made(planning_takes: int) -> None:
    machine = Machine(lambda share: -0.3 * share, guess_s=0.3)
    machine.planning_takes = planning_takes
    machine.run(40)
    last_kept = max(number for number, share in enumerate(machine.moved) if not share)
    follows = machine.moved[last_kept + 1 :]
    assert machine.moved[-1] == 1.0
    assert 0 < follows[0] < 1, "the second plan moves more"
    assert follows.count(follows[0]) >= planning_takes


def test_a_change_of_the_drives_needs_no_pass_that_keeps() -> None:
    machine = settled()
    plan = machine._plan
    assert machine.search.replan(has_trace=True) is False, "it moves all there is"
    machine.search._moves_all = False
    assert machine.search.replan(has_trace=True)
    assert machine.search.wants_plan
    assert not machine.search.keeps
    assert not machine.search.replan(has_trace=True), "it is being made"
    machine.search.submitted()
    machine._planned_in = 1
    machine.run(6)
    assert machine._plan is not plan
    assert machine.moved[-6:] == [1.0] * 6
    assert machine.search.state is State.SETTLED


def test_a_plan_that_never_comes_is_asked_for_again() -> None:
    machine = settled()
    machine.search._moves_all = False
    assert machine.search.replan(has_trace=True)
    machine.search.submitted()
    machine.run(20)  # nobody makes it
    assert machine.search.replan(has_trace=True)


@pytest.mark.parametrize("is_slow", [True, False])
def test_passes_keep_for_the_next_plan_without_a_trace_or_where_this_one_is_too_slow(is_slow: bool) -> None:
    machine = settled()
    machine.search._moves_all = False
    if is_slow:
        machine.search.slowdown = LIMIT + 0.01
    assert machine.search.replan(has_trace=is_slow)
    assert machine.search.keeps
    assert not machine.search.wants_plan


def test_passes_at_rest_are_not_compared_with() -> None:
    """They may be faster than plain PyTorch, where they reuse memory."""
    machine = Machine(lambda share: 0.6 * (share > 0), guess_s=0.0)
    while not machine.search.is_at_rest:
        machine.run(1)
    before = machine.search.keep_s
    assert before is not None
    machine.pace = 0.8
    while machine.search.is_at_rest:
        machine.run(1)
    assert machine.search.keep_s == before
    assert machine.search.state is State.RESTING
    machine.pace = 1.0
    for _ in range(NUM_KEPT):
        assert machine.search.keeps
        machine.run(1)
    assert machine.search.keep_s == pytest.approx(1.0)
