"""The planner, by hand: who moves, who is recomputed, and what is told where nothing can be done."""

import time
from dataclasses import replace
from itertools import product

import pytest

from lightning_ssd.planning import planner
from lightning_ssd.planning.bound import Bound
from lightning_ssd.planning.candidates import Units
from lightning_ssd.planning.placement import Placement
from lightning_ssd.planning.plan import Machine, PlanObjective, Prediction, TierRates
from lightning_ssd.planning.planner import BudgetTooSmall, make_plan, smallest_budget
from lightning_ssd.planning.recompute_trace import inner_storages, recomputed
from lightning_ssd.planning.what_fits import Choice, Fit, choose, largest
from tests.support.traces import HOST, KEEP, SSD, network, play, rates, ssd, storage, trace

RECOMPUTE = Placement.RECOMPUTE

# 100 storages of 100 bytes, 10 s forward (1,000 bytes per second), 20 s backward.
NET = network()


def count(plan, placement):
    return plan.placements.count(placement)


def test_a_fast_drive_takes_all_but_the_tail():
    plan = make_plan(NET, ssd(1e6), PlanObjective())
    assert plan.prediction.stall_s == 0
    assert plan.prediction.step_s == plan.keep_step_s == NET.end_s
    kept = [i for i, p in enumerate(plan.placements) if p is KEEP]
    assert kept == list(range(100 - len(kept), 100))
    assert 1 <= len(kept) <= 3
    # One in use and two on their way.
    assert plan.prediction.peak_bytes == 300
    assert plan.ahead_bytes == 200
    assert plan.limit_bytes == 400


def test_a_slow_drive_takes_what_it_can():
    plan = make_plan(NET, ssd(50), PlanObjective())
    assert plan.prediction.step_s <= 1.02 * NET.end_s
    # By the end of forward 10 s x 50 bytes/s can have left, of which two storages may have come back at once.
    assert 9500 <= plan.prediction.peak_bytes <= 9700
    assert plan.prediction.written_bytes <= 50 * NET.end_s


@pytest.mark.parametrize(("min_relief", "moves"), [(0.03, True), (0.05, False)])
def test_what_relieves_too_little_is_left_alone(min_relief, moves):
    """The same drive takes 3 to 5 % away."""
    plan = make_plan(NET, ssd(50), PlanObjective(min_relief=min_relief))
    assert plan.moves is moves
    assert (plan.prediction.peak_bytes < NET.saved_peak_bytes) is moves


def test_a_budget_is_kept_however_little_it_relieves():
    plan = make_plan(NET, ssd(50), PlanObjective(budget_bytes=9_900, min_relief=0.05))
    assert plan.prediction.peak_bytes <= 9_900


@pytest.mark.parametrize("machine", [ssd(0.1), Machine(ssd=rates(0), host=rates(100, 0))], ids=["slow", "unknown"])
def test_a_useless_drive_takes_nothing(machine):
    plan = make_plan(NET, machine, PlanObjective())
    assert set(plan.placements) == {KEEP}
    assert plan.prediction.peak_bytes == NET.saved_peak_bytes


def test_a_budget_costs_what_the_drive_needs():
    plan = make_plan(NET, Machine(ssd=rates(300, 1e6)), PlanObjective(budget_bytes=4000))
    # The last storage is packed at 9.9 s. By then 6,000 bytes must have left, which takes 20 s.
    assert plan.prediction.stall_s == pytest.approx(10.1, abs=1e-3)
    assert plan.prediction.peak_bytes <= 4000


def test_the_host_takes_the_overflow():
    alone = make_plan(NET, ssd(50), PlanObjective())
    plan = make_plan(NET, Machine(ssd=rates(50), host=rates(1e6, capacity=3000)), PlanObjective())
    assert 2000 <= plan.prediction.host_bytes <= 3000
    assert plan.prediction.peak_bytes <= alone.prediction.peak_bytes - 2000
    first = make_plan(NET, Machine(ssd=rates(1e6), host=rates(1e6, capacity=3000)), PlanObjective())
    assert count(first, HOST) == 0


@pytest.mark.parametrize(("rate", "budget"), [(100, 3000), (200, 3500)])
def test_a_mix_beats_recompute_and_drive_alone(rate, budget):
    case = network(input_nbytes=50)
    goal = PlanObjective(budget_bytes=budget, recompute=True)
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


