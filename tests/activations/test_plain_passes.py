"""A pass that keeps everything, and of which nothing could be learnt, runs without hooks: as plain PyTorch does."""

import time
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from lightning_ssd import _assembly
from lightning_ssd.activations import live_passes, tensor_cache
from lightning_ssd.memory.heap_policy import HeapPolicy
from lightning_ssd.planning.plan import Machine, TierRates
from tests.support.helpers import meaning_of
from tests.support.opened import offloader_in
from tests.support.sines import gradient_of_sines, sines

NBYTES = 64 * 64 * 4
NO_DRIVE = Machine()
FAST = Machine(ssd=TierRates(write_bytes_per_s=1e15, read_bytes_per_s=1e15))


def offloader(directory, activations="keep", **policy):
    return offloader_in(directory, activations=activations, min_tensor_bytes=0, **policy)


@pytest.fixture(autouse=True)
def _no_free_heap(monkeypatch):
    """What this process' malloc holds would count beside the numbers that these tests say are available."""
    monkeypatch.setattr(HeapPolicy, "free_bytes", lambda self: 0)


def has_hooks():
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def leaf(side=64):
    return torch.rand(side, side, generator=torch.Generator().manual_seed(0)).requires_grad_()


def step(opened, signature="kind", *, length=4, side=64, between=lambda: None):
    """Returns whether it had hooks; its gradient is that of plain PyTorch."""
    x = leaf(side)
    with opened.saved_tensors(signature=signature):
        hooked = has_hooks()
        loss = sines(x, length, between).sum()
    loss.backward()
    opened.end_backward()
    opened.wait_for_plan()
    assert torch.equal(x.grad, gradient_of_sines(x, length))
    return hooked


def scheduler_of(opened, machine=NO_DRIVE):
    """That plans for this machine: without a drive, plans keep everything."""
    scheduler = opened._parts.scheduler
    scheduler._measure = lambda: machine
    return scheduler


def only_kind(opened):
    (kind,) = opened._parts.scheduler._kinds.values()
    return kind


def come_to_rest(opened):
    scheduler_of(opened)
    assert [step(opened) for _ in range(5)] == [True, True, False, False, False]


def test_keeping_counts_one_pass_of_each_kind(tmp_path):
    with offloader(tmp_path) as opened:
        assert [step(opened) for _ in range(3)] == [True, False, False]
        assert [step(opened, "other", length=6) for _ in range(2)] == [True, False]
        stats = opened.stats
        assert stats.saved_peak_bytes == stats.resident_peak_bytes == 6 * NBYTES
        assert stats.bytes_saved == stats.bytes_kept == 10 * NBYTES
        assert stats.num_plain_passes == 3
        opened.reset_peaks()
        assert step(opened)
        assert opened.stats.saved_peak_bytes == 4 * NBYTES


def test_without_a_signature_nobody_knows_what_is_alike(tmp_path):
    with offloader(tmp_path) as opened:
        assert all(step(opened, None) for _ in range(4))


@pytest.mark.parametrize("activations", ["keep", "auto"])
def test_where_nothing_is_large_nothing_is_looked_at(activations, tmp_path):
    with offloader_in(tmp_path, activations=activations) as opened:
        assert [step(opened) for _ in range(4)] == [True, False, False, False]


@pytest.mark.parametrize("activations", ["offload", "recompute", "recompute_offload"])
def test_what_may_move_always_has_hooks(activations, tmp_path):
    with offloader(tmp_path, activations) as opened:
        assert all(step(opened) for _ in range(4))


def test_planned_passes_that_keep_everything_pay_nothing(tmp_path, monkeypatch):
    """Peaks begin anew after the pass that moved: they have not seen yet what keeping holds."""
    monkeypatch.setattr(tensor_cache, "available_bytes", lambda device: 1 << 30)
    with offloader(tmp_path, "auto") as opened:
        scheduler_of(opened)
        assert step(opened)
        assert opened.stats.bytes_written + opened.stats.writes_cancelled_bytes + opened.stats.bytes_forwarded > 0
        opened.reset_peaks()
        assert [step(opened) for _ in range(4)] == [True, False, False, False]
        assert opened.stats.resident_peak_bytes == 4 * NBYTES
        assert opened.stats.num_plain_passes == 3


@pytest.mark.parametrize(
    ("has_pages", "policy", "moves"),
    [
        (True, {}, True),
        (False, {}, False),
        (False, {"max_slowdown": 1.06}, True),
        (False, {"activation_budget": "6MiB"}, True),
    ],
)
def test_without_whole_pages_the_default_moves_only_what_memory_asks_for(
    has_pages, policy, moves, tmp_path, monkeypatch
):
    monkeypatch.setattr(_assembly, "has_whole_pages", lambda: has_pages)
    monkeypatch.setattr(tensor_cache, "available_bytes", lambda device: 1 << 30)
    with offloader(tmp_path, "auto", **policy) as opened:
        # Moving costs 2 % of a step here, however busy the machine.
        cheap = replace(FAST, cost_s_per_byte=1e-9)
        monkeypatch.setattr(opened._parts.scheduler, "_own_machine", lambda kind: cheap)
        for _ in range(3):
            step(opened, length=8, side=512, between=lambda: time.sleep(0.05))  # writes end before backward
        assert (opened.plan_report.moved_bytes > 0) is moves


