"""Memory for reloads: of any size and phase, recycled, in huge pages, and gone when nobody points at it any more."""

import ctypes
import gc
import threading
from pathlib import Path

import pytest
import torch

from lightning_ssd.common.tensors import Region, TensorSpec
from lightning_ssd.memory import pools
from lightning_ssd.memory.pools import ReloadPool
from tests.support.patience import PATIENCE_S
from tests.support.process_memory import huge_page_bytes, resident_bytes
from tests.support.threads import at_once
from tests.support.weight_loops import in_a_fork

KIB, MIB = 1 << 10, 1 << 20


def fill(storage, value):
    ctypes.memset(storage.data_ptr(), value, storage.nbytes())


def settled(pool):
    with pool._lock:
        pool._drain()
        pool._surplus()
        return sum(loan.block.nbytes for loan in pool._lent.values()), sum(block.nbytes for block in pool._spare)


class TestReloadPool:
    @pytest.fixture
    def pool(self):
        pool = ReloadPool(256 * MIB)
        yield pool
        pool.close()

    @pytest.mark.parametrize("alignment", [1, 4, 512, 4096, 16384])
    @pytest.mark.parametrize("nbytes", [0, 1, 100, 4096, 65535, 65536, MIB, 2 * MIB, 3 * MIB + 17, 12 * MIB])
    def test_size_and_phase(self, pool, nbytes, alignment):
        for phase in {0, 1 % alignment, 64 % alignment, alignment - 1}:
            storage = pool.take(nbytes, phase, alignment)
            assert storage.nbytes() == nbytes
            if nbytes:
                assert storage.data_ptr() % alignment == phase
            fill(storage, 3)

    def test_memory_comes_back_when_torch_lets_go(self, pool):
        storage = pool.take(8 * MIB, 64, 512)
        address, view = storage.data_ptr(), torch.empty(0).set_(storage)
        assert settled(pool) == (8 * MIB + 4096, 0)
        del storage
        assert settled(pool) == (8 * MIB + 4096, 0), "a view still holds it"
        del view
        assert settled(pool) == (0, 8 * MIB + 4096)
        assert pool.take(8 * MIB, 64, 512).data_ptr() == address

    def test_other_phases_and_similar_sizes_share_memory(self, pool):
        address = pool.take(8 * MIB, 64, 512).data_ptr() - 64
        assert pool.take(7 * MIB, 100, 512).data_ptr() == address + 100
        other = pool.take(5 * MIB, 0, 512)
        assert other.data_ptr() != address, "8 MiB for 5 MiB wastes too much"

    def test_spare_memory_is_bounded_and_the_oldest_goes(self):
        pool = ReloadPool(20 * MIB)
        storages = [pool.take(8 * MIB, 0, 512) for _ in range(4)]
        addresses = [storage.data_ptr() for storage in storages]
        while storages:
            storages.pop(0)
        assert settled(pool) == (0, 16 * MIB)
        assert {pool.take(8 * MIB, 0, 512).data_ptr(), pool.take(8 * MIB, 0, 512).data_ptr()} <= set(addresses[2:])
        pool.close()

    def test_nobody_is_given_what_another_one_is_about_to_take(self, pool, monkeypatch):
        """This thread plays the other one too, so that it comes at the very moment when a block has been found."""
        best_fit, taken = pools._best_fit, []

        def find(spare, *need):
            found = best_fit(spare, *need)
            monkeypatch.setattr(pools, "_best_fit", best_fit)
            if pool._lock.acquire(blocking=False):
                pool._lock.release()
                taken.append(pool.take(MIB, 0, 64))
            return found

        spare = pool.take(MIB, 0, 64)
        address = spare.data_ptr()
        del spare
        monkeypatch.setattr(pools, "_best_fit", find)
        taken.append(pool.take(MIB, 0, 64))
        taken.append(pool.take(MIB, 0, 64))
        assert [storage.data_ptr() == address for storage in taken] == [True, False]

    def test_threads_never_share_memory(self, pool):
        """Each holds what it has taken in several turns."""
        meet, wrong = threading.Barrier(8, timeout=PATIENCE_S), []

        def work(number):
            held = []
            for turn in range(100):
                value = (number * 31 + turn) % 256
                held = [*held[-2:], (pool.take(64 * KIB + (number + turn) % 8 * 64 * KIB, turn, 512), value)]
                fill(*held[-1])
                meet.wait()
                for storage, expected in held:
                    if ctypes.string_at(storage.data_ptr(), storage.nbytes()) != bytes([expected]) * storage.nbytes():
                        wrong.append((number, turn))

        at_once(*(lambda number=number: work(number) for number in range(8)))
        assert wrong == []
        lent_bytes, spare_bytes = settled(pool)
        assert lent_bytes == 0
        assert 0 < spare_bytes <= 256 * MIB

    def test_let_go_in_another_thread_and_inside_garbage_collection(self, pool):
        class Cycle:
            pass

        for _ in range(20):
            cycle = Cycle()
            cycle.itself, cycle.storage = cycle, pool.take(MIB, 0, 512)
            del cycle
        with pool._lock:
            at_once(gc.collect)
        lent_bytes, spare_bytes = settled(pool)
        assert lent_bytes == 0
        assert spare_bytes >= MIB

    def test_let_go_by_autograd(self, pool):
        """Backward drops saved tensors in its own thread, without the GIL at first."""
        weight = torch.ones(MIB, requires_grad=True)
        saved = TensorSpec.of(torch.ones(MIB)).view(pool.take(4 * MIB, 0, 512)).fill_(2.0)
        loss = (weight * saved).sum()
        del saved
        assert settled(pool)[0] == 4 * MIB
        loss.backward()
        assert weight.grad[0] == 2
        assert settled(pool)[0] == 0

    def test_tensors_outlive_the_pool(self):
        pool = ReloadPool(64 * MIB)
        storages = [pool.take(4 * MIB, 64, 512) for _ in range(3)]
        for value, storage in enumerate(storages):
            fill(storage, value)
        pool.close()
        pool.close()
        del pool
        gc.collect()
        for value, storage in enumerate(storages):
            assert ctypes.string_at(storage.data_ptr(), storage.nbytes()) == bytes([value]) * storage.nbytes()
        storages.clear()
        gc.collect()

    def test_memory_is_freed_when_tensors_outlive_the_pool(self):
        pool = ReloadPool(64 * MIB)
        storage = pool.take(32 * MIB, 0, 512)
        fill(storage, 1)
        before = resident_bytes()
        pool.close()
        del storage
        assert before - resident_bytes() > 30 * MIB

    def test_lies_in_huge_pages(self, pool):
        setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
        if not setting.exists() or "[never]" in setting.read_text():
            pytest.skip("this kernel gives no transparent huge pages")
        storage = pool.take(32 * MIB + 100, 64, 512)
        fill(storage, 1)
        assert huge_page_bytes(Region.of(storage)) >= 16 * MIB

    def test_costs_no_more_memory_than_asked_for(self, pool):
        before = resident_bytes()
        storages = [pool.take(3 * MIB + 100, 64, 512) for _ in range(16)]
        for storage in storages:
            fill(storage, 1)
        assert resident_bytes() - before < 16 * 3.1 * MIB


def test_a_forked_child_has_the_addresses_and_not_what_is_there():
    """So nothing else can lie there when the inherited objects die, and no page is shared with a read under way."""
    pool = ReloadPool(64 * MIB)
    held, spare = pool.take(4 * MIB, 0, 512), pool.take(4 * MIB, 0, 512)
    fill(held, 1)
    address = spare.data_ptr()
    del spare

    def look():
        nonlocal pool, held
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
        fixed = 0x100000  # MAP_FIXED_NOREPLACE: fails where something is mapped already
        places = (address, held.data_ptr())
        assert ctypes.string_at(places[1], 1) == b"\x00"
        assert all(libc.mmap(start, 4096, 3, 0x22 | fixed, -1, 0) != start for start in places)
        pool.close()
        del pool, held
        gc.collect()
        assert all(libc.mmap(start, 4096, 3, 0x22 | fixed, -1, 0) == start for start in places), "still mapped"

    assert in_a_fork(look) == 0
    assert ctypes.string_at(held.data_ptr(), 1) == b"\x01"
    pool.close()