def test_a_plan_says_what_wear_forbids_it_to_write():
    free = make_plan(NET, ssd(1e6), PlanObjective())
    for goal in (PlanObjective(written_bytes=0), PlanObjective(written_bytes=99)):  # a storage has 100 bytes
        plan = make_plan(NET, ssd(1e6), goal)
        assert not plan.moves
        assert plan.refused_bytes == free.prediction.written_bytes > 0
    assert make_plan(NET, ssd(1e6), PlanObjective(written_bytes=3000)).refused_bytes == 0, "something may be written"
    assert make_plan(NET, Machine(), PlanObjective(written_bytes=0)).refused_bytes == 0, "nothing could be"
    fits = PlanObjective(written_bytes=0, budget_bytes=10_000)
    assert make_plan(NET, ssd(1e6), fits).refused_bytes == 0, "nothing has to be"
    assert free.refused_bytes == 0


def test_wear_limits_what_is_written():
    plan = make_plan(NET, ssd(1e6), PlanObjective(written_bytes=3000))
    assert 2000 < plan.prediction.written_bytes <= 3000
    assert plan.prediction.peak_bytes <= NET.saved_peak_bytes - 2000
    with_host = make_plan(NET, Machine(ssd=rates(1e6), host=rates(1e6)), PlanObjective(written_bytes=3000))
    assert with_host.prediction.peak_bytes == 300
    tight = make_plan(NET, ssd(1e6), PlanObjective(written_bytes=3000, budget_bytes=4000, recompute=True))
    assert tight.recompute
    assert tight.prediction.peak_bytes <= 4000
    assert tight.prediction.written_bytes <= 3000


def test_an_impossible_budget_names_the_smallest():
    for goal in (PlanObjective(budget_bytes=10), PlanObjective(budget_bytes=10, recompute=True)):
        with pytest.raises(BudgetTooSmall, match="the smallest budget is 100") as caught:
            make_plan(NET, ssd(1000), goal)
        smallest = caught.value.smallest_bytes
        # One in use; the next one is read when it is gone.
        assert smallest == smallest_budget(NET, ssd(1000), goal) == 100
        assert make_plan(NET, ssd(1000), replace(goal, budget_bytes=smallest)).prediction.peak_bytes <= smallest
    with pytest.raises(BudgetTooSmall) as caught:
        make_plan(NET, Machine(), PlanObjective(budget_bytes=9999))
    assert caught.value.smallest_bytes == 10_000


def test_recompute_makes_a_budget_possible():
    case = network(input_nbytes=20)
    # The inputs of all blocks but the last, and one block: 9 x 20 + 1,000.
    assert smallest_budget(case, Machine(), PlanObjective(recompute=True)) == 1180
    plan = make_plan(case, Machine(), PlanObjective(budget_bytes=1180, recompute=True))
    assert plan.recompute == set(range(9))
    assert plan.prediction.stall_s == 0


@pytest.mark.parametrize("goal", [PlanObjective(), PlanObjective(budget_bytes=0), PlanObjective(recompute=True)])
def test_an_empty_pass(goal):
    plan = make_plan(trace([]), ssd(1), goal)
    assert plan.placements == ()
    assert (plan.prediction.step_s, plan.prediction.peak_bytes, plan.limit_bytes) == (0, 0, 0)


def test_never_wanted_and_zero_length():
    case = trace([storage(100, 0, None, 9), storage(100, 5, 6, 7)], forward_end=5, end=9)
    assert make_plan(case, ssd(1e6), PlanObjective()).placements == (SSD, KEEP)
    zero = trace([storage(100, 0, 0, 0), storage(100, 0, None, 0)])
    assert set(make_plan(zero, ssd(1e6), PlanObjective()).placements) == {KEEP}


def test_blocks_that_the_trace_recomputes_stay_so():
    other, _ = recomputed(network(input_nbytes=50), frozenset({3, 4}))
    plan = make_plan(other, ssd(200), PlanObjective(budget_bytes=3500))
    assert plan.recompute == {3, 4}
    assert RECOMPUTE not in plan.placements
    assert plan.keep_step_s == other.end_s


