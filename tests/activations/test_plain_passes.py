"""A pass that keeps everything, and of which nothing could be learnt, runs without hooks: as plain PyTorch does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.activations import live_passes, tensor_cache
from lightning_ssd.memory.heap_policy import HeapPolicy
from lightning_ssd.scheduling.move_search import NUM_KEPT, MoveSearch
from lightning_ssd.scheduling.pass_kind import PassKind
from lightning_ssd.scheduling.search_phase import Phase
from lightning_ssd.scheduling.tracing import Tracing

NBYTES = 64 * 64 * 4


@contextmanager
def offloader(directory: Path, activations: str = "keep", **policy: Any) -> Iterator[Offloader]:
    constraints = OffloadPolicy(activations=activations, min_tensor_bytes=0, **policy)  # type: ignore[arg-type]
    with Offloader(
        policy=constraints, hardware=HardwareProfile(paths=[directory], allow_unsuitable_paths=True)
    ) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _no_free_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process' malloc holds would count beside the numbers that these tests say are available."""
    monkeypatch.setattr(HeapPolicy, "free_bytes", lambda self: 0)


def has_hooks() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def leaf() -> Tensor:
    return torch.rand(64, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()


def program(x: Tensor, length: int) -> Tensor:
    y = x * 1
    for _ in range(length):
        y = y.sin()
    return y.sum()


def step(opened: Offloader, signature: object = "kind", *, length: int = 4) -> bool:
    """Returns whether it had hooks; its gradient is that of plain PyTorch."""
    x, plain = leaf(), leaf()
    with opened.saved_tensors(signature=signature):
        hooked = has_hooks()
        loss = program(x, length)
    loss.backward()
    opened.end_backward()
    opened.wait_for_plan()
    program(plain, length).backward()
    assert x.grad is not None
    assert plain.grad is not None
    assert torch.equal(x.grad, plain.grad)
    return hooked


def only_kind(opened: Offloader) -> PassKind:
    """Of all passes so far."""
    scheduler = opened._parts.scheduler
    assert scheduler is not None
    (kind,) = scheduler._kinds.values()
    return kind


def only_search(opened: Offloader) -> MoveSearch:
    """Of the only kind."""
    search = only_kind(opened).only_search
    assert search is not None
    return search


def test_keeping_counts_one_pass_of_each_kind(tmp_path: Path) -> None:
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


def test_without_a_signature_nobody_knows_what_is_alike(tmp_path: Path) -> None:
    with offloader(tmp_path) as opened:
        assert all(step(opened, None) for _ in range(4))


def test_now_and_then_one_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_passes, "_MAX_PLAIN", 2)
    with offloader(tmp_path) as opened:
        assert [step(opened) for _ in range(7)] == [True, False, False, True, False, False, True]


@pytest.mark.parametrize("activations", ["keep", "auto"])
def test_where_nothing_is_large_nothing_is_looked_at(activations: str, tmp_path: Path) -> None:
    constraints = OffloadPolicy(activations=activations)  # type: ignore[arg-type]
    hardware = HardwareProfile(paths=[tmp_path], allow_unsuitable_paths=True)
    with Offloader(policy=constraints, hardware=hardware) as opened:
        assert [step(opened) for _ in range(4)] == [True, False, False, False]


@pytest.mark.parametrize("activations", ["offload", "recompute", "recompute_offload"])
def test_what_may_move_always_has_hooks(activations: str, tmp_path: Path) -> None:
    with offloader(tmp_path, activations) as opened:
        assert all(step(opened) for _ in range(4))


def test_planned_passes_that_keep_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and the third pass are traced; nothing that is so small is worth moving."""
    monkeypatch.setattr(tensor_cache, "available_bytes", lambda device: 1 << 30)
    with offloader(tmp_path, "auto") as opened:
        hooked = [step(opened) for _ in range(NUM_KEPT)]
        assert hooked == [True, False, True]
        kind = only_kind(opened)
        search = only_search(opened)
        assert not search.keeps, "passes without hooks count, too"
        for known in kind.plans.values():
            moves = known.plan.moves
            assert step(opened) is moves
            assert opened.stats.num_plain_passes == 2 - moves


def test_a_pass_that_keeps_is_counted_although_one_that_moved_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peaks began anew before the pass that moved: they have not seen yet what keeping holds."""
    monkeypatch.setattr(tensor_cache, "available_bytes", lambda device: 1 << 30)
    with offloader(tmp_path, "auto", max_slowdown=50.0) as opened:
        for _ in range(200):
            step(opened)
            if (report := opened.plan_report) is not None and report.measured_written_bytes:
                break
        opened.reset_peaks()
        assert step(opened)
        only_search(opened)._num_to_keep = 3
        assert [step(opened) for _ in range(3)] == [True, False, False]
        assert opened.stats.resident_peak_bytes == 4 * NBYTES


