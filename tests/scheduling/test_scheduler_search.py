"""The scheduler finds by measuring how much may be moved, on machines on which moving costs more than transfers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from lightning_ssd.planning.plan import Machine
from lightning_ssd.scheduling.clock import Clock, HostClock
from lightning_ssd.scheduling.move_search import NUM_KEPT
from lightning_ssd.scheduling.plan_cursor import StoredPlan
from lightning_ssd.scheduling.scheduler import Scheduler
from tests.support.fake_passes import FAST, NBYTES, LateClock, make_trace, opened, run_pass

COUNT = 24
LIMIT = 1.02


@pytest.fixture(autouse=True)
def plans_are_followed() -> None:
    """Here they are measured."""


@dataclass
class Run:
    """Passes on a machine on which moving these bytes takes so many seconds more.

    Args:
        extra_s: of a pass of one second that moves so large a share of what it saves.
        noise: that makes a pass longer, relative to it.
    """

    extra_s: Callable[[float], float]
    noise: float = 0.0
    guess_s: float = 0.0
    """Of moving everything, for the first plan."""
    seed: int = 1
    between: Callable[[Run, Scheduler, int], None] = lambda run, made, number: None
    """Called after the pass of this number."""
    machine: Machine = FAST
    """As the scheduler finds it."""
    shares: list[float] = field(default_factory=list)
    """That each pass moved."""
    traced: list[int] = field(default_factory=list)
    told: str = ""

    def __call__(self, passes: int, *, clock: type[Clock] = HostClock, count: int = COUNT) -> Run:
        dice, total = random.Random(self.seed), count * NBYTES
        self.machine = Machine(ssd=FAST.ssd, cost_s_per_byte=self.guess_s / total)
        with opened(machine=lambda: self.machine) as made:
            for number in range(passes):
                trace = make_trace(count)
                cursor, wants_trace = made.cursor("a", level_bytes=0, available_bytes=1 << 40)
                known = next((k for k in cursor._candidates), None)
                share = 0.0 if known is None else known.moved_bytes / total
                step_s = (1 + self.extra_s(share)) * (1 + abs(dice.gauss(0, self.noise))) + 5 * (number == 0)
                run_pass(made, trace, step_s=step_s, clock=clock, available_bytes=1 << 40)
                made.wait()
                self.shares.append(share)
                self.traced += [number] * wants_trace
                self.between(self, made, number)
            report = made.report()
            self.told = "" if report is None else report.text()
        return self

    @property
    def excess(self) -> float:
        """Passes lost beyond what was asked for."""
        return sum(max(1 + self.extra_s(share) - LIMIT, 0) for share in self.shares)


@pytest.mark.parametrize("clock", [HostClock, LateClock])
def test_where_moving_is_free_all_that_helps_is_moved(clock: type[Clock]) -> None:
    run = Run(lambda share: 0.0)(40, clock=clock)
    assert run.shares[0] == 0
    assert run.shares[8] > 0.7
    assert set(run.shares[8:]) == {0.0, run.shares[8]}
    assert run.shares[8:].count(0.0) <= 2 * (NUM_KEPT + clock.lag), (
        "keeping is measured twice more, before it is settled"
    )
    assert set(run.shares[-10:]) == {run.shares[8]}


@pytest.mark.parametrize("clock", [HostClock, LateClock])
@pytest.mark.parametrize("noise", [0.0, 0.01])
@pytest.mark.parametrize("cost_s", [0.03, 0.05, 0.1])
def test_a_part_is_moved_where_all_would_take_too_long(cost_s: float, noise: float, clock: type[Clock]) -> None:
    """Two per cent were asked for. Noise may mislead a search for a while, but rarely."""
    num_sought = 0
    for seed in range(10 if noise else 1):
        run = Run(lambda share: cost_s * share, noise, seed=seed)(100, clock=clock)
        moving = [share for share in run.shares[-40:] if share]
        num_sought += len(moving) < 30
        assert len(moving) >= 24, "most passes move something"
        assert max(cost_s * share for share in moving) <= LIMIT - 1 + 0.012
        assert min(cost_s * share for share in moving) >= 0.2 * (LIMIT - 1), "and not next to nothing"
        assert run.excess <= 2, "trying costs at most two passes in a hundred"
    assert num_sought <= 1, "one in ten may still be searching after a hundred passes"


@pytest.mark.parametrize("guess_s", [0.0, 0.5])
def test_a_wrong_guess_is_corrected(guess_s: float) -> None:
    run = Run(lambda share: 0.06 * share, guess_s=guess_s)(150)
    assert 0.15 < max(run.shares[-10:]) < 0.5


@pytest.mark.parametrize("cost_s", [0.6, 3.0])
def test_moving_that_does_not_pay_is_given_up(cost_s: float) -> None:
    """And tried again now and then, for less and less of the time."""
    run = Run(lambda share: cost_s * (share > 0))(400)
    assert run.shares.count(0) > 360
    assert run.excess < 2 + 0.02 * 400
    assert f"asses that moved took {1 + cost_s:.2f} times as long" in run.told


def test_passes_know_that_moving_was_given_up() -> None:
    """Not those that others are compared with: these have memory as plain PyTorch has it."""
    with opened(machine=lambda: FAST) as made:
        resting, goes_on = [], []
        for _ in range(140):
            goes_on.append(made.goes_on_keeping("a"))
            cursor, _ = made.cursor("a", level_bytes=0, available_bytes=1 << 40)
            share = 0.6 * bool(cursor._candidates)
            run_pass(made, make_trace(COUNT), step_s=1 + share, available_bytes=1 << 40)
            made.wait()
            resting.append(cursor.is_resting)
            report = made.report()
            assert cursor.is_resting <= (report is not None), "before anything was tried"
    first = resting.index(True)
    assert NUM_KEPT < first < 30
    rest = resting[first:].index(False)
    assert rest >= 8 - NUM_KEPT
    assert not any(resting[first + rest :][:NUM_KEPT]), "the last ones are compared with the next plan"
    assert all(goes_on[first + 1 : first + rest])
    assert not any(goes_on[first + rest :][:NUM_KEPT]), "and know it, as only passes with hooks do"


def test_where_moving_becomes_dear_less_is_moved() -> None:
    run = Run(lambda share: (0.01 if len(run.shares) < 30 else 0.3) * share)
    run(110)
    before = run.shares[29]
    assert before > 0.7
    assert max(run.shares[-10:]) < 0.2


def test_keeping_is_measured_again_in_few_passes() -> None:
    run = Run(lambda share: 0.0)(600)
    assert 3 < run.shares.count(0) <= 3 * NUM_KEPT + 2 * 4


def slow_drives(run: Run, made: Scheduler, number: int) -> None:
    ssd = run.machine.ssd
    if number == 59 and ssd is not None:
        run.machine = replace(run.machine, ssd=replace(ssd, write_bytes_per_s=ssd.write_bytes_per_s / 2))


def plans_of(made: Scheduler) -> dict[tuple[int, ...], StoredPlan]:
    (kind,) = made._kinds.values()
    return kind.plans


def test_drives_of_another_speed_need_no_pass_that_keeps() -> None:
    """The next plan is made from the trace that there is."""
    rates = []

    def between(run: Run, made: Scheduler, number: int) -> None:
        slow_drives(run, made, number)
        rates.append([plan.rates for plan in plans_of(made).values()])

    run = Run(lambda share: 0.05 * share, between=between)(90)
    assert rates[-1] == [run.machine.ssd], "it has been planned again"
    assert rates[59] == [FAST.ssd]
    assert 0 < run.shares[59] < 0.7
    assert max(run.traced) < 60
    assert all(run.shares[60:66])
    assert run.shares[60:].count(0.0) <= 2 * NUM_KEPT, "the plan is compared with keeping, as any"


@pytest.mark.parametrize(("trace_s", "is_traced"), [(1.0, False), (1.2, False), (1.4, True), (0.7, True)])
def test_a_disturbed_pass_is_not_planned_from_for_ever(trace_s: float, is_traced: bool) -> None:
    """Where it took another time than passes that keep everything do, the next plan needs another trace."""

    def between(run: Run, made: Scheduler, number: int) -> None:
        slow_drives(run, made, number)
        if number == 39:
            for sizes, plan in plans_of(made).items():
                plans_of(made)[sizes] = replace(plan, plan=replace(plan.plan, keep_step_s=trace_s))

    run = Run(lambda share: 0.05 * share, between=between)(90)
    assert any(60 <= number < 70 for number in run.traced) is is_traced
