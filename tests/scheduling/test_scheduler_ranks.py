"""What the schedulers of several processes agree on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from lightning_ssd.common.collectives import AllReduceMin
from lightning_ssd.errors import BudgetError
from lightning_ssd.planning.plan import Machine, TierRates
from lightning_ssd.planning.trace import Trace, TracedStorage
from tests.support.fake_passes import (
    FAST,
    NBYTES,
    machine_of,
    make_trace,
    opened,
    planned,
    run_pass,
)
from tests.support.patience import PATIENCE_S

# -- several processes ------------------------------------------------------------------------------------------------


class Group:
    """Processes as threads: each number is the smallest that any of them has."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=PATIENCE_S)
        self._given: list[list[float]] = []
        self.num_calls = 0

    def agree(self, values: Sequence[float]) -> list[float]:
        self._given.append(list(values))
        if self._barrier.wait() == 0:
            self.num_calls += 1
        result = [min(column) for column in zip(*self._given, strict=True)]
        if self._barrier.wait() == 0:
            self._given.clear()
        self._barrier.wait()
        return result


def on_ranks(works: Sequence[Callable[[AllReduceMin], Any]]) -> tuple[list[Any], Group]:
    """Run each in a thread; returns what they returned or raised. A rank that waits for ever fails the test."""
    group, results = Group(len(works)), [None] * len(works)

    def run(rank: int) -> None:
        try:
            results[rank] = works[rank](group.agree)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a rank waits for the other one"
    return results, group


def rank(machine: Machine, trace: Trace, budget: int | None, passes: int = 9) -> Callable[[AllReduceMin], Any]:
    def work(agree: AllReduceMin) -> Any:
        with opened(machine=machine_of(machine), agree=agree, activation_budget=budget) as made:
            for _ in range(passes):
                cursor, _ = planned(made, trace)
            return made.machine, cursor.limit_bytes

    return work


def test_ranks_agree_on_rates_and_limit() -> None:
    one = Machine(ssd=TierRates(write_bytes_per_s=3e9, read_bytes_per_s=1e9))
    two = Machine(ssd=TierRates(write_bytes_per_s=2e9, read_bytes_per_s=4e9))
    results, group = on_ranks([rank(one, make_trace(), 8 * NBYTES), rank(two, make_trace(10), 9 * NBYTES)])
    expected = Machine(ssd=TierRates(write_bytes_per_s=2e9, read_bytes_per_s=1e9))
    assert results == [(expected, 8 * NBYTES)] * 2
    assert group.num_calls == 4, "with the 1st, 2nd, 4th and 8th backward"


def test_ranks_say_whose_drive_cannot_be_used() -> None:
    nothing = Machine(ssd=TierRates(write_bytes_per_s=0.0, read_bytes_per_s=0.0, unusable="the directory /x is full"))
    traces = make_trace(), make_trace()
    mine, others = on_ranks([rank(nothing, traces[0], NBYTES // 2), rank(FAST, traces[1], NBYTES // 2)])[0]
    assert isinstance(mine, BudgetError)
    assert "because no drive can be used: the directory /x is full. Without one the smallest that works" in str(mine)
    assert isinstance(others, BudgetError)
    assert "no drive can be used: another process of this run has none that could be measured" in str(others)


def test_ranks_agree_on_a_host_tier_that_all_have() -> None:
    def host(capacity: int) -> Machine:
        rates = TierRates(write_bytes_per_s=9e9, read_bytes_per_s=9e9, capacity_bytes=capacity)
        return Machine(ssd=FAST.ssd, host=rates)

    results, _ = on_ranks([rank(host(5), make_trace(), None), rank(host(3), make_trace(), None)])
    assert [machine.host.capacity_bytes for machine, _ in results] == [3, 3]
    results, _ = on_ranks([rank(host(5), make_trace(), None), rank(FAST, make_trace(), None)])
    assert [machine.host for machine, _ in results] == [None, None]
    assert [limit for _, limit in results] == [None, None]


def test_a_budget_that_one_rank_cannot_keep_raises_on_all() -> None:
    """The second one saves storages so large that the budget of the first one is too small for it."""
    large = make_trace()
    storages = tuple(
        TracedStorage(
            nbytes=8 * s.nbytes,
            packed_s=s.packed_s,
            last_used_s=s.last_used_s,
            wanted_s=s.wanted_s,
            freed_s=s.freed_s,
        )
        for s in large.storages
    )
    large = Trace(storages=storages, order=large.order, forward_end_s=0.5, end_s=1.0)
    results, _ = on_ranks([rank(FAST, make_trace(), 6 * NBYTES), rank(FAST, large, 6 * NBYTES)])
    assert [type(result) for result in results] == [BudgetError] * 2
    assert str(results[0]) == str(results[1])


def test_a_limit_that_was_low_for_a_while_recovers() -> None:
    """Also where processes agree: what was agreed earlier is not part of what is agreed now."""
    mib = 64 * NBYTES
    with opened(memory_budget=20 * mib, agree=lambda values: list(values)) as made:
        for level, other in ((4, 6), (4, 6), (14, 16), (14, 16), (4, 6), (4, 6), (4, 6), (4, 6), (4, 6)):
            made._kinds.clear()  # each is traced
            cursor, _ = planned(made, make_trace(other=other * mib), level_bytes=level * mib)
        cursor, _ = run_pass(made, make_trace(other=6 * mib), level_bytes=4 * mib)
        assert cursor.limit_bytes == 14 * mib
