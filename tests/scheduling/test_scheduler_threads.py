"""Threads that train side by side begin passes while one of them learns."""

import logging
import threading
import time
from collections import deque
from dataclasses import replace
from functools import partial

import pytest

from lightning_ssd.errors import BudgetError
from lightning_ssd.planning.plan import Machine, TierRates
from lightning_ssd.planning.planner import BudgetTooSmall
from lightning_ssd.scheduling.pass_kind import PassKind
from lightning_ssd.scheduling.scheduler import Scheduler
from tests.support.fake_passes import FAST, NBYTES, machine_of, make_trace, opened, planned, run_pass
from tests.support.helpers import within
from tests.support.interrupted_points import PointsIn
from tests.support.patience import PATIENCE_S
from tests.support.stored_plans import plan_by
from tests.support.threads import at_once


@pytest.mark.parametrize("asked", ["rests", "cursor"])
def test_a_plan_is_put_in_force_while_another_thread_goes_through_them(asked):
    """As from one line to the next: whenever a plan is looked at, more are put in force than are remembered."""
    num_asked = 0

    class Looked:
        sizes, peak_bytes = (1,), 0

        @property
        def plan(self):
            nonlocal num_asked
            num_asked += 1
            for number in range(20):
                kind.plans[num_asked, number] = Looked()
            return self

        @property
        def moves(self):
            return self.plan is None

        @property
        def prediction(self):
            return self

    with opened() as made:
        made.cursor("a", level_bytes=0, available_bytes=None)
        kind = made._kinds["a"]
        kind.plans.update({(1, number): Looked() for number in range(3)})
        if asked == "rests":
            assert kind.rests
        else:
            made.cursor("a", level_bytes=0, available_bytes=1 << 40)
    assert num_asked >= 3


def test_one_thread_at_a_time_puts_plans_in_force(monkeypatch):
    num_inside, met, install = 0, [], Scheduler._install

    def slow_install(scheduler, kind):
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


def test_a_pass_begins_while_other_processes_are_waited_for(monkeypatch):
    """It begins under the accounting lock: what it waited for would hold up every thread."""
    is_learning, may_go_on = threading.Event(), threading.Event()

    def long_border(scheduler):
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


def test_an_interrupt_where_a_pass_begins_leaves_nobody_waiting():
    points, met = PointsIn("scheduling/scheduler.py"), []
    with opened() as made:
        while (where := points.interrupt(lambda: made.cursor("a", level_bytes=0, available_bytes=None))) is not None:
            met.append(where)
            learner = threading.Thread(target=lambda: made.learn(deque()), daemon=True)
            learner.start()
            learner.join(PATIENCE_S)
            assert not learner.is_alive(), where
    assert len(met) > 5


def test_a_pass_that_a_signal_handler_begins_in_the_midst_of_learning(monkeypatch):
    """Nothing is put in force there: what is learnt from is half-done."""
    polls, poll = [], Scheduler._poll

    def count(scheduler):
        polls.append(1)
        poll(scheduler)

    def interrupted_border(scheduler):
        scheduler.cursor("a", level_bytes=0, available_bytes=None)

    monkeypatch.setattr(Scheduler, "border", interrupted_border)
    monkeypatch.setattr(Scheduler, "_poll", count)
    with opened() as made:
        made._planned.append(PassKind())  # else there is nothing to put in force
        made.learn(deque())
        assert not polls
        made.cursor("a", level_bytes=0, available_bytes=None)
        assert polls


def test_nothing_is_logged_where_a_pass_begins(monkeypatch, caplog):
    """It begins under the accounting lock, and a handler may wait for a thread that asks for numbers."""

    def refuse(*args):
        raise BudgetTooSmall(1, 2)

    plan_by(monkeypatch, refuse)
    caplog.set_level(logging.INFO, "lightning_ssd")
    with opened() as made:
        run_pass(made, make_trace())
        (kind,) = made._planned
        kind.planning.task.wait()
        made.cursor("a", level_bytes=0, available_bytes=None)
        assert kind.planning is None
        assert "no plan is known" not in caplog.text
        made.learn(deque())
        assert "no plan is known for a pass that was possible" in caplog.text


# -- several processes ------------------------------------------------------------------------------------------------


