"""Freed memory returns as far as it has to, in passes that free any, and only in those."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd import allocation as module
from lightning_ssd.allocation import Allocation
from lightning_ssd.malloc import MallocThreshold, trim
from lightning_ssd.memory import level_bytes
from tests.helpers import Setup, open_offloader

pytestmark = pytest.mark.skipif(MallocThreshold().reason is not None, reason="there is no glibc with mallopt")


MIB = 1 << 20


@pytest.fixture
def allocation() -> Iterator[Allocation]:
    made = Allocation(is_ours=True)
    yield made
    made.close()


def is_fixed(of: Allocation) -> bool:
    return of._threshold in MallocThreshold._users


class Heap:
    """A process whose memory the test makes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used = self.free = 0
        self.num_trims = 0
        monkeypatch.setattr(module, "trim", self.trim)
        monkeypatch.setattr(module, "_LOOK_S", 0.0)

    def level(self) -> int:
        return (self.used + self.free) * MIB

    def trim(self) -> bool:
        self.free = 0
        self.num_trims += 1
        return True


def test_free_memory_stays_until_the_peak_would_be_exceeded(monkeypatch: pytest.MonkeyPatch) -> None:
    heap = Heap(monkeypatch)
    allocation = Allocation(is_ours=True, level=heap.level)
    allocation.enter(True)
    allocation.expect(100 * MIB, 800 * MIB)
    heap.used, heap.free = 50, 400
    allocation.look(0)
    assert heap.num_trims == 1, "nobody knew what else is in memory"
    for saved, free, trims in ((0, 200, 0), (40, 160, 0), (40, 161, 1), (90, 110, 0), (90, 111, 1), (120, 101, 1)):
        heap.num_trims, heap.used, heap.free = 0, 50 + saved, free
        allocation.look(saved * MIB)
        assert heap.num_trims == trims, (saved, free)


@pytest.mark.parametrize(("saved", "slack"), [(0, 16), (8 * 16, 16), (8 * 17, 17), (8 * 128, 128), (8 * 129, 128)])
def test_what_may_stay_is_bounded(saved: int, slack: int, monkeypatch: pytest.MonkeyPatch) -> None:
    heap = Heap(monkeypatch)
    allocation = Allocation(is_ours=True, level=heap.level)
    allocation.enter(True)
    allocation.expect(0, saved * MIB)
    for free, trims in ((slack, 0), (slack + 1, 1)):
        heap.num_trims, heap.free = 0, free
        allocation.look(0)
        assert heap.num_trims == trims


def test_what_cannot_return_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients, for example, until the optimizer has used them."""
    heap = Heap(monkeypatch)
    allocation = Allocation(is_ours=True, level=heap.level)
    allocation.enter(True)
    allocation.expect(10 * MIB, 0)
    for used, trims in ((50, 1), (200, 1), (220, 0), (50, 0), (200, 1)):
        heap.num_trims, heap.used = 0, used
        allocation.look(0)
        assert heap.num_trims == trims, used


def test_nothing_is_asked_where_nothing_moves_or_between_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    heap = Heap(monkeypatch)
    heap.free = 1000
    allocation = Allocation(is_ours=True, level=heap.level)
    for may_move, all_counts in ((False, False), (True, True)):
        allocation.enter(may_move, all_counts=all_counts)
        allocation.look(0)
    allocation.enter(True)
    allocation.border()
    allocation.look(0)
    elsewhere = Allocation(level=heap.level)
    elsewhere.enter(True)
    elsewhere.look(0)
    allocation.close()
    assert heap.num_trims == 1, "at close"


def test_an_error_of_looking_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers look too: one that died of it would leave the training thread waiting for ever."""
    heap = Heap(monkeypatch)
    calls = []

    def level() -> int:
        calls.append(None)
        raise OSError(24, "Too many open files")

    allocation = Allocation(is_ours=True, level=level)
    allocation.enter(True)
    allocation.look(0)
    assert len(calls) == 1
    assert heap.num_trims == 0


def test_where_there_is_little_memory_none_stays(allocation: Allocation) -> None:
    for available, fixed in ((None, False), (400 * MIB, False), (399 * MIB, True)):
        allocation.expect(100 * MIB, 800 * MIB, available)
        allocation.enter(True)
        assert is_fixed(allocation) == fixed
        assert allocation._is_watched != fixed


