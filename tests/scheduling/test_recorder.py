"""The recorder's clock stands still during stalls; it sees where backward of a block begins."""

import itertools
from collections import Counter

import pytest
import torch
from torch import nn

from lightning_ssd.activations import tensor_cache
from lightning_ssd.common.tensors import StorageKey
from lightning_ssd.scheduling import recorder
from lightning_ssd.scheduling.clock import HostClock
from lightning_ssd.scheduling.recorder import Recorder
from tests.support.opened import offloader_in
from tests.support.recorded_passes import NBYTES, FakeClock, begun, pack, saved
from tests.support.threads import at_once
from tests.support.weight_loops import passed


@pytest.fixture
def clock():
    return FakeClock(now_s=100.0)


@pytest.fixture
def told(clock):
    return begun(clock)


@pytest.fixture
def at(told, clock):
    """The recorder at a moment."""

    def then(now_s):
        clock.at(now_s)
        return told

    return then


def times(trace):
    return [(s.packed_s, s.last_used_s, s.wanted_s, s.freed_s) for s in trace.storages]


# -- the clock --------------------------------------------------------------------------------------------------------


def test_times_count_from_the_begin_of_the_pass(clock, told, at):
    first, second = pack(told, clock, 101), pack(told, clock, 102)
    at(103).forward_ended()
    for index, wanted_s in ((1, 104), (0, 106)):
        at(wanted_s).wanted(index)
        at(wanted_s + 1).freed(index)
    trace = told.trace(clock.at(108))
    assert times(trace) == [(1, 2, 6, 7), (2, 3, 4, 5)]
    assert (trace.forward_end_s, trace.end_s) == (3, 8)
    assert trace.order == (1, 0)
    assert [s.nbytes for s in trace.storages] == [NBYTES, NBYTES]
    assert first.key.alive()
    assert second.key.alive()


@pytest.mark.parametrize(("lag", "hook_s"), [(0, 0.25), (1, 3.25)], ids=["CPU", "device"])
def test_a_stall_within_a_hook_is_no_time_of_the_hook(lag, hook_s):
    """The account has stalls already: a slow drive would make each byte that moves seem dear for good.

    On a device it is the stream that stalls, as a rule, and the hook returns at once.
    """
    clock = FakeClock(lag=lag, now_s=100.0)
    told = begun(clock)

    def unpack(index):
        begin = clock.stamp()
        told.stalls = [(begin, clock.at(clock.now_s + 3))]
        clock.at(clock.now_s + 0.25)

    told.timed(unpack)(0)
    end = clock.at(105)
    told.backward_ended()
    assert told.hook_s(end) == pytest.approx(hook_s)


def test_a_wait_outside_of_the_hooks_is_no_part_of_them(clock, told):
    """All passes under way note each wait, whichever has waited."""
    told.stalls = [(100.5, 102.5)]
    clock.at(103)
    told.timed(lambda index: clock.at(103.25))(0)
    end = clock.at(105)
    told.backward_ended()
    assert told.hook_s(end) == pytest.approx(0.25)


STALLS = {
    "between": ([(103.5, 104.5)], [1, 3, 4, 6, 8]),
    "several": ([(100, 100.5), (103.5, 104.5), (107.25, 107.5)], [0.5, 2.5, 3.5, 5.5, 7.25]),
    "two threads at once": ([(103.5, 104.5), (104, 104.75)], [1, 3, 3.75, 5.75, 7.75]),
    "one within another": ([(103.5, 104.75), (104, 104.5)], [1, 3, 3.75, 5.75, 7.75]),
    "begun before the pass": ([(90, 100.5)], [0.5, 2.5, 4.5, 6.5, 8.5]),
    "over a moment": ([(104, 106)], [1, 3, 4, 5, 7]),
}


@pytest.mark.parametrize(("stalls", "expected"), STALLS.values(), ids=STALLS.keys())
def test_the_clock_stands_still_during_stalls(clock, told, at, stalls, expected):
    held = pack(told, clock, 101, held=True), pack(told, clock, 103)
    told.stalls = stalls
    at(105).forward_ended()
    at(107).wanted(1)
    trace = told.trace(clock.at(109))
    storages = trace.storages
    got = [storages[0].packed_s, storages[1].packed_s, trace.forward_end_s, storages[1].wanted_s, trace.end_s]
    assert got == expected
    assert len(held) == 2


def test_what_dies_while_somebody_waits_dies_when_the_wait_began(clock, told, at):
    """Under a budget pack waits, and it is then that earlier graphs are seen to be gone."""
    first = pack(told, clock, 101)
    begin = clock.at(102)
    at(105).freed(0)
    told.stalls = [(begin, clock.at(106))]
    second = pack(told, clock, 106.5)
    trace = told.trace(clock.at(107))
    assert [s.freed_s for s in trace.storages] == [2, 3]
    assert [s.packed_s for s in trace.storages] == [1, 2.5]
    assert trace.end_s == 3
    del first, second


