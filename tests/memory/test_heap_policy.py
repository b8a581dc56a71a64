"""Freed memory returns as far as it has to, in passes that free any, and only in those."""

import warnings
from dataclasses import replace

import pytest
import torch

from lightning_ssd.activations import tensor_cache
from lightning_ssd.memory import heap_policy as module
from lightning_ssd.memory.heap_policy import HeapMode, HeapPolicy
from lightning_ssd.memory.malloc import MallocThreshold, free_heap_bytes, trim
from lightning_ssd.memory.readings import level_bytes
from tests.activations.test_scarce_memory import SAVED, settle
from tests.support.helpers import AUTO, EAGER, Session, Setup, open_offloader, outcome
from tests.support.opened import offloader_in
from tests.support.plan_trainings import trains
from tests.support.sines import sines

pytestmark = pytest.mark.skipif(MallocThreshold().reason is not None, reason="there is no glibc with mallopt")

MIB = 1 << 20
LOOK = 16 * MIB
CPU = torch.device("cpu")


def is_fixed(of):
    return of._threshold in MallocThreshold._users


class Heap:
    def __init__(self, monkeypatch):
        self.used = self.free = self.mapped = 0
        self.num_trims = self.saved_bytes = 0
        monkeypatch.setattr(module, "trim", self.trim)
        monkeypatch.setattr(module, "besides_blocks_bytes", lambda: self.free * MIB)
        self.policy = HeapPolicy(is_ours=True, level=self.level)
        self.policy.enter(HeapMode.TRIM)

    def level(self):
        return (self.used + self.free + self.mapped) * MIB

    def trim(self):
        self.free = 0
        self.num_trims += 1
        return True

    def trims_at(self, used, free):
        self.num_trims, self.used, self.free = 0, used, free
        self.saved_bytes += LOOK
        self.policy.look(self.saved_bytes)
        return self.num_trims


@pytest.fixture
def heap(monkeypatch):
    made = Heap(monkeypatch)
    yield made
    made.policy.close()


@pytest.fixture
def heap_policy():
    made = HeapPolicy(is_ours=True)
    yield made
    made.close()


def test_free_memory_stays_until_more_is_resident_than_was_ever_needed(heap):
    heap.policy.expect(0)  # 16 MiB may stay in any case
    assert heap.trims_at(50, 400) == 1, "what is in use was not known"
    for used, free, trims in ((50, 16, 0), (50, 17, 1), (120, 4, 0), (120, 16, 0), (60, 76, 0), (60, 77, 1)):
        assert heap.trims_at(used, free) == trims, (used, free)


@pytest.mark.parametrize(("is_known", "trims"), [(True, "10000"), (False, "11111")])
def test_what_cannot_return_is_not_asked_for(is_known, trims, heap, monkeypatch):
    """Gradients, for example, until the optimizer has used them."""
    if not is_known:
        monkeypatch.setattr(module, "besides_blocks_bytes", lambda: None)
    heap.policy.expect(10 * MIB)
    assert "".join(str(heap.trims_at(used, 0)) for used in (50, 200, 220, 240, 260)) == trims


def test_an_error_of_looking_is_no_error_and_the_level_is_read_as_bytes_are_saved():
    """Workers look too: one that died of it would leave the training thread waiting for ever."""
    calls = []

    def level():
        calls.append(None)
        raise OSError(24, "Too many open files")

    heap_policy = HeapPolicy(is_ours=True, level=level)
    heap_policy.enter(HeapMode.TRIM)
    for saved_bytes in (5, 5 + LOOK - 1, 5 + LOOK, 5 + LOOK, 5 + 2 * LOOK - 1):
        heap_policy.look(saved_bytes)
    assert len(calls) == 2
    heap_policy.enter(HeapMode.TRIM)
    heap_policy.look(0)
    assert len(calls) == 3, "each pass begins with a look"
    heap_policy.close()


def test_where_there_is_little_memory_none_stays(heap_policy):
    for room, fixed in ((None, False), (116 * MIB, False), (115 * MIB, True)):
        heap_policy.expect(100 * MIB, room)
        heap_policy.enter(HeapMode.TRIM)
        assert is_fixed(heap_policy) == fixed
        assert heap_policy._is_watched != fixed