def test_after_a_rest_a_plan_is_made_anew(tmp_path, monkeypatch):
    """From the same trace, in case moving has become cheaper meanwhile; the next rest is twice as long."""
    monkeypatch.setattr(tensor_cache, "available_bytes", lambda device: 1 << 30)
    with offloader(tmp_path, "auto", max_slowdown=50.0) as opened:
        come_to_rest(opened)
        kind = only_kind(opened)
        kind.model.excess = 60.0
        scheduler_of(opened, FAST)
        while kind.rests:
            assert opened.stats.num_plain_passes < 64
            step(opened)
        assert opened.stats.num_plain_passes > 50
        assert kind.model.excess == 0
        assert kind._num_to_rest == 128
        before = opened.stats
        assert step(opened)
        assert opened.stats.bytes_saved - before.bytes_saved == 4 * NBYTES
        assert opened.stats.bytes_kept - before.bytes_kept < 4 * NBYTES


@pytest.mark.parametrize("free", [16, 17])
def test_little_room_needs_hooks(free, tmp_path, monkeypatch):
    """A pass may save more than the last one did; with hooks it moves what does not fit."""
    monkeypatch.setattr(tensor_cache, "available_bytes", lambda device: free * NBYTES)
    with offloader(tmp_path, "auto") as opened:
        scheduler = scheduler_of(opened)
        assert [step(opened) for _ in range(2)] == [True, True]
        room = scheduler._limits.look(0, free * NBYTES)
        assert step(opened) is (room < 2 * 4 * NBYTES)


def test_room_that_becomes_less_is_seen_once_what_is_known_is_old(tmp_path, monkeypatch):
    free = [1 << 30]
    monkeypatch.setattr(tensor_cache, "available_bytes", lambda device: free[0])
    monkeypatch.setattr(live_passes, "_FRESH_S", 60.0)
    with offloader(tmp_path, "auto") as opened:
        come_to_rest(opened)
        free[0] = 4 * NBYTES
        assert not step(opened)
        monkeypatch.setattr(live_passes, "_FRESH_S", 0.0)
        assert step(opened)


def test_weights_that_come_meanwhile_are_known_to_the_next_pass_with_hooks(tmp_path):
    with offloader(tmp_path) as opened:
        module = torch.nn.Linear(64, 64, bias=False)
        opened.register_module(module)
        for _ in range(3):
            with opened.saved_tensors(signature="kind"):
                loss = module(leaf()).sum()
            loss.backward()
            opened.end_backward()
            module.weight = torch.nn.Parameter(torch.rand(64, 64))
        opened.reset_peaks()
        before = opened.stats.num_kept_parameters
        with opened.saved_tensors(signature="kind"):
            assert has_hooks()
            # a view of the weight that nobody could know by itself
            loss = (leaf() * module.weight.data.t()).sum()
        loss.backward()
        opened.end_backward()
        assert opened.stats.num_kept_parameters - before == 1


@pytest.mark.parametrize("activations", ["keep", "auto"])
@pytest.mark.parametrize("how", ["raises", "no gradients"])
def test_a_forward_that_saved_nothing_by_chance_teaches_nothing(how, activations, tmp_path):
    with offloader(tmp_path, activations) as opened:
        for _ in range(2):
            with suppress(ZeroDivisionError), opened.saved_tensors(signature="kind"):
                if how == "raises":
                    raise ZeroDivisionError
                with torch.no_grad():
                    sines(leaf(), 4)
            opened.end_backward()
        assert step(opened)


def test_memory_is_asked_for_while_a_pass_without_hooks_is_alive(tmp_path, monkeypatch):
    """What it has saved is counted nowhere else."""
    free = [1 << 30]
    monkeypatch.setattr(tensor_cache, "available_bytes", lambda device: free[0])
    monkeypatch.setattr(live_passes, "_FRESH_S", 60.0)
    with offloader(tmp_path, "auto") as opened:
        come_to_rest(opened)
        losses, hooked = [], []
        for room in (1 << 30, 1 << 30, 4 * NBYTES):
            free[0] = room
            with opened.saved_tensors(signature="kind"):
                hooked.append(has_hooks())
                losses.append(sines(leaf(), 4).sum())
        assert hooked == [False, False, True]
        sum(losses).backward()
        opened.end_backward()


@pytest.mark.parametrize("activations", ["keep", "auto", "offload"])
def test_a_context_is_good_for_one_pass(activations, tmp_path):
    with offloader(tmp_path, activations) as opened:
        for _ in range(2):  # the second one without tensor_cache, where everything is kept
            context = opened.saved_tensors(signature="kind")
            with context:
                loss = sines(leaf(), 4).sum()
            with context:  # two forwards of one pass
                loss = loss + sines(leaf(), 4).sum()
            loss.backward()
            opened.end_backward()
            with pytest.raises(RuntimeError, match="entered before"), context:
                pass
        assert isinstance(step(opened), bool)


def test_a_budget_needs_hooks(tmp_path):
    with offloader(tmp_path, "auto", activation_budget="1GiB") as opened:
        assert all(step(opened) for _ in range(4))


def test_edits_are_seen_by_pytorch_itself(tmp_path):
    messages = []
    with offloader(tmp_path) as opened:
        for _ in range(2):
            step(opened)
            with opened.saved_tensors(signature="kind"):
                y = leaf().exp()
                y.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
                y.sum().backward()
            messages.append(str(caught.value))
    assert meaning_of(messages[0]) == meaning_of(messages[1])