def test_a_kind_that_was_given_up_pays_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_cache, "available_bytes", lambda device: 1 << 30)
    with offloader(tmp_path, "auto", max_slowdown=9.0) as opened:
        for _ in range(NUM_KEPT + 1):
            step(opened)
        search = only_search(opened)
        search._num_to_keep = 5
        assert not any(step(opened) for _ in range(5))
        assert search._num_to_keep == 0


@pytest.mark.parametrize("free", [16, 17])
def test_little_room_needs_hooks(free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass may save more than the last one did; with hooks it moves what does not fit."""
    monkeypatch.setattr(tensor_cache, "available_bytes", lambda device: free * NBYTES)
    with offloader(tmp_path, "auto") as opened:
        step(opened)
        scheduler = opened._parts.scheduler
        assert scheduler is not None
        room = scheduler._limits.look(0, free * NBYTES)
        assert step(opened) is (room < 2 * 4 * NBYTES)


@pytest.mark.parametrize(("fresh_s", "asked"), [(0.0, 4), (60.0, 2)])
def test_memory_is_asked_for_now_and_then(
    fresh_s: float, asked: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With hooks always, and in the first pass without; then only when what is known has become old."""
    calls = []
    monkeypatch.setattr(tensor_cache, "available_bytes", lambda device: calls.append(device) or 1 << 30)
    monkeypatch.setattr(live_passes, "_FRESH_S", fresh_s)
    hardware = HardwareProfile(paths=[tmp_path], allow_unsuitable_paths=True)
    with Offloader(policy=OffloadPolicy(), hardware=hardware) as opened:
        assert [step(opened) for _ in range(4)] == [True, False, False, False]
    assert len(calls) == asked


def test_room_that_becomes_less_is_seen_once_what_is_known_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [1 << 30]
    monkeypatch.setattr(tensor_cache, "available_bytes", lambda device: free[0])
    monkeypatch.setattr(live_passes, "_FRESH_S", 60.0)
    with offloader(tmp_path, "auto") as opened:
        step(opened)
        search = only_search(opened)
        search._num_to_keep = 1 << 20
        assert not any(step(opened) for _ in range(3))
        free[0] = 4 * NBYTES
        assert not step(opened)
        monkeypatch.setattr(live_passes, "_FRESH_S", 0.0)
        assert step(opened)


def test_a_trace_that_is_asked_for_ends_what_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_cache, "available_bytes", lambda device: 1 << 30)
    monkeypatch.setattr(live_passes, "_FRESH_S", 60.0)
    with offloader(tmp_path, "auto") as opened:
        step(opened)
        kind = only_kind(opened)
        search = only_search(opened)
        search._num_to_keep = 1 << 20
        assert not any(step(opened) for _ in range(3))
        kind.ask_for_trace()
        assert step(opened)


def test_weights_that_come_meanwhile_are_known_to_the_next_pass_with_hooks(tmp_path: Path) -> None:
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


