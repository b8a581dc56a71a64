"""Overhead by cause: what is charged, what is learnt of it, and what a simulated machine then does for 100 passes."""

import random
from dataclasses import dataclass, replace

import pytest

from lightning_ssd.planning.placement import Placement
from lightning_ssd.planning.plan import Machine, TierRates
from lightning_ssd.planning.trace import Trace
from lightning_ssd.scheduling import drift
from lightning_ssd.scheduling.clock import HostClock
from lightning_ssd.scheduling.memory_limits import MemoryConstraints
from lightning_ssd.scheduling.overhead import CpuCosts, Overhead, OverheadModel
from lightning_ssd.scheduling.pass_kind import FinishedPass
from lightning_ssd.scheduling.scheduler import Scheduler
from tests.support.fake_passes import FakeRecorder, machine_of, opened, planned
from tests.support.pairs import pairwise
from tests.support.traces import network, simulate

# -- the account ------------------------------------------------------------------------------------------------------


def test_overhead_is_relative_to_the_pass_without_it():
    overhead = Overhead(stall_s=0.01, hook_s=0.02, cpu_s=0.02)
    assert overhead.total_s == pytest.approx(0.05)
    assert overhead.ratio(1.05) == pytest.approx(0.05)
    assert Overhead(stall_s=5.0).ratio(1.0) == pytest.approx(50.0), "never below a tenth of the pass"
    assert Overhead().ratio(0.0) == 0.0


def test_page_faults_are_charged_where_plain_training_has_few():
    costs = CpuCosts(mapping_s_per_byte=1e-6 / 4096, num_threads=2, has_spare_cores=False)
    assert costs.seconds(worker_s=0.0, num_faults=100) == pytest.approx(50e-6)
    assert replace(costs, mapping_s_per_byte=0.0).seconds(worker_s=0.0, num_faults=100) == 0.0
    assert costs.mapping_s_per_moved_byte == pytest.approx(1.5e-6 / 4096), "three pages for each that leaves"
    assert costs.seconds(worker_s=1.0, num_faults=0) == 0.5
    assert replace(costs, has_spare_cores=True).seconds(worker_s=1.0, num_faults=0) == 0.0


def test_costs_are_lower_quartiles_and_excess_is_stalls_that_no_prediction_knows():
    model = OverheadModel()
    model.moved(Overhead(hook_s=0.02), 100, is_recorded=True)
    assert model.cost_s_per_byte(1e-4) == pytest.approx(3e-4), "a guess of hooks, and one of the rest"
    for hook_s in (0.04, 0.04, 9.0):
        model.moved(Overhead(hook_s=hook_s), 100, is_recorded=False)
    model.moved(Overhead(hook_s=9.0), 100, is_recorded=True)
    model.followed(Overhead(hook_s=0.04, cpu_s=0.01), step_s=1.0, moved_bytes=100, predicted_stall=0.0)
    assert model.cost_s_per_byte(1.0) == pytest.approx(5e-4), "without hiccups and recorded passes"
    assert model.excess == 0.0, "hooks and CPU are in the cost"
    model.followed(Overhead(stall_s=0.2, cpu_s=0.01), step_s=1.2, moved_bytes=100, predicted_stall=0.05)
    assert model.excess == pytest.approx(0.075), "half of the way to 0.15"
    for _ in range(100):
        model.followed(Overhead(cpu_s=0.01), step_s=1.0, moved_bytes=100, predicted_stall=0.05)
    assert model.excess == pytest.approx(0.0, abs=1e-3)
    model.moved(Overhead(hook_s=9.0), 0, is_recorded=False)
    model.followed(Overhead(stall_s=0.9, cpu_s=9.0), step_s=1.0, moved_bytes=0, predicted_stall=0.0)
    assert model.excess == pytest.approx(0.0, abs=1e-3), "a pass that moves nothing teaches nothing"
    assert model.cost_s_per_byte(1.0) == pytest.approx(5e-4)
    model.forget()
    assert model.cost_s_per_byte(1e-4) == pytest.approx(2e-4)


# -- a machine --------------------------------------------------------------------------------------------------------

GB = 1_000_000_000


