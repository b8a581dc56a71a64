"""How much of an optimizer's states is in memory: a small part, what host memory is given for, and no more."""

import time

import pytest
import torch

from lightning_ssd.optimizer.step.elementwise import UpdateProbe
from lightning_ssd.planning import update_memory
from tests.support.opened import offloader_in
from tests.support.optimizer_pairs import Pair, files_of, partition_of, store_of, wrapped
from tests.support.state_stores import mapped_bytes

pytestmark = pytest.mark.usefixtures("small_subgroups")

SHAPES = ((64, 1024),) * 40
STATE_BYTES = 2 * 4 * 64 * 1024 * 40  # of AdamW


def test_states_move_in_the_update_alone(spill_dir):
    """So they never wait for activations at a drive, nor these for them: each has queues of its own."""
    pair, backends = Pair(torch.optim.AdamW, SHAPES), []
    with wrapped(pair.inner, spill_dir, faults=backends) as optimizer:
        for backend in backends:
            backend.delay_s = 0.02
        for _ in range(3):
            pair.set_gradients()
            optimizer.step()
            moved = store_of(optimizer).tier.progress()
            time.sleep(0.1)
            assert store_of(optimizer).tier.progress() == moved, "something moved behind the update"
        assert moved.read_bytes > STATE_BYTES


@pytest.mark.parametrize("share", [0.25, 1.5, 4.0])
def test_optimizers_share_host_memory(share, spill_dir):
    """The first one takes what it can use, the second one what is left; the activations' tier the rest."""
    pairs = [Pair(torch.optim.AdamW, SHAPES) for _ in range(2)]
    total = round(share * STATE_BYTES)
    with offloader_in(spill_dir, optimizer_states="offload", host_memory=total) as offloader:
        optimizers = [offloader.offload_optimizer(pair.inner) for pair in pairs]
        for _ in range(3):
            for pair, optimizer in zip(pairs, optimizers, strict=True):
                pair.step(optimizer)
        host = offloader._parts.tiers.host
        num_own, mapped = 0, 0
        for optimizer in optimizers:
            store, subgroup = store_of(optimizer), optimizer.stats.subgroup_bytes
            store.wait_for_writes()
            num_own += update_memory.NUM_SLOTS
            mapped += mapped_bytes(store)
            assert store.num_slots <= optimizer.stats.num_subgroups
        assert mapped <= total + num_own * subgroup
        assert mapped >= min(total, 2 * STATE_BYTES) - 2 * subgroup, "host memory was there and is not used"
        first, second = (optimizer.stats.kept_bytes for optimizer in optimizers)
        assert first >= second
        taken = sum(files_of(optimizer).share.nbytes for optimizer in optimizers)
        assert host.capacity_bytes == total // 4096 * 4096 - taken
        host_budget = host.arena._share.host_budget
    assert host_budget.left_bytes == host_budget.total_bytes


def test_parameters_that_come_later_may_stay_in_host_memory_too(spill_dir):
    pair = Pair(lambda parameters: torch.optim.AdamW(parameters[:10]), SHAPES)
    with wrapped(pair.inner, spill_dir, host_memory="1GiB") as optimizer:
        before = store_of(optimizer).num_slots
        optimizer.add_param_group({"params": pair.mine[10:]})
        pair.twin.add_param_group({"params": pair.plain[10:]})
        assert store_of(optimizer).num_slots > before
        pair.train(optimizer, 3)
        assert optimizer.stats.read_bytes == 0, "there was room for all"
    pair.check()


def test_slots_that_turn_out_larger_are_fewer(spill_dir, monkeypatch):
    """A trial may tell less than what an optimizer then remembers."""
    monkeypatch.setattr(UpdateProbe, "element_bytes", lambda *_: 2)
    pair = Pair(torch.optim.AdamW, SHAPES)
    with wrapped(pair.inner, spill_dir, host_memory="2MiB") as optimizer:
        before = store_of(optimizer).num_slots
        pair.train(optimizer, 3)
        store = store_of(optimizer)
        store.wait_for_writes()
        assert store.num_slots < before
        largest = max(s.layout.nbytes for s in partition_of(optimizer).subgroups if s.layout is not None)
        assert mapped_bytes(store) <= (2 << 20) + update_memory.NUM_SLOTS * largest
        pair.check()


def test_the_slots_of_all_directories_together_have_a_cap():
    states = 1 << 40
    for num, expected in ((1, 256 << 20), (2, 256 << 20), (8, 64 << 20), (16, 32 << 20)):
        assert update_memory.subgroup_bytes(states, num) == expected
        assert update_memory.NUM_SLOTS * num * expected <= 2 << 30