def test_asking_is_bounded_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    heap = Heap(monkeypatch)
    monkeypatch.setattr(module, "_LOOK_S", 3600.0)
    allocation = Allocation(is_ours=True, level=heap.level)
    allocation.enter(True)
    for _ in range(3):
        heap.free = 1000
        allocation.look(0)
    assert heap.num_trims == 1


def test_freed_tensors_really_leave(tmp_path: Path) -> None:
    """Of this process: tensors below glibc's own threshold, saved and moved while the resident set is looked at."""
    levels = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(torch.full((MIB,), 2.0))  # 4 MiB
            levels.append(level_bytes(torch.device("cpu")))
            return x * 2.0

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return grad * ctx.saved_tensors[0][0]  # type: ignore[attr-defined]

    trim()  # what other tests have left resident would be used before the level rises
    with open_offloader(tmp_path, Setup()) as offloader:
        x = torch.ones(1, requires_grad=True)
        with offloader.saved_tensors():
            y = x
            for _ in range(64):
                y = Watched.apply(y)
                offloader.flush()
        y.backward()
        offloader.end_backward()
    assert max(levels) - levels[0] < 128 * MIB, "of 256 that were saved"


def test_only_where_all_memory_counts_the_threshold_is_fixed(allocation: Allocation) -> None:
    for may_move, all_counts, fixed in ((False, False, False), (True, True, True), (True, False, False)):
        allocation.enter(may_move, all_counts=all_counts)
        assert is_fixed(allocation) == fixed


def test_it_is_relaxed_for_the_optimizer_unless_passes_are_short(
    allocation: Allocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MIN_RELAXED_S", 0.0)
    allocation.enter(True, all_counts=True)
    allocation.border()
    assert not is_fixed(allocation)
    monkeypatch.setattr(module, "_MIN_RELAXED_S", 3600.0)
    allocation.enter(True, all_counts=True)
    allocation.border()
    assert is_fixed(allocation)


def test_closing_leaves_malloc_to_itself(allocation: Allocation) -> None:
    allocation.enter(True, all_counts=True)
    allocation.close()
    assert not is_fixed(allocation)


def test_where_memory_is_not_of_malloc_nothing_happens() -> None:
    before = set(MallocThreshold._users)
    elsewhere = Allocation()
    elsewhere.enter(True, all_counts=True)
    elsewhere.border()
    elsewhere.close()
    assert before == MallocThreshold._users


def test_a_foreign_malloc_is_neither_watched_nor_trimmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_ssd.malloc.foreign_malloc", lambda: "libtcmalloc_minimal.so.4")
    heap = Heap(monkeypatch)
    foreign = Allocation(is_ours=True, level=heap.level)
    assert not foreign.is_ours
    foreign.enter(True)
    foreign.expect(0, 0)
    heap.free = 1_000
    foreign.look(0)
    foreign.border()
    foreign.close()
    assert heap.num_trims == 0


@pytest.mark.parametrize(("library", "is_told"), [("libtcmalloc_minimal.so.4", True), (None, False)])
def test_a_foreign_malloc_makes_a_memory_budget_vague(
    library: str | None, is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_ssd.assembly.foreign_malloc", lambda: library)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        policy = OffloadPolicy(memory_budget="64GiB")
        hardware = HardwareProfile(paths=[tmp_path], allow_unsuitable_paths=True)
        Offloader(policy=policy, hardware=hardware).open().close()
    found = [str(warning.message) for warning in told if "memory_budget='64GiB'" in str(warning.message)]
    assert [library is not None and library in message for message in found] == [True] * is_told


@pytest.mark.parametrize(("activations", "watched"), [("offload", True), ("auto", False), ("recompute_offload", True)])
def test_what_the_first_pass_of_a_policy_does(activations: str, watched: bool, tmp_path: Path) -> None:
    """The first pass of "auto" keeps everything, and is what planned passes are held against."""
    with open_offloader(tmp_path, Setup(activations=activations)) as offloader:
        with offloader.saved_tensors():
            assert offloader._parts.allocation._is_watched == watched
            loss = torch.ones(4, requires_grad=True).exp().sum()
        loss.backward()
        offloader.end_backward()
        assert not offloader._parts.allocation._is_watched