def test_freed_tensors_really_leave(tmp_path):
    """Of this process: tensors below glibc's own threshold, saved and moved while the resident set is looked at."""
    levels = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(torch.full((MIB,), 2.0))  # 4 MiB
            levels.append(level_bytes(CPU))
            return x * 2.0

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0][0]

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


@pytest.mark.parametrize("has_pages", [True, False])
def test_each_mode_sets_malloc_until_the_end(has_pages, monkeypatch):
    monkeypatch.setattr(module, "has_whole_pages", lambda: has_pages)
    heap_policy = HeapPolicy(is_ours=True)
    for mode in (*HeapMode, HeapMode.TRIM):
        heap_policy.enter(mode)
        assert is_fixed(heap_policy) == (mode is HeapMode.MAP_EACH)
        reuses = heap_policy._threshold in MallocThreshold._reusers
        assert reuses is (has_pages and mode is HeapMode.TRIM), "keeping everything takes what it takes without us"
    heap_policy.look(LOOK)
    heap_policy.border()
    # What is given back between passes would be mapped anew by the next one.
    assert (heap_policy._threshold in MallocThreshold._reusers) is has_pages
    heap_policy.enter(HeapMode.MAP_EACH)
    heap_policy.close()
    assert not is_fixed(heap_policy)
    assert heap_policy._threshold not in MallocThreshold._reusers


@pytest.mark.parametrize(("library", "is_told"), [("libtcmalloc_minimal.so.4", True), (None, False)])
def test_a_foreign_malloc_makes_a_memory_budget_vague(library, is_told, tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_ssd._assembly.foreign_malloc", lambda: library)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        offloader_in(tmp_path, memory_budget="64GiB").open().close()
    found = [str(warning.message) for warning in told if "memory_budget='64GiB'" in str(warning.message)]
    assert [library is not None and library in message for message in found] == [True] * is_told


# -- what malloc holds back is available: a pass like the last one finds its memory there ------------------------------


def test_free_heap_is_what_a_trim_gives_back():
    trim()
    kept = [torch.ones(25_000) for _ in range(2000)]  # 100 kB each: from the heap
    taken = free_heap_bytes()
    del kept[::2]
    free, resident = free_heap_bytes(), level_bytes(CPU)
    assert free - taken == pytest.approx(100 * MIB, rel=0.2)
    trim()
    assert resident - level_bytes(CPU) == pytest.approx(100 * MIB, rel=0.3)
    del kept


@pytest.mark.parametrize(("is_counted", "is_drained"), [(True, True), (True, False), (False, False)])
def test_memory_is_not_scarce_because_malloc_holds_it(is_counted, is_drained, monkeypatch, tmp_path):
    """Passes leave their memory in the heap: beside that, not enough is available for the next one."""
    free = [0]
    monkeypatch.setattr(tensor_cache, "available_bytes", lambda device: 3 * SAVED - free[0])
    monkeypatch.setattr(tensor_cache, "level_bytes", lambda device: free[0])
    monkeypatch.setattr(HeapPolicy, "free_bytes", lambda self: free[0] if is_counted else 0)

    def look(step, session):
        if session.offloader is not None:
            settle(session.offloader)
            if is_drained:
                session.offloader.reset_peaks()
            free[0] = 2 * SAVED

    setup = replace(AUTO, max_slowdown=1.0)  # by plan nothing moves
    with open_offloader(tmp_path, setup) as offloader:
        outcome(trains(3, look), Session.of(offloader, setup))
        scheduler = offloader._parts.scheduler
        assert scheduler._limits.limits_total_memory is not is_counted


def test_backward_is_looked_at_as_bytes_come_back(tmp_path, monkeypatch):
    """Else what backward frees stays beside the gradients, at the worst moment of a step."""
    told = []
    monkeypatch.setattr(HeapPolicy, "look", lambda policy, come_bytes: told.append(come_bytes))
    with open_offloader(tmp_path, EAGER) as offloader:
        x = torch.rand(64, 64).requires_grad_()
        with offloader.saved_tensors():
            y = sines(x, 20)
        offloader.flush()
        saved_bytes = offloader.stats.bytes_saved
        assert max(told) == saved_bytes
        y.backward(torch.ones_like(y))
        offloader.end_backward()
        assert max(told) == saved_bytes + offloader.stats.bytes_read > saved_bytes
