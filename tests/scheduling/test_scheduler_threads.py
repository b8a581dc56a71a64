"""Threads that train side by side begin passes while one of them learns."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

import pytest

from lightning_ssd.planning.planner import BudgetTooSmall
from lightning_ssd.scheduling import plan_maker
from lightning_ssd.scheduling.pass_kind import PassKind
from lightning_ssd.scheduling.scheduler import Scheduler
from tests.support.fake_passes import make_trace, opened, run_pass
from tests.support.interrupted_points import PointsIn
from tests.support.patience import PATIENCE_S
from tests.support.threads import at_once


@pytest.mark.parametrize("asked", ["rests", "cursor"])
def test_a_plan_is_put_in_force_while_another_thread_goes_through_them(asked: str) -> None:
    """As from one line to the next: whenever a plan is looked at, more are put in force than are remembered."""
    num_asked = 0

    class Looked:
        """A plan that moves nothing and has no peak."""

        sizes, moves, peak_bytes = (1,), False, 0

        @property
        def plan(self) -> Looked:
            nonlocal num_asked
            num_asked += 1
            for number in range(20):
                kind.plans[num_asked, number] = Looked()  # type: ignore[assignment]
            return self

        @property
        def prediction(self) -> Looked:
            return self

    with opened() as made:
        made.cursor("a", level_bytes=0, available_bytes=None)
        kind = made._kinds["a"]
        kind.plans.update({(1, number): Looked() for number in range(3)})  # type: ignore[misc]
        if asked == "rests":
            assert kind.rests
        else:
            made.cursor("a", level_bytes=0, available_bytes=1 << 40)
    assert num_asked >= 3


def test_one_thread_at_a_time_puts_plans_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    num_inside, met, install = 0, [], Scheduler._install

    def slow_install(scheduler: Scheduler, kind: PassKind) -> None:
        nonlocal num_inside
        num_inside += 1
        met.append(num_inside)
        time.sleep(0.02)  # lets the other threads come this far
        install(scheduler, kind)
        num_inside -= 1

    monkeypatch.setattr(Scheduler, "_install", slow_install)
    with opened() as made:
        run_pass(made, make_trace())
        at_once(
            made.wait,
            made.wait,
            lambda: made.learn(deque()),
            lambda: made.cursor("a", level_bytes=0, available_bytes=None),
        )
    assert met
    assert set(met) == {1}


def test_a_pass_begins_while_other_processes_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins under the accounting lock: what it waited for would hold up every thread."""
    is_learning, may_go_on = threading.Event(), threading.Event()

    def long_border(scheduler: Scheduler) -> None:
        is_learning.set()
        assert may_go_on.wait(PATIENCE_S)

    monkeypatch.setattr(Scheduler, "border", long_border)
    with opened() as made:
        learner = threading.Thread(target=lambda: made.learn(deque()))
        learner.start()
        assert is_learning.wait(PATIENCE_S)
        _, wants_trace = made.cursor("a", level_bytes=0, available_bytes=None)
        assert wants_trace
        assert learner.is_alive()
        may_go_on.set()
        learner.join()


def test_an_interrupt_where_a_pass_begins_leaves_nobody_waiting() -> None:
    points, met = PointsIn("scheduling/scheduler.py"), []
    with opened() as made:
        while (where := points.interrupt(lambda: made.cursor("a", level_bytes=0, available_bytes=None))) is not None:
            met.append(where)
            learner = threading.Thread(target=lambda: made.learn(deque()), daemon=True)
            learner.start()
            learner.join(PATIENCE_S)
            assert not learner.is_alive(), where
    assert len(met) > 5


def test_a_pass_that_a_signal_handler_begins_in_the_midst_of_learning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is put in force there: what is learnt from is half-done."""
    polls, poll = [], Scheduler._poll

    def count(scheduler: Scheduler) -> None:
        polls.append(1)
        poll(scheduler)

    def interrupted_border(scheduler: Scheduler) -> None:
        scheduler.cursor("a", level_bytes=0, available_bytes=None)

    monkeypatch.setattr(Scheduler, "border", interrupted_border)
    monkeypatch.setattr(Scheduler, "_poll", count)
    with opened() as made:
        made.learn(deque())
        assert not polls
        made.cursor("a", level_bytes=0, available_bytes=None)
        assert polls


def test_nothing_is_logged_where_a_pass_begins(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It begins under the accounting lock, and a handler may wait for a thread that asks for numbers."""

    def refuse(*args: object) -> None:
        raise BudgetTooSmall(1, 2)

    monkeypatch.setattr(plan_maker, "make_plan", refuse)

    monkeypatch.setattr(plan_maker, "make_plan_apart", refuse)
    caplog.set_level(logging.INFO, "lightning_ssd")
    with opened() as made:
        run_pass(made, make_trace())
        (kind,) = made._planned
        assert kind.planning is not None
        kind.planning.task.wait()
        made.cursor("a", level_bytes=0, available_bytes=None)
        assert kind.planning is None
        assert "no plan is known" not in caplog.text
        made.learn(deque())
        assert "no plan is known for a pass that was possible" in caplog.text