def test_what_outlives_the_pass_lives_until_its_end(clock, told, at):
    held = pack(told, clock, 101), pack(told, clock, 102)
    end = clock.at(105)
    at(109).wanted(1)
    told.freed(0)
    assert [(s.wanted_s, s.freed_s) for s in told.trace(end).storages] == [(None, 5), (5, 5)]
    assert len(held) == 2


def test_only_the_first_unpack_and_the_first_death_count(clock, told, at):
    held = pack(told, clock, 101)
    for now_s in (102, 103):
        at(now_s).wanted(0)
    for now_s in (104, 105):
        at(now_s).freed(0)
    trace = told.trace(clock.at(106))
    assert trace.order == (0,)
    assert (trace.storages[0].wanted_s, trace.storages[0].freed_s) == (2, 4)
    assert held.key.alive()


# -- blocks -----------------------------------------------------------------------------------------------------------


def test_backward_of_a_block_ends_where_the_next_one_begins(clock, told, at):
    held = [pack(told, clock, 101)]
    for number, name in enumerate(("a", "b", "a")):
        at(102 + 4 * number).block_enters(name, recompute=number == 1)
        told.block_inputs(10 * number)
        held += [pack(told, clock, 103 + 4 * number), pack(told, clock, 104 + 4 * number)]
        at(105 + 4 * number).block_leaves()
    held.append(pack(told, clock, 114))
    told.forward_ended()
    assert len(held) == 8
    for now_s, index in ((115, 7), (116, 5), (117, 6), (118, 4), (119, 3), (122, 1), (123, 2), (124, 0)):
        at(now_s).wanted(index)
    told.stalls = [(120, 121)]
    trace = told.trace(clock.at(126))
    assert [s.block for s in trace.storages] == [-1, 0, 0, 1, 1, 2, 2, -1]
    assert [(b.name, b.forward_start_s, b.forward_end_s) for b in trace.blocks] == [
        ("a", 2, 5),
        ("b", 6, 9),
        ("a", 10, 13),
    ]
    assert [(b.backward_start_s, b.backward_end_s) for b in trace.blocks] == [(21, 25), (18, 21), (16, 18)]
    assert [b.input_nbytes for b in trace.blocks] == [0, 10, 20]
    assert trace.recomputed == {1}


def test_a_block_that_backward_never_reached_takes_no_time(clock, told):
    for name in ("a", "b"):
        told.block_enters(name, recompute=False)
        told.block_leaves()
    block = told.trace(clock.at(103)).blocks[0]
    assert (block.backward_start_s, block.backward_end_s) == (3, 3)


# -- with a real model ------------------------------------------------------------------------------------------------

WIDTH, ROWS, DEPTH = 64, 32, 3
ACTIVATION_NBYTES = ROWS * WIDTH * 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        inner = self.up(x)  # this variable lives until the end of the block
        active = torch.nn.functional.gelu(inner)
        return x + torch.tanh(self.down(active))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.fixture
def offloader(tmp_path):
    with offloader_in(tmp_path, min_tensor_bytes=4096, recompute_modules="blocks") as offloader:
        yield offloader


def step(offloader, net, x):
    passed(offloader, lambda: net(x))


def test_the_trace_of_a_real_pass(offloader):
    torch.manual_seed(0)
    net, x = Net(), torch.randn(ROWS, WIDTH)
    offloader.register_module(net)
    step(offloader, net, x)
    trace = offloader.trace
    # Input, inner, active and tanh of each block, where a block's output is the next one's input; and the last output.
    per_block = [ACTIVATION_NBYTES, 2 * ACTIVATION_NBYTES, 2 * ACTIVATION_NBYTES, ACTIVATION_NBYTES]
    assert [s.nbytes for s in trace.storages] == [*per_block * DEPTH, ACTIVATION_NBYTES]
    assert [s.block for s in trace.storages] == [0] * 4 + [1] * 4 + [2] * 4 + [-1]
    assert sorted(trace.order) == list(range(13))
    assert trace.order[0] == 12
    for one in trace.storages:
        assert one.wanted_s is not None
        assert 0 <= one.packed_s <= one.last_used_s <= one.freed_s <= trace.end_s
        assert one.packed_s < trace.forward_end_s <= one.wanted_s <= one.freed_s
    # Ours of the caller is held all along; the next blocks' inputs are not.
    assert [s.movable for s in trace.storages] == [False] + [True] * 12
    for first in (0, 4, 8):
        _, inner, active, tanh = trace.storages[first : first + 4]
        assert inner.last_used_s > tanh.packed_s, "its variable lives until the block returns"
        assert active.last_used_s > tanh.packed_s
    assert trace.saved_peak_bytes == sum(s.nbytes for s in trace.storages)
    assert trace.other_peak_bytes > 0
    assert trace.recomputed == frozenset()


