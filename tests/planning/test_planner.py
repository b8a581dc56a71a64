"""The planner: by hand, and the promises that every plan keeps."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ssd.planning import planner
from lightning_ssd.planning.bound import Bound
from lightning_ssd.planning.candidates import Units, family, variants
from lightning_ssd.planning.lifetimes import Lifetimes
from lightning_ssd.planning.placement import Placement
from lightning_ssd.planning.plan import Goal, Machine, Plan
from lightning_ssd.planning.planner import TOLERANCE, BudgetTooSmall, judge, make_plan, smallest_budget
from lightning_ssd.planning.recomputation import inner_storages, recomputed
from lightning_ssd.planning.simulator import simulate
from lightning_ssd.planning.trace import Trace
from tests.planning.traces import (
    HOST,
    KEEP,
    SSD,
    machines,
    network,
    passes,
    play,
    rates,
    ssd,
    storage,
    tier_rates,
    trace,
)

laws = settings(derandomize=True, deadline=None, max_examples=60, database=None)
RECOMPUTE = Placement.RECOMPUTE
_SLACK_S = 1e-9

# 100 storages of 100 bytes, 10 s forward (1,000 bytes per second), 20 s backward.
NET = network()


def count(plan: Plan, placement: Placement) -> int:
    return plan.placements.count(placement)


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_a_fast_drive_takes_all_but_the_tail() -> None:
    plan = make_plan(NET, ssd(1e6), Goal())
    assert plan.prediction.stall_s == 0
    assert plan.prediction.step_s == plan.keep_step_s == NET.end_s
    kept = [i for i, p in enumerate(plan.placements) if p is KEEP]
    assert kept == list(range(100 - len(kept), 100))
    assert 1 <= len(kept) <= 3
    # One in use and two on their way.
    assert plan.prediction.peak_bytes == 300
    assert plan.ahead_bytes == 200
    assert plan.limit_bytes == 400


def test_a_slow_drive_takes_what_it_can() -> None:
    plan = make_plan(NET, ssd(50), Goal())
    assert plan.prediction.step_s <= 1.02 * NET.end_s
    # By the end of forward 10 s x 50 bytes/s can have left, of which two storages may have come back at once.
    assert 9500 <= plan.prediction.peak_bytes <= 9700
    assert plan.prediction.written_bytes <= 50 * NET.end_s


@pytest.mark.parametrize(("min_relief", "moves"), [(0.03, True), (0.05, False)])
def test_what_relieves_too_little_is_left_alone(min_relief: float, moves: bool) -> None:
    """The same drive takes 3 to 5 % away."""
    plan = make_plan(NET, ssd(50), Goal(min_relief=min_relief))
    assert plan.moves is moves
    assert (plan.prediction.peak_bytes < NET.saved_peak_bytes) is moves


def test_a_budget_is_kept_however_little_it_relieves() -> None:
    plan = make_plan(NET, ssd(50), Goal(budget_bytes=9_900, min_relief=0.05))
    assert plan.prediction.peak_bytes <= 9_900


def test_a_useless_drive_takes_nothing() -> None:
    plan = make_plan(NET, ssd(0.1), Goal())
    assert set(plan.placements) == {KEEP}
    assert plan.prediction.peak_bytes == NET.saved_peak_bytes


def test_a_budget_costs_nothing_where_the_drive_keeps_up() -> None:
    plan = make_plan(NET, ssd(700), Goal(budget_bytes=4000))
    assert plan.prediction.stall_s == 0
    assert plan.prediction.peak_bytes <= 4000
    assert plan.limit_bytes == 4000


def test_a_budget_costs_what_the_drive_needs() -> None:
    plan = make_plan(NET, Machine(ssd=rates(300, 1e6)), Goal(budget_bytes=4000))
    # The last storage is packed at 9.9 s. By then 6,000 bytes must have left, which takes 20 s.
    assert plan.prediction.stall_s == pytest.approx(10.1, abs=1e-3)
    assert plan.prediction.peak_bytes <= 4000


def test_a_budget_above_all_keeps_all() -> None:
    plan = make_plan(NET, ssd(1e6), Goal(budget_bytes=10_000, recompute=True))
    assert set(plan.placements) == {KEEP}
    assert plan.prediction.written_bytes == 0
    assert plan.limit_bytes == 10_000


def test_the_host_takes_the_overflow() -> None:
    alone = make_plan(NET, ssd(50), Goal())
    plan = make_plan(NET, Machine(ssd=rates(50), host=rates(1e6, capacity=3000)), Goal())
    assert 2000 <= plan.prediction.host_bytes <= 3000
    assert plan.prediction.peak_bytes <= alone.prediction.peak_bytes - 2000
    first = make_plan(NET, Machine(ssd=rates(1e6), host=rates(1e6, capacity=3000)), Goal())
    assert count(first, HOST) == 0


def test_the_host_alone() -> None:
    plan = make_plan(NET, Machine(host=rates(1e6)), Goal())
    assert plan.prediction.peak_bytes == 300
    assert plan.prediction.written_bytes == 0
    assert count(plan, SSD) == 0


@pytest.mark.parametrize(("rate", "budget"), [(100, 3000), (200, 3500)])
def test_a_mix_beats_recompute_and_drive_alone(rate: float, budget: int) -> None:
    case = network(input_nbytes=50)
    goal = Goal(budget_bytes=budget, recompute=True)
    plan = make_plan(case, ssd(rate), goal)
    everywhere, _ = recomputed(case, frozenset(range(10)))
    drive = make_plan(case, ssd(rate), replace(goal, recompute=False))
    none = make_plan(case, Machine(), goal)
    assert plan.prediction.peak_bytes <= budget
    assert 0 < len(plan.recompute) < 10
    assert plan.prediction.written_bytes > 0
    assert plan.prediction.step_s < everywhere.end_s
    assert plan.prediction.step_s < drive.prediction.step_s
    assert plan.prediction.step_s < none.prediction.step_s
    # The blocks before the last one are recomputed; their storages, and no others.
    assert plan.recompute == set(range(9 - len(plan.recompute), 9))
    inner = inner_storages(case, plan.recompute)
    assert all((p is RECOMPUTE) == (i in inner) for i, p in enumerate(plan.placements))
    assert [block for block, _ in plan.inputs] == sorted(plan.recompute)


def test_recompute_only_when_it_wins() -> None:
    assert not make_plan(NET, ssd(1e6), Goal(budget_bytes=2000, recompute=True)).recompute
    assert not make_plan(NET, ssd(1e6), Goal(recompute=True)).recompute


def test_a_plan_says_what_wear_forbids_it_to_write() -> None:
    free = make_plan(NET, ssd(1e6), Goal())
    for goal in (Goal(written_bytes=0), Goal(written_bytes=99)):  # a storage has 100 bytes
        plan = make_plan(NET, ssd(1e6), goal)
        assert not plan.moves
        assert plan.refused_bytes == free.prediction.written_bytes > 0
    assert make_plan(NET, ssd(1e6), Goal(written_bytes=3000)).refused_bytes == 0, "something may be written"
    assert make_plan(NET, Machine(), Goal(written_bytes=0)).refused_bytes == 0, "nothing could be"
    fits = Goal(written_bytes=0, budget_bytes=10_000)
    assert make_plan(NET, ssd(1e6), fits).refused_bytes == 0, "nothing has to be"
    assert free.refused_bytes == 0


def test_what_wear_forbids_is_not_told_where_the_search_without_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    make = planner._make

    def fails(case: Trace, machine: Machine, goal: Goal) -> Plan:
        if goal.written_bytes is None:
            raise BudgetTooSmall(1, 2)
        return make(case, machine, goal)

    monkeypatch.setattr(planner, "_make", fails)
    assert make_plan(NET, ssd(1e6), Goal(written_bytes=0)).refused_bytes == 0


def test_wear_limits_what_is_written() -> None:
    plan = make_plan(NET, ssd(1e6), Goal(written_bytes=3000))
    assert 2000 < plan.prediction.written_bytes <= 3000
    assert plan.prediction.peak_bytes <= NET.saved_peak_bytes - 2000
    with_host = make_plan(NET, Machine(ssd=rates(1e6), host=rates(1e6)), Goal(written_bytes=3000))
    assert with_host.prediction.peak_bytes == 300
    tight = make_plan(NET, ssd(1e6), Goal(written_bytes=3000, budget_bytes=4000, recompute=True))
    assert tight.recompute
    assert tight.prediction.peak_bytes <= 4000
    assert tight.prediction.written_bytes <= 3000


def test_an_impossible_budget_names_the_smallest() -> None:
    for goal in (Goal(budget_bytes=10), Goal(budget_bytes=10, recompute=True)):
        with pytest.raises(BudgetTooSmall, match="allowed: at least 100") as caught:
            make_plan(NET, ssd(1000), goal)
        smallest = caught.value.smallest_bytes
        # One in use; the next one is read when it is gone.
        assert smallest == smallest_budget(NET, ssd(1000), goal) == 100
        assert make_plan(NET, ssd(1000), replace(goal, budget_bytes=smallest)).prediction.peak_bytes <= smallest
    with pytest.raises(BudgetTooSmall) as caught:
        make_plan(NET, Machine(), Goal(budget_bytes=9999))
    assert caught.value.smallest_bytes == 10_000


def test_recompute_makes_a_budget_possible() -> None:
    case = network(input_nbytes=20)
    # The inputs of all blocks but the last, and one block: 9 x 20 + 1,000.
    assert smallest_budget(case, Machine(), Goal(recompute=True)) == 1180
    plan = make_plan(case, Machine(), Goal(budget_bytes=1180, recompute=True))
    assert plan.recompute == set(range(9))
    assert plan.prediction.stall_s == 0


@pytest.mark.parametrize("goal", [Goal(), Goal(budget_bytes=0), Goal(recompute=True)])
def test_an_empty_pass(goal: Goal) -> None:
    plan = make_plan(trace([]), ssd(1), goal)
    assert plan.placements == ()
    assert (plan.prediction.step_s, plan.prediction.peak_bytes, plan.limit_bytes) == (0, 0, 0)


def test_one_storage() -> None:
    case = trace([storage(100, 0, 5, 6)], forward_end=5, end=6)
    # It must be in memory when it is packed and when it is wanted: nothing lowers the peak, so nothing moves.
    assert make_plan(case, ssd(1e6), Goal()).placements == (KEEP,)
    assert smallest_budget(case, ssd(1e6), Goal()) == 100


def test_never_wanted_and_zero_length() -> None:
    case = trace([storage(100, 0, None, 9), storage(100, 5, 6, 7)], forward_end=5, end=9)
    assert make_plan(case, ssd(1e6), Goal()).placements == (SSD, KEEP)
    zero = trace([storage(100, 0, 0, 0), storage(100, 0, None, 0)])
    assert set(make_plan(zero, ssd(1e6), Goal()).placements) == {KEEP}


def test_unknown_rates_move_nothing() -> None:
    machine = Machine(ssd=rates(0), host=rates(100, 0))
    assert set(make_plan(NET, machine, Goal()).placements) == {KEEP}


def test_blocks_that_the_trace_recomputes_stay_so() -> None:
    other, _ = recomputed(network(input_nbytes=50), frozenset({3, 4}))
    plan = make_plan(other, ssd(200), Goal(budget_bytes=3500))
    assert plan.recompute == {3, 4}
    assert RECOMPUTE not in plan.placements
    assert plan.keep_step_s == other.end_s


# -- laws --------------------------------------------------------------------------------------------------------------


@st.composite
def goals(draw: st.DrawFn, case: Trace) -> Goal:
    budget = draw(st.one_of(st.none(), st.floats(0, 1.1)))
    return Goal(
        max_slowdown=draw(st.sampled_from([1.0, 1.02, 1.5])),
        budget_bytes=None if budget is None else round(budget * case.saved_peak_bytes),
        written_bytes=draw(st.one_of(st.none(), st.integers(0, 500))),
        recompute=draw(st.booleans()),
    )


@st.composite
def questions(draw: st.DrawFn) -> tuple[Trace, Machine, Goal]:
    case = draw(passes())
    return case, draw(machines()), draw(goals(case))


@given(questions())
@settings(laws, max_examples=100)
def test_every_plan_keeps_its_promises(question: tuple[Trace, Machine, Goal]) -> None:
    case, machine, goal = question
    smallest = smallest_budget(case, machine, goal)
    if goal.budget_bytes is not None and goal.budget_bytes < smallest:
        with pytest.raises(BudgetTooSmall) as caught:
            make_plan(case, machine, goal)
        assert caught.value.smallest_bytes == smallest
        goal = replace(goal, budget_bytes=smallest)
    plan = make_plan(case, machine, goal)
    assert plan == make_plan(case, machine, goal)
    done = play(case, machine, plan)
    assert done.prediction == plan.prediction
    if goal.budget_bytes is None:
        assert plan.prediction.step_s <= goal.max_slowdown * case.end_s * (1 + 1e-9)
        assert plan.prediction.peak_bytes <= plan.limit_bytes
    else:
        assert plan.prediction.peak_bytes <= plan.limit_bytes <= goal.budget_bytes
    if goal.written_bytes is not None:
        assert plan.prediction.written_bytes <= goal.written_bytes
    for rated, direction in ((machine.ssd, SSD), (machine.host, HOST)):
        booked = [t for t in done.transfers if t.placement is direction]
        for way in ("write", "read"):
            assert all(a.end_s <= b.start_s for a, b in pairwise(t for t in booked if t.direction == way))
        stored = sum(t.nbytes for t in booked if t.direction == "write")
        assert rated is None or rated.capacity_bytes is None or stored <= rated.capacity_bytes
    inner = inner_storages(case, plan.recompute)
    assert goal.recompute or not plan.recompute
    for index, (s, placement) in enumerate(zip(case.storages, plan.placements, strict=True)):
        assert (placement is RECOMPUTE) == (index in inner)
        assert s.movable or placement in (KEEP, RECOMPUTE)
    moved = [s.nbytes for s, p in zip(case.storages, plan.placements, strict=True) if p in (SSD, HOST)]
    # Where backward saves more (it recomputes blocks, say) there may be no room for two under a budget.
    tight = goal.budget_bytes is not None and (plan.recompute or not Lifetimes(case).is_simple)
    assert plan.ahead_bytes >= (1 if tight else 2) * max(moved, default=0)


@pytest.mark.parametrize("goal", [Goal(), Goal(budget_bytes=9500)])
def test_the_simulator_has_the_last_word(goal: Goal, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound that were wrong (groups of storages are coarse) must not break a promise."""

    def the_more_the_better(_: object, places: tuple[Placement, ...], *__: object, **___: object) -> Bound:
        return Bound(places.count(KEEP) / 100, places.count(KEEP), 0)

    monkeypatch.setattr(planner, "bound", the_more_the_better)
    plan = make_plan(NET, ssd(300), goal)
    assert plan.prediction == play(NET, ssd(300), plan).prediction
    if goal.budget_bytes is None:
        assert plan.prediction.step_s <= 1.02 * NET.end_s
    else:
        assert plan.prediction.peak_bytes <= 9500


