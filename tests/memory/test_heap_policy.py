"""Freed memory returns as far as it has to, in passes that free any, and only in those."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.memory import heap_policy as module
from lightning_ssd.memory.heap_policy import HeapMode, HeapPolicy
from lightning_ssd.memory.malloc import MallocThreshold, trim
from lightning_ssd.memory.readings import level_bytes
from tests.support.helpers import Setup, open_offloader

pytestmark = pytest.mark.skipif(MallocThreshold().reason is not None, reason="there is no glibc with mallopt")


MIB = 1 << 20


@pytest.fixture
def heap_policy() -> Iterator[HeapPolicy]:
    made = HeapPolicy(is_ours=True)
    yield made
    made.close()


def is_fixed(of: HeapPolicy) -> bool:
    return of._threshold in MallocThreshold._users


class Heap:
    """A process whose memory the test makes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used = self.free = self.mapped = 0
        self.num_trims = 0
        monkeypatch.setattr(module, "trim", self.trim)
        monkeypatch.setattr(module, "besides_blocks_bytes", lambda: self.free * MIB)
        monkeypatch.setattr(module, "_LOOK_S", 0.0)

    def level(self) -> int:
        return (self.used + self.free + self.mapped) * MIB

    def trim(self) -> bool:
        self.free = 0
        self.num_trims += 1
        return True


def test_free_memory_stays_until_more_is_resident_than_was_ever_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    heap = Heap(monkeypatch)
    heap_policy = HeapPolicy(is_ours=True, level=heap.level)
    heap_policy.enter(HeapMode.TRIM)
    heap_policy.expect(0, 800 * MIB)  # 100 MiB may stay in any case
    heap.used, heap.free = 50, 400
    heap_policy.look()
    assert heap.num_trims == 1, "nobody knew what is in use"
    steps = ((50, 100, 0), (50, 101, 1), (120, 40, 0), (120, 100, 0), (60, 160, 0), (60, 161, 1), (60, 160, 0))
    for used, free, trims in steps:
        heap.num_trims, heap.used, heap.free = 0, used, free
        heap_policy.look()
        assert heap.num_trims == trims, (used, free)


def test_what_was_needed_is_forgotten_slowly_and_at_once_where_passes_change(monkeypatch: pytest.MonkeyPatch) -> None:
    heap = Heap(monkeypatch)
    heap_policy = HeapPolicy(is_ours=True, level=heap.level)
    heap_policy.enter(HeapMode.TRIM)

    def trims_at(peak: int, free: int) -> int:
        heap.num_trims, heap.used, heap.free = 0, 0, free
        heap_policy.expect(peak * MIB, 128 * MIB)  # 16 MiB may stay
        heap_policy.look()
        return heap.num_trims

    heap_policy.expect(500 * MIB, 128 * MIB)
    heap.used = 300
    heap_policy.look()  # for the first time
    assert trims_at(500, 300) == 0
    assert [trims_at(516, 307) for _ in range(4)] == [0, 0, 0, 1], "2 MiB in each pass"
    heap.used, heap.free = 300, 0
    heap_policy.look()
    assert trims_at(533, 17) == 1, "such passes need something else"


def test_pages_of_files_hide_no_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that wait, for example, are mapped when the heap is trimmed, and leave later."""
    heap = Heap(monkeypatch)
    heap_policy = HeapPolicy(is_ours=True, level=heap.level)
    heap_policy.enter(HeapMode.TRIM)
    heap_policy.expect(0, 0)  # 16 MiB may stay
    heap.used, heap.mapped = 50, 200
    heap_policy.look()
    heap_policy._needed_bytes = 0
    heap.num_trims, heap.mapped, heap.free = 0, 0, 150
    heap_policy.look()
    assert heap.num_trims == 1


@pytest.mark.parametrize(("saved", "slack"), [(0, 16), (8 * 16, 16), (8 * 17, 17), (8 * 128, 128), (8 * 129, 128)])
def test_what_may_stay_is_bounded(saved: int, slack: int, monkeypatch: pytest.MonkeyPatch) -> None:
    heap = Heap(monkeypatch)
    heap_policy = HeapPolicy(is_ours=True, level=heap.level)
    heap_policy.enter(HeapMode.TRIM)
    heap_policy.expect(0, saved * MIB)
    for free, trims in ((slack, 0), (slack + 1, 1)):
        heap.num_trims, heap.free = 0, free
        heap_policy.look()
        assert heap.num_trims == trims


@pytest.mark.parametrize(("is_known", "steps"), [(True, "10000"), (False, "11111")])
def test_what_cannot_return_is_not_asked_for(is_known: bool, steps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients, for example, until the optimizer has used them."""
    heap = Heap(monkeypatch)
    if not is_known:
        monkeypatch.setattr(module, "besides_blocks_bytes", lambda: None)
    heap_policy = HeapPolicy(is_ours=True, level=heap.level)
    heap_policy.enter(HeapMode.TRIM)
    heap_policy.expect(10 * MIB, 0)
    for used, trims in zip((50, 200, 220, 240, 260), steps, strict=True):
        heap.num_trims, heap.used = 0, used
        heap_policy.look()
        assert heap.num_trims == int(trims), used


def test_nothing_is_asked_where_nothing_moves_or_between_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    heap = Heap(monkeypatch)
    heap.free = 1000
    heap_policy = HeapPolicy(is_ours=True, level=heap.level)
    for mode in (HeapMode.RELAXED, HeapMode.MAP_EACH):
        heap_policy.enter(mode)
        heap_policy.look()
    heap_policy.enter(HeapMode.TRIM)
    heap_policy.border()
    heap_policy.look()
    elsewhere = HeapPolicy(level=heap.level)
    elsewhere.enter(HeapMode.TRIM)
    elsewhere.look()
    heap_policy.close()
    assert heap.num_trims == 1, "at close"