@dataclass
class World:
    """What a pass really does, as the simulator plays it with rates and costs that the scheduler has to find out."""

    trace: Trace
    real: Machine
    guessed: Machine
    hook_s: float = 0.0
    """Per moved storage."""
    noise: float = 0.0
    """Of the whole pass, up or down, which is no overhead."""
    cpu_s_per_byte: float = 0.0
    disturbance_s: float = 0.0
    """At most, in workers, whatever moves: other programs, a hypervisor."""
    seed: int = 1

    def __post_init__(self):
        self.overheads = []
        self.peaks = []
        self.moved = []
        self.predicted = []
        self._random = random.Random(self.seed)
        self.scheduler = Scheduler(MemoryConstraints(max_slowdown=1.05), lambda: self.guessed)

    def run(self, passes):
        try:
            for _ in range(passes):
                self._pass()
        finally:
            self.scheduler.close()

    def _placement(self, wanted, nbytes, host_bytes):
        host = self.real.host
        if wanted is Placement.HOST and (host is None or host_bytes + nbytes > (host.capacity_bytes or 0)):
            return Placement.SSD
        return wanted

    def _pass(self):
        sizes = tuple(storage.nbytes for storage in self.trace.storages)
        cursor, wants_trace = self.scheduler.cursor("a", level_bytes=0, available_bytes=1 << 40)
        placements, host_bytes = [], 0
        for nbytes in sizes:
            placements.append(self._placement(cursor.place(nbytes), nbytes, host_bytes))
            host_bytes += nbytes * (placements[-1] is Placement.HOST)
        known = cursor.completed()
        ahead = 4 * max(sizes) if known is None else known.plan.ahead_bytes
        played = simulate(self.trace, placements, self.real, limit_bytes=None, ahead_bytes=ahead).prediction
        num_moved = sum(placement is not Placement.KEEP for placement in placements)
        hook_s, stall_s = num_moved * self.hook_s, played.stall_s
        moved = played.written_bytes + played.host_bytes
        cpu_s = self.cpu_s_per_byte * moved + (self._random.uniform(0.0, self.disturbance_s) if moved else 0.0)
        factor = 1 + self._random.uniform(-self.noise, self.noise)
        step_s = self.trace.end_s * factor + hook_s + stall_s + cpu_s
        self.overheads.append(Overhead(stall_s=stall_s, hook_s=hook_s, cpu_s=cpu_s).ratio(step_s))
        self.peaks.append(played.peak_bytes)
        self.moved.append(moved)
        self.predicted.append(None if known is None else known.predicted_overhead)
        recorded = stretched(self.trace, (self.trace.end_s * factor + hook_s + cpu_s) / self.trace.end_s)
        self.scheduler.observe(
            FinishedPass(
                signature="a",
                sizes=sizes,
                cursor=cursor,
                recorder=FakeRecorder(recorded, hook_s) if wants_trace else None,
                clock=HostClock(),
                begin=0.0,
                end=step_s,
                level_bytes=0,
                stalls=((0.0, stall_s),),
                hook_s=hook_s,
                cpu_s=cpu_s,
                peak_bytes=played.peak_bytes,
                written_bytes=played.written_bytes,
                read_bytes=played.read_bytes,
                moved_bytes=moved,
            )
        )
        self.scheduler.border()
        self.scheduler.wait()


def stretched(trace, factor):
    storages = tuple(
        replace(
            one,
            packed_s=factor * one.packed_s,
            last_used_s=factor * one.last_used_s,
            wanted_s=None if one.wanted_s is None else factor * one.wanted_s,
            freed_s=factor * one.freed_s,
        )
        for one in trace.storages
    )
    return replace(trace, storages=storages, forward_end_s=factor * trace.forward_end_s, end_s=factor * trace.end_s)