@given(questions())
@laws
def test_without_a_budget_the_limit_changes_nothing(question: tuple[Trace, Machine, Goal]) -> None:
    case, machine, goal = question
    plan = make_plan(case, machine, replace(goal, budget_bytes=None, recompute=False))
    free = simulate(case, plan.placements, machine, limit_bytes=None, ahead_bytes=plan.ahead_bytes)
    assert free.prediction == plan.prediction


def best(case: Trace, machine: Machine, goal: Goal) -> float:
    """What the choice is made by: the least step time with a budget, the least peak without. See planner.py."""
    found = judge([c for v in variants(case, goal) for c in family(v, machine, goal)], machine, goal)
    numbers = [j.bound.peak_bytes if goal.budget_bytes is None else j.bound.step_s for j in found]
    return min(numbers, default=math.inf)


@given(questions(), st.integers(0, 300), st.integers(0, 300))
@laws
def test_more_bandwidth_never_hurts(question: tuple[Trace, Machine, Goal], write: int, read: int) -> None:
    case, machine, goal = question
    assert machine.ssd is not None
    more = replace(
        machine.ssd,
        write_bytes_per_s=machine.ssd.write_bytes_per_s + write,
        read_bytes_per_s=machine.ssd.read_bytes_per_s + read,
    )
    assert best(case, replace(machine, ssd=more), goal) <= best(case, machine, goal) + _SLACK_S