def test_holes_of_a_plan_that_was_given_up_leave_once(monkeypatch: pytest.MonkeyPatch) -> None:
    heap = Heap(monkeypatch)
    heap_policy = HeapPolicy(is_ours=True, level=heap.level)
    heap_policy.enter(HeapMode.RELAXED)
    assert heap.num_trims == 0
    for mode in (HeapMode.TRIM, HeapMode.MAP_EACH):
        before = heap.num_trims
        heap_policy.enter(mode)
        heap_policy.border()
        heap_policy.enter(mode)
        assert heap.num_trims == before, "what stays is for the passes that move"
        heap_policy.enter(HeapMode.RELAXED)
        heap_policy.border()
        heap_policy.enter(HeapMode.RELAXED)
        assert heap.num_trims == before + 1
    heap_policy.close()


def test_an_error_of_looking_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers look too: one that died of it would leave the training thread waiting for ever."""
    heap = Heap(monkeypatch)
    calls = []

    def level() -> int:
        calls.append(None)
        raise OSError(24, "Too many open files")

    heap_policy = HeapPolicy(is_ours=True, level=level)
    heap_policy.enter(HeapMode.TRIM)
    heap_policy.look()
    assert len(calls) == 1
    assert heap.num_trims == 0


def test_where_there_is_little_memory_none_stays(heap_policy: HeapPolicy) -> None:
    for room, fixed in ((None, False), (200 * MIB, False), (199 * MIB, True)):
        heap_policy.expect(100 * MIB, 800 * MIB, room)
        heap_policy.enter(HeapMode.TRIM)
        assert is_fixed(heap_policy) == fixed
        assert heap_policy._is_watched != fixed


def test_asking_is_bounded_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    heap = Heap(monkeypatch)
    monkeypatch.setattr(module, "_LOOK_S", 3600.0)
    heap_policy = HeapPolicy(is_ours=True, level=heap.level)
    heap_policy.enter(HeapMode.TRIM)
    for _ in range(3):
        heap.free = 1000
        heap_policy.look()
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


def test_only_where_all_memory_counts_the_threshold_is_fixed(heap_policy: HeapPolicy) -> None:
    for mode in HeapMode:
        heap_policy.enter(mode)
        assert is_fixed(heap_policy) == (mode is HeapMode.MAP_EACH)


def test_it_is_relaxed_for_the_optimizer_unless_passes_are_short(
    heap_policy: HeapPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MIN_RELAXED_S", 0.0)
    heap_policy.enter(HeapMode.MAP_EACH)
    heap_policy.border()
    assert not is_fixed(heap_policy)
    monkeypatch.setattr(module, "_MIN_RELAXED_S", 3600.0)
    heap_policy.enter(HeapMode.MAP_EACH)
    heap_policy.border()
    assert is_fixed(heap_policy)


def test_closing_leaves_malloc_to_itself(heap_policy: HeapPolicy) -> None:
    heap_policy.enter(HeapMode.MAP_EACH)
    heap_policy.close()
    assert not is_fixed(heap_policy)


def test_where_memory_is_not_of_malloc_nothing_happens() -> None:
    before = set(MallocThreshold._users)
    elsewhere = HeapPolicy()
    elsewhere.enter(HeapMode.MAP_EACH)
    elsewhere.border()
    elsewhere.close()
    assert before == MallocThreshold._users


def test_a_foreign_malloc_is_neither_watched_nor_trimmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_ssd.memory.malloc.foreign_malloc", lambda: "libtcmalloc_minimal.so.4")
    heap = Heap(monkeypatch)
    foreign = HeapPolicy(is_ours=True, level=heap.level)
    assert not foreign.is_ours
    foreign.enter(HeapMode.TRIM)
    foreign.expect(0, 0)
    heap.free = 1_000
    foreign.look()
    foreign.border()
    foreign.close()
    assert heap.num_trims == 0


@pytest.mark.parametrize(("library", "is_told"), [("libtcmalloc_minimal.so.4", True), (None, False)])
def test_a_foreign_malloc_makes_a_memory_budget_vague(
    library: str | None, is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_ssd._assembly.foreign_malloc", lambda: library)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        policy = OffloadPolicy(memory_budget="64GiB")
        hardware = HardwareProfile(paths=[tmp_path], allow_unsuitable_paths=True)
        Offloader(policy=policy, hardware=hardware).open().close()
    found = [str(warning.message) for warning in told if "memory_budget='64GiB'" in str(warning.message)]
    assert [library is not None and library in message for message in found] == [True] * is_told


@pytest.mark.parametrize("activations", ["offload", "auto", "recompute_offload"])
def test_the_first_pass_of_a_policy_moves(activations: str, tmp_path: Path) -> None:
    with open_offloader(tmp_path, Setup(activations=activations)) as offloader:
        heap_policy = offloader._parts.heap_policy
        heap_policy.expect(7 << 30, 0)
        heap_policy._needed_bytes = 5 << 30
        with offloader.saved_tensors():
            assert heap_policy._is_watched
            assert heap_policy._needed_bytes != 5 << 30
            loss = torch.ones(4, requires_grad=True).exp().sum()
        loss.backward()
        offloader.end_backward()
        assert not offloader._parts.heap_policy._is_watched