def transformer(*, step_s, saved_bytes, count):
    return network(1, count, nbytes=saved_bytes // count, forward_s=step_s / 3, backward_s=2 * step_s / 3)


def rates(gb_per_s, capacity_bytes=None):
    return TierRates(write_bytes_per_s=gb_per_s * GB, read_bytes_per_s=gb_per_s * GB, capacity_bytes=capacity_bytes)


@pairwise("noise, drive_gb_per_s, host_gb", [0.0, 0.2], [3.0, 30.0], [0, 4])
def test_a_device_keeps_its_promise_for_a_hundred_passes(noise, drive_gb_per_s, host_gb):
    """50 ms a pass, 6.6 GB saved: 130 GB/s, of which a drive takes a few per cent and a host link of 50 GB/s more."""
    host = rates(50.0, host_gb * GB) if host_gb else None
    real = Machine(ssd=rates(drive_gb_per_s), host=host)
    trace = transformer(step_s=0.05, saved_bytes=6_600_000_000, count=240)
    world = World(trace, real, real, hook_s=30e-6, noise=noise)
    world.run(100)
    assert max(world.overheads[3:64]) <= 0.05
    assert sum(world.overheads[3:]) / 97 <= 0.05
    most = 0.05 + (drift._MIN_EXCESS if noise else 0.0)  # beyond which a plan in force is exchanged
    assert sum(overhead > most for overhead in world.overheads[64:]) <= 4, "moving is tried again after a rest"
    if noise == 0.0:
        assert len(set(world.moved[4:60])) == 1, "settled"
        for predicted, measured in zip(world.predicted[3:60], world.overheads[3:60], strict=True):
            assert predicted is not None
            assert abs(predicted - measured) <= 0.02


def test_where_nothing_can_be_hidden_nothing_moves_within_four_passes():
    trace = transformer(step_s=0.05, saved_bytes=6_600_000_000, count=240)
    slow = Machine(ssd=rates(0.2))
    world = World(trace, slow, slow, hook_s=30e-6)
    world.run(60)
    assert world.moved[0] > 0, "the first pass moves, and waits for nothing"
    assert world.moved[4:] == [0] * 56
    assert world.overheads[4:] == [0.0] * 56


def test_what_moves_is_tried_again_after_a_while():
    """The machine was busy when moving was given up."""
    trace = transformer(step_s=1.0, saved_bytes=GB, count=50)
    world = World(trace, Machine(ssd=rates(2.0)), Machine(ssd=rates(2.0)), hook_s=0.01)
    world.run(20)
    assert world.moved[5:] == [0] * 15
    world = World(trace, Machine(ssd=rates(2.0)), Machine(ssd=rates(2.0)), hook_s=0.01)
    for number in range(200):
        world.hook_s = 0.01 if number < 20 else 0.0
        world._pass()
    world.scheduler.close()
    assert world.moved[60] == 0
    assert world.moved[199] > 0
    assert max(world.overheads[70:]) <= 0.05


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_disturbances_do_not_shrink_plans_until_nothing_moves(seed):
    """They do not follow the bytes, so that each smaller plan seems dearer per byte than the one before it."""
    trace = transformer(step_s=1.5, saved_bytes=GB, count=50)
    machine = Machine(ssd=rates(3.0))
    world = World(trace, machine, machine, cpu_s_per_byte=0.03 / GB, disturbance_s=0.15, noise=0.1, seed=seed)
    world.run(60)
    assert min(world.moved) > 0.4 * GB


@pytest.mark.parametrize("too_fast", [1.0, 4.0])
def test_a_drive_that_is_slower_than_it_seems_is_given_less(too_fast):
    trace = transformer(step_s=1.0, saved_bytes=GB, count=50)
    world = World(trace, Machine(ssd=rates(2.0)), Machine(ssd=rates(too_fast * 2.0)))
    world.run(40)
    assert max(world.overheads[20:]) <= 0.05
    assert world.moved[-1] > 0


@pytest.mark.parametrize("wear", [None, 1 << 20])
def test_sizes_that_never_come_again_do_not_move_for_ever(wear):
    """As with padding per batch: each pass is the first of its shape."""
    machine = machine_of(Machine(ssd=rates(3.0)))
    with opened(machine=machine, max_slowdown=1.05, wear_bytes_per_day=wear) as made:
        for number in range(20):
            trace = transformer(step_s=0.05, saved_bytes=(40 + number) << 20, count=20)
            planned(made, trace, available_bytes=1 << 40)
            again = made.cursor("a", level_bytes=0, available_bytes=1 << 40)[0]
            places = {again.place(number + 1) for _ in range(20)}
            if wear is not None or number >= 7:
                assert places == {Placement.KEEP}, number
            else:
                assert Placement.HOST in places, number