@pytest.mark.parametrize("goal", [PlanObjective(), PlanObjective(budget_bytes=9500)])
def test_the_simulator_has_the_last_word(goal, monkeypatch):
    """A bound that were wrong (groups of storages are coarse) must not break a promise."""

    def the_more_the_better(_, places, *__, **___):
        return Bound(places.count(KEEP) / 100, places.count(KEEP), 0)

    monkeypatch.setattr(planner, "bound", the_more_the_better)
    plan = make_plan(NET, ssd(300), goal)
    assert plan.prediction == play(NET, ssd(300), plan).prediction
    if goal.budget_bytes is None:
        assert plan.prediction.step_s <= 1.02 * NET.end_s
    else:
        assert plan.prediction.peak_bytes <= 9500


@pytest.mark.parametrize(
    "goal",
    [PlanObjective(recompute=True), PlanObjective(budget_bytes=800_000_000, recompute=True)],
    ids=["lowest", "budget"],
)
def test_four_thousand_storages_take_less_than_five_seconds(goal):
    case = network(80, 50, nbytes=1_000_000, forward_s=0.02, backward_s=0.04, input_nbytes=1_000_000)
    machine = Machine(ssd=rates(1e9), host=rates(5e9, capacity=500_000_000))
    begin = time.thread_time()
    plan = make_plan(case, machine, goal)
    assert time.thread_time() - begin < 5
    assert play(case, machine, plan).prediction == plan.prediction
    assert plan.prediction.peak_bytes <= (goal.budget_bytes or case.saved_peak_bytes)
    assert len(Units.of(case, max_units=200).members) <= 250


def test_what_is_held_until_forward_ends_holds_back_nothing_else():
    """Under autocast the copy of a weight is saved beside nearly every activation, and its cache holds it so long."""
    case = network(20, 20)
    copies = [i % 2 == 1 for i in range(len(case.storages))]
    held = [
        replace(s, last_used_s=case.forward_end_s) if is_copy else s
        for s, is_copy in zip(case.storages, copies, strict=True)
    ]
    case = replace(case, storages=tuple(held))
    copied_bytes = sum(s.nbytes for s, is_copy in zip(held, copies, strict=True) if is_copy)
    assert smallest_budget(case, ssd(1e6), PlanObjective()) <= 1.05 * copied_bytes
    plan = make_plan(case, ssd(1e6), PlanObjective())
    assert plan.prediction.peak_bytes <= 1.05 * copied_bytes


DRIVES = TierRates(write_bytes_per_s=1.0, read_bytes_per_s=2.0)


def prediction(step_s, peak_bytes, **more):
    return Prediction(step_s=step_s, stall_s=0.0, peak_bytes=peak_bytes, read_bytes=0, **{"written_bytes": 0, **more})


def held(device_bytes, moved_bytes=0):
    return Fit(
        plain_bytes=9, device_bytes=device_bytes, waiting_bytes=0, read_bytes=moved_bytes, written_bytes=moved_bytes
    )


MODES = {"keep": prediction(10, 50), "offload": prediction(11, 20, written_bytes=7), "recompute": prediction(13, 10)}
WAITS = {"nothing": held(40), "states": held(20, 4), "all": held(5, 20)}


@pytest.mark.parametrize(
    ("room", "mode", "waits", "step_s", "held_bytes", "written"),
    [
        (90, "keep", "nothing", 10, 90, 0),
        (89, "offload", "nothing", 11, 60, 7),
        (59, "recompute", "nothing", 13, 50, 0),
        (49, "offload", "states", 17, 40, 11),
        (25, "offload", "all", 41, 25, 27),
        (15, "recompute", "all", 43, 15, 20),
    ],
)
def test_the_fastest_that_fits(room, mode, waits, step_s, held_bytes, written):
    assert choose(MODES, WAITS, room_bytes=room, drives=DRIVES) == Choice(
        mode=mode,
        waits=waits,
        fits=True,
        held_bytes=held_bytes,
        step_s=step_s,
        written_bytes=written,
        limit="the drive" if waits == "all" else "compute",
    )


def test_where_nothing_fits_the_smallest_is_told():
    found = choose(MODES, WAITS, room_bytes=14, drives=DRIVES)
    assert (found.fits, found.mode, found.waits, found.held_bytes) == (False, "recompute", "all", 15)


def test_the_largest_is_found_from_anywhere():
    for limit, start in product([0, 1, 2, 7, 16, 17, 1000], [1, 3, 8, 100, 5000]):
        tried = []
        found = largest(lambda number: tried.append(number) or number <= limit, start)  # noqa: B023
        assert found <= limit <= (found if limit <= 16 else 1.0625 * found), (limit, start)
        assert len(tried) == len(set(tried)) <= 24