def test_a_pass_is_read_one_pass_later_where_the_device_lags(tmp_path, monkeypatch):
    """The device is through with a pass when the next one begins, not earlier."""

    class Lagging(HostClock):
        lag = 1
        passed: float = 0.0

        @classmethod
        def has_passed(cls, stamp):
            return stamp <= cls.passed

        @classmethod
        def seconds(cls, start, end):
            assert max(start, end) <= cls.passed, "the host would wait for the device"
            return end - start

    monkeypatch.setattr(tensor_cache, "clock_of", lambda device: Lagging())
    with offloader_in(tmp_path, min_tensor_bytes=4096) as offloader:
        net, x = Net(), torch.randn(ROWS, WIDTH)
        offloader.register_module(net)
        step(offloader, net, x)
        assert offloader.trace is None, "the device may still be at it"
        for _ in range(8):
            Lagging.passed = Lagging.stamp()
            step(offloader, net, x)
            assert offloader.trace is not None
            offloader.wait_for_plan()
        assert offloader.plan_report.measured_step_s > 0


# -- who holds what ---------------------------------------------------------------------------------------------------


def test_a_variable_of_forward_holds_a_storage_until_it_goes(clock, told, at):
    first = pack(told, clock, 101, held=True)
    others = [pack(told, clock, 102), pack(told, clock, 103)]
    first.variable = None
    others.append(pack(told, clock, 104))
    at(105).forward_ended()
    trace = told.trace(clock.at(106))
    assert [s.last_used_s for s in trace.storages] == [4, 3, 4, 5]
    assert all(s.movable for s in trace.storages)


def test_what_is_never_released_is_not_movable(clock, told, at):
    held = pack(told, clock, 101, held=True), pack(told, clock, 102)
    at(103).forward_ended()
    at(104).wanted(0)
    assert [s.movable for s in told.trace(clock.at(105)).storages] == [False, True]
    assert held[0].variable is not None


def test_what_is_released_between_forward_and_backward_is_seen_when_it_is_wanted(clock, told, at):
    loss = pack(told, clock, 101, held=True)
    at(102).forward_ended()
    loss.variable = None
    at(104).wanted(0)
    (storage,) = told.trace(clock.at(105)).storages
    assert (storage.movable, storage.last_used_s, storage.wanted_s) == (True, 4, 4)


def test_several_objects_of_ours_over_one_storage_are_one_holder(clock, told, at):
    one = saved()
    again, once_more = one.variable.untyped_storage(), one.key.resolve()
    second_key = StorageKey(again)
    told.packed(NBYTES, one.key)
    one.variable = None
    at(101).forward_ended()
    (storage,) = told.trace(clock.at(102)).storages
    assert (storage.movable, storage.last_used_s) == (True, 1)
    assert once_more is not None
    assert second_key.alive()


def test_memory_that_another_thread_has_dropped_counts_as_released(clock, told, at):
    first = pack(told, clock, 101)

    at_once(lambda: setattr(first, "ours", None))
    assert not first.key.alive()
    second = pack(told, clock, 102)
    at(103).wanted(0)
    (storage, _) = told.trace(clock.at(104)).storages
    assert (storage.movable, storage.last_used_s) == (True, 2)
    assert second.key.alive()


def test_a_recycled_address_names_nobody_else(clock, told, at):
    """The structs of storages are recycled at once; a key keeps its own one from that."""
    gone = [pack(told, clock, 101) for _ in range(50)]
    for one in gone:
        one.ours = None
    later = [pack(told, clock, 102, held=True) for _ in range(50)]
    assert len({one.key.cdata for one in (*gone, *later)}) == 100
    at(103).forward_ended()
    assert [s.movable for s in told.trace(clock.at(104)).storages] == [True] * 50 + [False] * 50


def test_many_held_storages_are_looked_at_in_turns(clock, told, at):
    held = [pack(told, clock, 101, held=True) for _ in range(100)]
    for one in held:
        one.variable = None
    later = [pack(told, clock, 102 + index) for index in range(10)]
    at(150).forward_ended()
    released = Counter(s.last_used_s for s in told.trace(clock.at(200)).storages[:100])
    # Those of ours that came later take turns too, and go at their first.
    assert released[2] == released[3] == 4
    assert sum(released.values()) == 100
    assert max(released) == 50, "at the end of forward all are looked at"
    assert len(later) == 10


def test_other_memory_at_its_worst_moment(clock, monkeypatch):
    monkeypatch.setattr(recorder, "_SAMPLE_S", 0.0)  # look each time
    levels = iter([50, 90, 70])
    told = Recorder(clock, lambda: next(levels), now=clock.stamp)
    held = [saved() for _ in range(2)]
    for one, resident_bytes in zip(held, (10, 20), strict=True):
        told.packed(NBYTES, one.key, resident_bytes)
    told.wanted(0, 30)
    assert told.trace(clock.at(101)).other_peak_bytes == 70


def test_asking_for_memory_takes_a_hundredth_of_the_pass(clock):
    """On a device the allocator's numbers take longer than all else that is recorded of a storage."""
    asked = []

    def level():
        asked.append(clock.now_s)
        clock.at(clock.now_s + 0.01)
        return 0

    told = Recorder(clock, level, now=clock.stamp)
    held = [saved() for _ in range(1000)]
    for one in held:
        told.packed(NBYTES, one.key)
        clock.at(clock.now_s + 0.01)
    assert 9 <= len(asked) <= 11
    assert min(b - a for a, b in itertools.pairwise(asked)) >= 1.0
