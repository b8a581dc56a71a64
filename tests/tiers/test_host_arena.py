"""Bounded host memory in extents: room, growth, slabs, locking."""

import ctypes
import random
from types import SimpleNamespace

import pytest
import torch

from lightning_ssd.errors import OffloaderClosedError
from lightning_ssd.memory import mmap
from lightning_ssd.memory.host_budget import HostMemoryBudget
from lightning_ssd.memory.mmap import MappedBlock
from lightning_ssd.tiers.host_arena import HostArena
from tests.support.process_memory import resident_bytes

KIB, MIB = 1 << 10, 1 << 20
CPU = torch.device("cpu")


@pytest.fixture
def arena():
    arena = HostArena(32 * MIB, pin=False, growth_bytes=2 * MIB)
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
        one, other = (HostArena(host_budget, pin=False, growth_bytes=2 * MIB) for _ in range(2))
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
    def pinning(self, monkeypatch, *codes):
        calls = []
        answers = iter(codes)

        def register(address, nbytes, flags):
            calls.append(("lock", address, nbytes))
            return next(answers, 0)

        def unregister(address):
            calls.append(("unlock", address, 0))
            return 0

        cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
        monkeypatch.setattr(mmap.torch.cuda, "cudart", lambda: cudart)
        return calls

    def test_each_slab_once_when_it_is_wanted(self, monkeypatch):
        calls = self.pinning(monkeypatch)
        arena = HostArena(64 * MIB, pin=True, growth_bytes=4 * MIB)
        low, high = must(arena.allocate(3 * MIB)), must(arena.allocate(20 * MIB))
        assert calls == []
        base = address(arena, low)
        for _ in range(2):
            arena.prepare(low, CPU)
        assert calls == [("lock", base, 4 * MIB)]
        for _ in range(2):
            arena.prepare(high, CPU)
        assert calls == [("lock", base, 4 * MIB), ("lock", base + 4 * MIB, 20 * MIB)]
        arena.close()
        arena.close()
        assert calls[2:] == [("unlock", base, 0), ("unlock", base + 4 * MIB, 0)]

    def test_goes_on_unlocked_with_one_warning(self, monkeypatch, caplog):
        calls = self.pinning(monkeypatch, 0, 2)
        arena = HostArena(64 * MIB, pin=True, growth_bytes=2 * MIB)
        for _ in range(4):
            arena.prepare(must(arena.allocate(2 * MIB)), CPU)
        arena.close()
        assert [kind for kind, _, _ in calls] == ["lock", "lock", "unlock"]
        assert [record.message for record in caplog.records] == [
            "CUDA could not lock more memory of the host tier (error 2); copies there are slower"
        ]
