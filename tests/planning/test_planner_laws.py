"""What holds for every plan: it keeps its promises, and nothing better makes it worse."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ssd.planning.candidates import Units, family, variants
from lightning_ssd.planning.lifetimes import Lifetimes
from lightning_ssd.planning.placement import Placement
from lightning_ssd.planning.plan import PlanObjective
from lightning_ssd.planning.planner import TOLERANCE, BudgetTooSmall, judge, make_plan, smallest_budget
from lightning_ssd.planning.recompute_trace import inner_storages
from tests.support.traces import HOST, KEEP, SSD, machines, network, passes, play, simulate, ssd, tier_rates

laws = settings(derandomize=True, deadline=None, max_examples=60, database=None)
_SLACK_S = 1e-9


@st.composite
def goals(draw, case):
    budget = draw(st.one_of(st.none(), st.floats(0, 1.1)))
    return PlanObjective(
        max_slowdown=draw(st.sampled_from([1.0, 1.02, 1.5])),
        budget_bytes=None if budget is None else round(budget * case.saved_peak_bytes),
        written_bytes=draw(st.one_of(st.none(), st.integers(0, 500))),
        recompute=draw(st.booleans()),
    )


@st.composite
def questions(draw):
    case = draw(passes())
    return case, draw(machines()), draw(goals(case))


@given(questions())
@settings(laws, max_examples=100)
def test_every_plan_keeps_its_promises(question):
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
        booked = [t for t in done.moves if t.placement is direction]
        for way in ("write", "read"):
            assert all(a.end_s <= b.start_s for a, b in pairwise(t for t in booked if t.what == way))
        stored = sum(t.nbytes for t in booked if t.what == "write")
        assert rated is None or rated.capacity_bytes is None or stored <= rated.capacity_bytes
    inner = inner_storages(case, plan.recompute)
    assert goal.recompute or not plan.recompute
    for index, (s, placement) in enumerate(zip(case.storages, plan.placements, strict=True)):
        assert (placement is Placement.RECOMPUTE) == (index in inner)
        assert s.movable or placement in (KEEP, Placement.RECOMPUTE)
    moved = [s.nbytes for s, p in zip(case.storages, plan.placements, strict=True) if p in (SSD, HOST)]
    # Where backward saves more (it recomputes blocks, say) there may be no room for two under a budget.
    tight = goal.budget_bytes is not None and (plan.recompute or not Lifetimes(case).is_simple)
    assert plan.ahead_bytes >= (1 if tight else 2) * max(moved, default=0)


@given(questions())
@laws
def test_without_a_budget_the_limit_changes_nothing(question):
    case, machine, goal = question
    plan = make_plan(case, machine, replace(goal, budget_bytes=None, recompute=False))
    free = simulate(case, plan.placements, machine, limit_bytes=None, ahead_bytes=plan.ahead_bytes)
    assert free.prediction == plan.prediction


@given(passes(), st.integers(1, 6))
@laws
def test_groups_hold_everything_once(case, max_units):
    units = Units.of(case, max_units=max_units)
    assert sorted(i for members in units.members for i in members) == list(range(len(case.storages)))
    for s, members in zip(units.trace.storages, units.members, strict=True):
        inside = [case.storages[i] for i in members]
        assert s.nbytes == sum(m.nbytes for m in inside)
        assert {(m.movable, m.wanted_s is None) for m in inside} == {(s.movable, s.wanted_s is None)}
        assert all(s.packed_s <= m.packed_s and m.freed_s <= s.freed_s for m in inside)


# -- nothing better makes it worse -------------------------------------------------------------------------------------


def best(case, machine, goal):
    """What the choice is made by: the least step time with a budget, the least peak without. See planner.py."""
    found = judge(
        [c for v in variants(case, goal) for c in family(v, machine, goal)],
        machine,
        goal,
        max_step_s=goal.max_slowdown * case.end_s,
    )
    numbers = [j.bound.peak_bytes if goal.budget_bytes is None else j.bound.step_s for j in found]
    return min(numbers, default=math.inf)


@given(questions(), st.integers(0, 300), st.integers(0, 300))
@laws
def test_more_bandwidth_never_hurts(question, write, read):
    case, machine, goal = question
    more = replace(
        machine.ssd,
        write_bytes_per_s=machine.ssd.write_bytes_per_s + write,
        read_bytes_per_s=machine.ssd.read_bytes_per_s + read,
    )
    assert best(case, replace(machine, ssd=more), goal) <= best(case, machine, goal) + _SLACK_S


@given(questions(), st.integers(0, 300))
@laws
def test_more_budget_never_hurts(question, more):
    case, machine, goal = question
    low = goal.budget_bytes or case.saved_peak_bytes // 2
    before, after = (best(case, machine, replace(goal, budget_bytes=b)) for b in (low, low + more))
    assert after <= before + _SLACK_S


@given(questions(), tier_rates(), st.integers(0, 600))
@laws
def test_more_host_memory_never_hurts(question, host, more):
    case, machine, goal = question
    capacity = host.capacity_bytes or 0
    small, large = (replace(host, capacity_bytes=c) for c in (capacity, capacity + more))
    without = best(case, replace(machine, host=None), goal)
    with_small, with_large = (best(case, replace(machine, host=h), goal) for h in (small, large))
    assert with_large <= with_small + _SLACK_S
    assert with_small <= without + _SLACK_S


@pytest.mark.parametrize(("share", "recompute"), [(None, False), (None, True), (0.6, True), (0.2, False), (0.2, True)])
def test_predictions_of_a_network_get_better_with_the_drive(share, recompute):
    """The predictions themselves, for a pass as networks make them: nothing gets worse by more than the tolerances."""
    case = network(input_nbytes=50)
    budget = None if share is None else round(share * case.saved_peak_bytes)
    plans = [
        make_plan(case, ssd(rate), PlanObjective(budget_bytes=budget, recompute=recompute))
        for rate in (20, 100, 300, 700, 1000, 3000)
    ]
    for slow, fast in pairwise(plans):
        if budget is None:
            # Steps of the family are a thirty-second of all bytes.
            assert fast.prediction.peak_bytes <= slow.prediction.peak_bytes + case.saved_peak_bytes / 32
        else:
            assert fast.prediction.step_s <= slow.prediction.step_s * TOLERANCE**2


@pytest.mark.parametrize(("rate", "recompute"), [(100, True), (300, False), (700, True), (2000, False)])
def test_predictions_of_a_network_get_better_with_the_budget(rate, recompute):
    case = network(input_nbytes=50)
    plans = [
        make_plan(case, ssd(rate), PlanObjective(budget_bytes=budget, recompute=recompute))
        for budget in range(1100, 10_500, 1800)
    ]
    for tight, wide in pairwise(plans):
        assert wide.prediction.step_s <= tight.prediction.step_s * TOLERANCE**2
    assert make_plan(case, ssd(rate), PlanObjective(budget_bytes=10_000)).prediction.step_s == case.end_s
