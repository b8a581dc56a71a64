"""Bounded host memory in extents: room, growth, slabs, locking."""

import ctypes
import random
import threading
from contextlib import ExitStack, closing

import pytest
import torch

from lightning_ssd.errors import OffloaderClosedError
from lightning_ssd.memory import mmap
from lightning_ssd.memory.host_budget import HostMemoryBudget
from lightning_ssd.memory.mmap import MappedBlock
from lightning_ssd.storage.extents import Extent
from lightning_ssd.tiers import host_arena
from lightning_ssd.tiers.host_arena import HostArena
from tests.support.host_traffic import wait_until
from tests.support.patience import PATIENCE_S
from tests.support.pretended_driver import AHEAD
from tests.support.process_memory import resident_bytes
from tests.support.weight_loops import in_a_fork

KIB, MIB = 1 << 10, 1 << 20
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small_slabs(monkeypatch):
    monkeypatch.setattr(host_arena, "_FIRST_GROWTH_BYTES", 2 * MIB)


@pytest.fixture
def arena():
    arena = HostArena(32 * MIB, pin=False)
    yield arena
    arena.close()


def address(arena, extent):
    return next(arena.pieces(extent, extent.nbytes, extent.nbytes))[1]


def must(extent):
    assert extent is not None
    return extent


class TestRoom:
    def test_grows_only_as_needed(self, arena):
        assert arena.size_bytes == 0
        first = must(arena.allocate(MIB))
        assert arena.size_bytes == 2 * MIB
        arena.allocate(9 * MIB)
        assert arena.size_bytes == 10 * MIB
        arena.free(first)
        assert must(arena.allocate(MIB)).offset == first.offset, "the lowest place is used again"
        assert arena.size_bytes == 10 * MIB

    def test_several_have_no_more_than_their_budget_together(self, monkeypatch):
        host_budget = HostMemoryBudget(32 * MIB)
        one, other = (HostArena(host_budget, pin=False) for _ in range(2))
        assert one.capacity_bytes == other.capacity_bytes == 32 * MIB
        assert one.allocate(20 * MIB) is not None
        assert (one.capacity_bytes, other.capacity_bytes) == (32 * MIB, 12 * MIB)
        assert other.allocate(13 * MIB) is None
        assert other.size_bytes == 0
        with monkeypatch.context() as patch:
            patch.setattr(MappedBlock, "make_usable", lambda *_: False)
            assert one.allocate(4 * MIB) is None
        assert host_budget.left_bytes == 12 * MIB, "what the system refused is taken"
        assert other.allocate(12 * MIB) is not None
        assert host_budget.left_bytes == 0
        for _ in range(2):
            one.close()
        assert host_budget.left_bytes == 20 * MIB
        assert other.allocate(20 * MIB) is not None
        other.close()
        assert host_budget.left_bytes == 32 * MIB

    def test_the_system_may_refuse(self, arena, monkeypatch, caplog):
        first = must(arena.allocate(MIB))
        monkeypatch.setattr(MappedBlock, "make_usable", lambda *_: False)
        for _ in range(3):
            assert arena.allocate(4 * MIB) is None
        assert arena.allocate(MIB) is not None
        assert arena.capacity_bytes == arena.size_bytes == 2 * MIB
        assert [record.message for record in caplog.records] == [
            "the system gives no more than 2,097,152 bytes to the host tier; it stays at that"
        ]
        arena.free(first)

    def test_no_addresses_is_said_so(self):
        with pytest.raises(MemoryError, match=r"lower HardwareProfile\.host_memory"):
            HostArena(1 << 60, pin=False)

    def test_extents_never_overlap(self, arena):
        choose, lent = random.Random(0), []
        for turn in range(400):
            extent = arena.allocate(choose.randrange(1, 4 * MIB))
            if extent is not None:
                lent.append((extent, turn % 251))
                for _, at, nbytes in arena.pieces(extent, extent.nbytes, 1 << 40):
                    ctypes.memset(at, turn % 251, nbytes)
            while lent and (extent is None or len(lent) > 12):
                extent, value = lent.pop(choose.randrange(len(lent)))
                assert ctypes.string_at(address(arena, extent), extent.nbytes) == bytes([value]) * extent.nbytes
                arena.free(extent)
        assert arena.used_bytes == sum(extent.nbytes for extent, _ in lent)

    def test_close(self, arena):
        extent = must(arena.allocate(16 * MIB))
        before = resident_bytes()
        ctypes.memset(address(arena, extent), 1, 2 * MIB)
        arena.close()
        arena.close()
        assert resident_bytes() - before < MIB
        arena.free(extent)
        with pytest.raises(OffloaderClosedError, match="host tier is closed"):
            arena.allocate(1)


class TestLocking:
    def test_each_slab_once_when_it_is_wanted(self, driver, monkeypatch):
        monkeypatch.setattr(host_arena, "_FIRST_GROWTH_BYTES", 4 * MIB)
        arena = HostArena(64 * MIB, pin=True)
        low, high = must(arena.allocate(3 * MIB)), must(arena.allocate(20 * MIB))
        assert driver.calls == []
        base = address(arena, low)
        for _ in range(2):
            arena.prepare(low, CPU)
        assert driver.calls == [("lock", base, 4 * MIB)]
        for _ in range(2):
            arena.prepare(high, CPU)
        assert driver.calls == [("lock", base, 4 * MIB), ("lock", base + 4 * MIB, 20 * MIB)]
        arena.close()
        arena.close()
        assert driver.calls[2:] == [("unlock", base, 0), ("unlock", base + 4 * MIB, 0)]

    def test_goes_on_unlocked_with_one_warning(self, driver, caplog):
        driver.codes = iter((0, 2))
        arena = HostArena(64 * MIB, pin=True)
        for _ in range(4):
            arena.prepare(must(arena.allocate(2 * MIB)), CPU)
        arena.close()
        assert [kind for kind, _, _ in driver.calls] == ["lock", "lock", "unlock"]
        assert caplog.messages == [NOT_LOCKED]