def test_a_kind_of_two_lengths_is_counted_pass_by_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without hooks nobody knows which one a pass is of, so that keeping would never end."""
    monkeypatch.setattr(tensor_cache, "available_bytes", lambda device: 1 << 30)
    with offloader(tmp_path, "auto", max_slowdown=50.0) as opened:
        for number in range(40):
            step(opened, length=4 + 2 * (number % 2))
        kind = only_kind(opened)
        assert kind.is_of_many
        assert opened.stats.num_plain_passes <= NUM_KEPT
        assert all(search._num_passes >= 15 for search in kind._searches.values())


@pytest.mark.parametrize("activations", ["keep", "auto"])
@pytest.mark.parametrize("how", ["raises", "no gradients"])
def test_a_forward_that_saved_nothing_by_chance_teaches_nothing(how: str, activations: str, tmp_path: Path) -> None:
    with offloader(tmp_path, activations) as opened:
        for _ in range(2):
            with suppress(ZeroDivisionError), opened.saved_tensors(signature="kind"):
                if how == "raises":
                    raise ZeroDivisionError
                with torch.no_grad():
                    program(leaf(), 4)
            opened.end_backward()
        assert step(opened)


def test_memory_is_asked_for_while_a_pass_without_hooks_is_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has saved is counted nowhere else."""
    free = [1 << 30]
    monkeypatch.setattr(tensor_cache, "available_bytes", lambda device: free[0])
    monkeypatch.setattr(live_passes, "_FRESH_S", 60.0)
    with offloader(tmp_path, "auto") as opened:
        step(opened)
        search = only_search(opened)
        search._num_to_keep = 1 << 20
        assert not any(step(opened) for _ in range(3))
        losses, hooked = [], []
        for room in (1 << 30, 1 << 30, 4 * NBYTES):
            free[0] = room
            with opened.saved_tensors(signature="kind"):
                hooked.append(has_hooks())
                losses.append(program(leaf(), 4))
        assert hooked == [False, False, True]
        sum(losses).backward()
        opened.end_backward()


@pytest.mark.parametrize("activations", ["keep", "auto", "offload"])
def test_a_context_is_good_for_one_pass(activations: str, tmp_path: Path) -> None:
    with offloader(tmp_path, activations) as opened:
        for _ in range(2):  # the second one without tensor_cache, where everything is kept
            context = opened.saved_tensors(signature="kind")
            with context:
                loss = program(leaf(), 4)
            with context:  # two forwards of one pass
                loss = loss + program(leaf(), 4)
            loss.backward()
            opened.end_backward()
            with pytest.raises(RuntimeError, match="entered before"), context:
                pass
        assert isinstance(step(opened), bool)


def num_timed(search: MoveSearch) -> int:
    """Passes whose time the search took for keeping."""
    return sum(len(block.passes) for block in search._kept._blocks)


def test_a_graph_that_is_kept_takes_no_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_cache, "available_bytes", lambda device: 1 << 30)
    with offloader(tmp_path, "auto") as opened:
        with opened.saved_tensors(signature="kind"):
            loss = program(leaf(), 4)
        loss.backward(retain_graph=True)
        opened.end_backward()
        opened.wait_for_plan()
        kind = only_kind(opened)
        search = only_search(opened)
        search._num_to_keep = 1 << 20
        kind.tracing = Tracing.NONE
        before = num_timed(search)
        assert not any(step(opened) for _ in range(3))
        assert num_timed(search) == before + 3
        loss.backward()


def test_a_pass_without_hooks_has_no_readings_of_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_cache, "available_bytes", lambda device: 1 << 30)
    with offloader(tmp_path, "auto", max_slowdown=50.0) as opened:
        while not (opened.stats.bytes_written and "plan/measured_step_s" in opened.drain_metrics()):
            step(opened)
        search = only_search(opened)
        search._num_to_keep = 4
        while step(opened):
            pass
        assert "plan/measured_step_s" not in opened.drain_metrics()


def test_a_budget_needs_hooks(tmp_path: Path) -> None:
    with offloader(tmp_path, "auto", activation_budget="1GiB") as opened:
        assert all(step(opened) for _ in range(4))


def test_edits_are_seen_by_pytorch_itself(tmp_path: Path) -> None:
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
    assert messages[0] == messages[1]


def test_the_time_is_nobodys_where_several_forwards_run_first(tmp_path: Path) -> None:
    with offloader(tmp_path, "auto") as opened:
        step(opened)
        kind = only_kind(opened)
        search = only_search(opened)
        kind.tracing, search._phase = Tracing.NONE, Phase.TRYING
        before = num_timed(search)
        losses = []
        for _ in range(2):
            with opened.saved_tensors(signature="kind"):
                losses.append((leaf() * 1).sin().sum())
        sum(losses).backward()
        opened.end_backward()
        assert num_timed(search) <= before
