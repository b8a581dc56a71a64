"""The trace of a pass whose blocks are recomputed."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ssd.planning.lifetimes import Lifetimes
from lightning_ssd.planning.placement import Placement
from lightning_ssd.planning.plan import Machine, PlanObjective, TierRates
from lightning_ssd.planning.planner import make_plan
from lightning_ssd.planning.recompute_trace import (
    inner_bytes,
    inner_storages,
    input_of,
    recomputable,
    recomputed,
    with_inner,
)
from tests.support.traces import network, passes, simulate, storage, trace


def times(s):
    return s.packed_s, s.last_used_s, s.wanted_s, s.freed_s


def two_blocks():
    """Blocks of 1 s forward, 2 s backward, two storages each: packed at 0, 0.5 | 1, 1.5; end at 6 s."""
    return network(2, 2, input_nbytes=7)


def test_the_first_block_by_hand():
    other, old = recomputed(two_blocks(), frozenset({0}))
    # Block 0's backward would begin at 4 s; now that is when its forward is run again, for 1 s.
    assert old == (-1, 2, 3, 0, 1)
    assert [input_of(i) for i in old if i < 0] == [0]
    assert times(other.storages[0]) == (0, 1, 4, 7)
    assert other.storages[0].nbytes == 7
    assert other.storages[0].movable
    assert [times(s) for s in other.storages[1:3]] == [(1, 1, 3, 4), (1.5, 1.5, 2, 3)]  # as before
    assert times(other.storages[3]) == (4, 4, 6, 7)
    assert times(other.storages[4]) == (4.5, 4.5, 5, 6)
    assert [s.movable for s in other.storages] == [True, True, True, False, False]
    assert [s.block for s in other.storages] == [0, 1, 1, 0, 0]
    assert other.order == (2, 1, 0, 4, 3)
    assert (other.forward_end_s, other.end_s, other.recomputed) == (2, 7, {0})
    assert (other.blocks[0].backward_start_s, other.blocks[0].backward_end_s) == (4, 7)
    assert other.blocks[1] == two_blocks().blocks[1]


def test_memory_falls_to_inputs_and_one_block():
    case = network(10, 10, nbytes=100, input_nbytes=10)
    other, _ = recomputed(case, frozenset(range(10)))
    assert case.saved_peak_bytes == 10_000
    assert other.saved_peak_bytes == 10 * 10 + 10 * 100
    assert other.end_s == pytest.approx(case.end_s + 10)


def test_nothing_to_recompute_changes_nothing():
    case = two_blocks()
    for blocks in (frozenset[int](), frozenset({7})):
        with_none = recomputed(case, blocks) if not blocks else (case, (0, 1, 2, 3))
        assert with_none == (case, (0, 1, 2, 3))
    again = replace(case, recomputed=frozenset({1}))
    assert recomputable(again) == (0,)
    assert recomputed(again, frozenset({1})) == (again, (0, 1, 2, 3))
    assert recomputed(again, frozenset({0, 1}))[0].recomputed == {0, 1}


def test_blocks_that_cannot_be_recomputed_are_not_offered():
    case = two_blocks()
    assert recomputable(case) == (0, 1)
    assert recomputable(replace(case, blocks=(replace(case.blocks[0], recomputable=False), case.blocks[1]))) == (1,)


def test_blocks_of_which_nothing_is_wanted_are_left_alone():
    case = two_blocks()
    storages = tuple(replace(s, wanted_s=None) if s.block == 1 else s for s in case.storages)
    case = replace(case, storages=storages, order=tuple(i for i in case.order if case.storages[i].block == 0))
    assert recomputable(case) == (0,)
    assert recomputed(case, frozenset({1})) == (case, (0, 1, 2, 3))


@pytest.mark.parametrize(
    "missing",
    [
        {"backward_start_s": 0.0, "backward_end_s": 0.0},
        {"backward_start_s": 6.0, "backward_end_s": 6.0},  # "never": the recorder's word for a block without wants
        {"backward_end_s": 0.0},
    ],
)
def test_missing_backward_times_come_from_what_the_block_saved(missing):
    case = two_blocks()
    whole = recomputed(case, frozenset({0}))
    holes = replace(case, blocks=(replace(case.blocks[0], **missing), case.blocks[1]))
    other, old = recomputed(holes, frozenset({0}))
    assert (other.storages, other.order, old) == (whole[0].storages, whole[0].order, whole[1])


@given(passes(), st.sets(st.integers(0, 2)))
@settings(derandomize=True, deadline=None, max_examples=200, database=None)
def test_laws(case, chosen):
    blocks = frozenset(b for b in chosen if b < len(case.blocks))
    other, old = recomputed(case, blocks)
    done = blocks & set(recomputable(case))
    Lifetimes(other)  # the order names exactly what is wanted
    assert other.recomputed == done
    assert other.end_s == pytest.approx(case.end_s + 3 * len(done))
    assert sorted(i for i in old if i >= 0) == list(range(len(case.storages)))
    assert {input_of(i) for i in old if i < 0} == {b for b in done if case.blocks[b].input_nbytes}
    inner = inner_storages(case, blocks)
    packed = [s.packed_s for s in other.storages]
    assert packed == sorted(packed)
    for index, s in zip(old, other.storages, strict=True):
        assert s.packed_s <= s.last_used_s <= max(s.freed_s, s.last_used_s)
        assert s.freed_s >= max(s.packed_s, s.wanted_s or 0)
        assert s.freed_s <= other.end_s + 1e-9
        if index in inner:
            assert not s.movable
            assert s.packed_s >= case.forward_end_s
        elif index >= 0:
            delay_s = s.packed_s - case.storages[index].packed_s
            assert delay_s == 0 if s.packed_s < case.forward_end_s else 0 <= delay_s <= 3 * len(done) + 1e-9
            assert s.movable == case.storages[index].movable
        if index >= 0:
            before, after = case.storages[index].wanted_s, s.wanted_s
            assert (before is None) == (after is None)
            assert before is None or after is None or before - 1e-9 <= after <= before + 3 * len(done) + 1e-9


def test_what_no_hook_sees_of_a_recomputed_block_is_put_back_into_its_trace():
    storages = (
        storage(10, 0.1, 3.5, 3.9, block=0),
        storage(20, 0.2, 3.2, 3.4, block=0),
        storage(5, 1.1, 2.5, 2.9, block=1),
    )
    base = trace(storages, forward_end=2.0, end=4.0, blocks=network(2, 1, backward_s=1.0).blocks)
    held = inner_bytes(base, frozenset({0}))
    assert held == {0: 30}
    recorded = replace(base, storages=base.storages[2:], order=(0,), recomputed=frozenset({0}))
    completed = with_inner(recorded, held)
    assert completed.storages[:1] == recorded.storages
    hidden = completed.storages[1]
    assert (hidden.nbytes, hidden.packed_s, hidden.freed_s, hidden.movable) == (30, 3.0, 4.0, False)
    assert completed.order == recorded.order
    assert with_inner(base, held) == base  # nothing was recomputed: the hooks have seen all of it
    placements = (Placement.SSD, Placement.KEEP)
    machine = Machine(ssd=TierRates(write_bytes_per_s=1e9, read_bytes_per_s=1e9))
    played = simulate(completed, placements, machine, limit_bytes=None, ahead_bytes=0).prediction
    assert played.peak_bytes == 30


NBYTES = 20 << 20
COUNT = 60


def pass_of(end_s, moved_bytes):
    kept = network(1, COUNT, nbytes=NBYTES, forward_s=end_s / 2, backward_s=end_s / 2)
    return replace(kept, moved_bytes=moved_bytes)


@pytest.mark.parametrize("cost", [0.02, 0.1, 0.2, 0.5])
def test_a_pass_that_moved_is_planned_like_one_that_kept(cost):
    """``cost``: of moving everything, relative to a pass of a second."""
    rates = TierRates(write_bytes_per_s=2e9, read_bytes_per_s=2e9)
    machine = Machine(ssd=rates, cost_s_per_byte=cost / (COUNT * NBYTES))
    goal = PlanObjective(max_slowdown=1.05)
    kept = make_plan(pass_of(1.0, 0), machine, goal)
    moved = make_plan(pass_of(1.0 + cost, COUNT * NBYTES), machine, goal)
    assert kept.moves
    assert moved.keep_step_s == pytest.approx(kept.keep_step_s) == 1.0
    assert moved.prediction.peak_bytes <= 1.05 * kept.prediction.peak_bytes
    assert moved.prediction.step_s <= 1.05 * moved.keep_step_s * (1 + 1e-9)
    assert moved.moves


@pytest.mark.parametrize("seed", range(5))
def test_the_peak_is_that_of_some_moment(seed):
    rng = random.Random(seed)
    storages = []
    for _ in range(50):
        begin, end = sorted((rng.randrange(100), rng.randrange(100)))
        storages.append(storage(rng.randrange(1, 9), begin, end, end))
    held = (sum(s.nbytes for s in storages if s.packed_s <= now < s.freed_s) for now in range(101))
    assert trace(storages, end=100).saved_peak_bytes == max(held)