@given(questions(), st.integers(0, 300))
@laws
def test_more_budget_never_hurts(question: tuple[Trace, Machine, Goal], more: int) -> None:
    case, machine, goal = question
    low = goal.budget_bytes or case.saved_peak_bytes // 2
    before, after = (best(case, machine, replace(goal, budget_bytes=b)) for b in (low, low + more))
    assert after <= before + _SLACK_S


@given(questions(), tier_rates(), st.integers(0, 600))
@laws
def test_more_host_memory_never_hurts(question: tuple[Trace, Machine, Goal], host: object, more: int) -> None:
    case, machine, goal = question
    capacity = host.capacity_bytes or 0  # type: ignore[attr-defined]
    small, large = (replace(host, capacity_bytes=c) for c in (capacity, capacity + more))  # type: ignore[type-var]
    without = best(case, replace(machine, host=None), goal)
    with_small, with_large = (best(case, replace(machine, host=h), goal) for h in (small, large))
    assert with_large <= with_small + _SLACK_S
    assert with_small <= without + _SLACK_S


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("share", [None, 0.6, 0.4, 0.2])
def test_predictions_of_a_network_get_better_with_the_drive(share: float | None, recompute: bool) -> None:
    """The predictions themselves, for a pass as networks make them: nothing gets worse by more than the tolerances."""
    case = network(input_nbytes=50)
    budget = None if share is None else round(share * case.saved_peak_bytes)
    plans = [
        make_plan(case, ssd(rate), Goal(budget_bytes=budget, recompute=recompute))
        for rate in (20, 100, 300, 700, 1000, 3000)
    ]
    for slow, fast in pairwise(plans):
        if budget is None:
            # Steps of the family are a thirty-second of all bytes.
            assert fast.prediction.peak_bytes <= slow.prediction.peak_bytes + case.saved_peak_bytes / 32
        else:
            assert fast.prediction.step_s <= slow.prediction.step_s * TOLERANCE**2


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("rate", [100, 300, 700, 2000])
def test_predictions_of_a_network_get_better_with_the_budget(rate: float, recompute: bool) -> None:
    case = network(input_nbytes=50)
    plans = [
        make_plan(case, ssd(rate), Goal(budget_bytes=budget, recompute=recompute))
        for budget in range(1100, 10_500, 900)
    ]
    for tight, wide in pairwise(plans):
        assert wide.prediction.step_s <= tight.prediction.step_s * TOLERANCE**2
    assert make_plan(case, ssd(rate), Goal(budget_bytes=10_000)).prediction.step_s == case.end_s