class Group:
    def __init__(self, size):
        self._barrier = threading.Barrier(size, timeout=PATIENCE_S)
        self._given = []
        self.num_calls = 0

    def agree(self, values):
        self._given.append(list(values))
        if self._barrier.wait() == 0:
            self.num_calls += 1
        result = [min(column) for column in zip(*self._given, strict=True)]
        if self._barrier.wait() == 0:
            self._given.clear()
        self._barrier.wait()
        return result


def on_ranks(works):
    """Run each in a thread; returns what they returned or raised. A rank that waits for ever fails the test."""
    group, results = Group(len(works)), [None] * len(works)

    def run(rank):
        try:
            results[rank] = works[rank](group.agree)
        except Exception as error:
            results[rank] = error

    within(PATIENCE_S, lambda: at_once(*(partial(run, rank) for rank in range(len(works)))))
    return results, group


def rank(machine, trace, budget, passes=9):
    def work(agree):
        with opened(machine=machine_of(machine), agree=agree, activation_budget=budget) as made:
            for _ in range(passes):
                cursor, _ = planned(made, trace)
            return made.machine, cursor.limit_bytes

    return work


def test_ranks_agree_on_rates_and_limit():
    one = Machine(ssd=TierRates(write_bytes_per_s=3e9, read_bytes_per_s=1e9))
    two = Machine(ssd=TierRates(write_bytes_per_s=2e9, read_bytes_per_s=4e9))
    results, group = on_ranks([rank(one, make_trace(), 8 * NBYTES), rank(two, make_trace(10), 9 * NBYTES)])
    expected = Machine(ssd=TierRates(write_bytes_per_s=2e9, read_bytes_per_s=1e9))
    assert results == [(expected, 8 * NBYTES)] * 2
    assert group.num_calls == 4, "with the 1st, 2nd, 4th and 8th backward"


def test_ranks_say_whose_drive_cannot_be_used():
    nothing = Machine(ssd=TierRates(write_bytes_per_s=0.0, read_bytes_per_s=0.0, unusable="the directory /x is full"))
    traces = make_trace(), make_trace()
    mine, others = on_ranks([rank(nothing, traces[0], NBYTES // 2), rank(FAST, traces[1], NBYTES // 2)])[0]
    assert isinstance(mine, BudgetError)
    assert "because no drive can be used: the directory /x is full. Without one the smallest that works" in str(mine)
    assert isinstance(others, BudgetError)
    assert "no drive can be used: another process of this run has none that could be measured" in str(others)


def test_ranks_agree_on_a_host_tier_that_all_have():
    def host(capacity):
        rates = TierRates(write_bytes_per_s=9e9, read_bytes_per_s=9e9, capacity_bytes=capacity)
        return Machine(ssd=FAST.ssd, host=rates)

    results, _ = on_ranks([rank(host(5), make_trace(), None), rank(host(3), make_trace(), None)])
    assert [machine.host.capacity_bytes for machine, _ in results] == [3, 3]
    results, _ = on_ranks([rank(host(5), make_trace(), None), rank(FAST, make_trace(), None)])
    assert [machine.host for machine, _ in results] == [None, None]
    assert [limit for _, limit in results] == [None, None]


def test_a_budget_that_one_rank_cannot_keep_raises_on_all():
    """The second one saves storages so large that the budget of the first one is too small for it."""
    large = make_trace()
    large = replace(large, storages=tuple(replace(one, nbytes=8 * one.nbytes) for one in large.storages))
    results, _ = on_ranks([rank(FAST, make_trace(), 6 * NBYTES), rank(FAST, large, 6 * NBYTES)])
    assert [type(result) for result in results] == [BudgetError] * 2
    assert str(results[0]) == str(results[1])


def test_a_limit_that_was_low_for_a_while_recovers():
    """Also where processes agree: what was agreed earlier is not part of what is agreed now."""
    mib = 64 * NBYTES
    with opened(memory_budget=20 * mib, agree=lambda values: list(values)) as made:
        for level, other in ((4, 6), (4, 6), (14, 16), (14, 16), (4, 6), (4, 6), (4, 6), (4, 6), (4, 6)):
            made._kinds.clear()  # each is traced
            cursor, _ = planned(made, make_trace(other=other * mib), level_bytes=level * mib)
        cursor, _ = run_pass(made, make_trace(other=6 * mib), level_bytes=4 * mib)
        assert cursor.limit_bytes == 14 * mib