NOT_LOCKED = "CUDA could not lock more memory of the host tier (error 2); copies there are slower"


class TestLockingAhead:
    @pytest.fixture
    def opens(self):
        with ExitStack() as stack:
            yield lambda room: stack.enter_context(closing(HostArena(room, pin=True, ahead=CPU)))

    def test_what_is_not_locked_is_no_room(self, driver, opens):
        driver.may_go.set()
        host_budget, pages = HostMemoryBudget(64 * MIB), []
        driver.looks = lambda *place: pages.append(pages_of(*place))
        arena = opens(host_budget)
        assert arena.allocate(1) is None
        assert arena.capacity_bytes == 0
        arena.lock_ahead(9 * MIB)
        wait_until(lambda: arena.capacity_bytes == 10 * MIB)
        assert list(driver.locked.values()) == pages == [4 * MIB, 4 * MIB, 2 * MIB], "touched before the driver got it"
        assert set(driver.threads) == {AHEAD}
        extent = must(arena.allocate(10 * MIB))
        assert address(arena, extent) == min(driver.locked)
        assert arena.allocate(1) is None, "an allocation takes no memory"
        arena.prepare(extent, CPU)
        arena.lock_ahead(3 * MIB)
        assert len(driver.calls) == 3
        assert host_budget.left_bytes == 54 * MIB
        arena.close()
        assert driver.locked == {}
        assert host_budget.left_bytes == 64 * MIB

    def test_no_lock_of_ours_is_held_meanwhile(self, driver, opens):
        arena = opens(64 * MIB)
        arena.lock_ahead(4 * MIB)
        assert driver.begun.wait(PATIENCE_S)
        assert arena.allocate(1) is None
        arena.prepare(Extent(0, MIB), CPU)
        assert arena.used_bytes == arena.capacity_bytes == 0
        arena.lock_ahead(8 * MIB)  # more, in the midst of it
        driver.may_go.set()
        wait_until(lambda: arena.capacity_bytes == 8 * MIB)

    def test_closing_waits_for_one_slab(self, driver, opens):
        arena = opens(64 * MIB)
        arena.lock_ahead(64 * MIB)
        assert driver.begun.wait(PATIENCE_S)
        closing = threading.Thread(target=arena.close)
        closing.start()
        wait_until(lambda: arena._is_closing)
        assert closing.is_alive()
        driver.may_go.set()
        closing.join()
        assert driver.locked == {}
        arena.lock_ahead(128 * MIB)
        assert [kind for kind, *_ in driver.calls] == ["lock", "unlock"]

    def test_what_cuda_does_not_lock_is_used_all_the_same(self, driver, opens, caplog):
        driver.may_go.set()
        driver.codes = iter((2,))
        arena = opens(64 * MIB)
        arena.lock_ahead(12 * MIB)
        wait_until(lambda: arena.capacity_bytes == 12 * MIB)
        arena._locking.wait()
        assert len(driver.calls) == 1
        assert caplog.messages == [NOT_LOCKED]

    @pytest.mark.parametrize("refuses", ["make_usable", "touch", "budget"])
    def test_it_ends_where_there_is_no_more(self, refuses, driver, opens, monkeypatch):
        driver.may_go.set()
        host_budget = HostMemoryBudget(64 * MIB)
        arena = opens(host_budget)
        if refuses == "budget":
            assert host_budget.share().grow(58 * MIB, 58 * MIB)
        else:
            owner = MappedBlock if refuses == "make_usable" else host_arena
            real = getattr(owner, refuses)
            monkeypatch.setattr(owner, refuses, lambda *args: arena.size_bytes < 4 * MIB and real(*args))
        arena.lock_ahead(64 * MIB)
        arena._locking.wait()
        assert arena.capacity_bytes == (6 * MIB if refuses == "budget" else 4 * MIB)
        assert host_budget.left_bytes == (0 if refuses == "budget" else 60 * MIB)
        assert arena.allocate(4 * MIB) is not None

    def test_a_fork_locks_nothing(self, driver, opens):
        arena = opens(64 * MIB)
        assert in_a_fork(lambda: (arena.lock_ahead(4 * MIB), arena.close())) == 0
        assert arena._locking is None

    def test_it_goes_on_without_a_thread(self, driver, opens, monkeypatch, caplog):
        monkeypatch.setattr(threading.Thread, "start", lambda thread: raises(RuntimeError("can't start new thread")))
        arena = opens(64 * MIB)
        arena.lock_ahead(4 * MIB)
        assert caplog.messages == ["no more memory of the host tier is locked: can't start new thread"]
        assert arena.allocate(1) is None

    def test_an_error_is_raised_at_close(self, monkeypatch):
        arena = HostArena(64 * MIB, pin=True, ahead=CPU)
        monkeypatch.setattr(mmap.torch.cuda, "cudart", lambda: 1 / 0)
        arena.lock_ahead(4 * MIB)
        with pytest.raises(ZeroDivisionError):
            arena.close()
        assert arena._block is None


def raises(error):
    raise error


def pages_of(address, nbytes):
    """Bytes of a range that have pages."""
    there = (ctypes.c_ubyte * (nbytes // mmap.PAGE_BYTES))()
    assert not mmap.libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), there)
    return sum(page & 1 for page in there) * mmap.PAGE_BYTES