# -- large passes ------------------------------------------------------------------------------------------------------


@given(passes(), st.integers(1, 6))
@laws
def test_groups_hold_everything_once(case: Trace, max_units: int) -> None:
    units = Units.of(case, max_units=max_units)
    assert sorted(i for members in units.members for i in members) == list(range(len(case.storages)))
    for s, members in zip(units.trace.storages, units.members, strict=True):
        inside = [case.storages[i] for i in members]
        assert s.nbytes == sum(m.nbytes for m in inside)
        assert {(m.movable, m.wanted_s is None) for m in inside} == {(s.movable, s.wanted_s is None)}
        assert all(s.packed_s <= m.packed_s and m.freed_s <= s.freed_s for m in inside)


@pytest.mark.parametrize(
    "goal",
    [Goal(recompute=True), Goal(budget_bytes=800_000_000, recompute=True)],
    ids=["lowest", "budget"],
)
def test_four_thousand_storages_take_less_than_five_seconds(goal: Goal) -> None:
    case = network(80, 50, nbytes=1_000_000, forward_s=0.02, backward_s=0.04, input_nbytes=1_000_000)
    machine = Machine(ssd=rates(1e9), host=rates(5e9, capacity=500_000_000))
    begin = time.perf_counter()
    plan = make_plan(case, machine, goal)
    assert time.perf_counter() - begin < 5
    assert play(case, machine, plan).prediction == plan.prediction
    assert plan.prediction.peak_bytes <= (goal.budget_bytes or case.saved_peak_bytes)
    assert len(Units.of(case, max_units=200).members) <= 250
