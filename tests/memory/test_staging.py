"""Staging buffers: aligned, used again, and pinned where a device copies."""

import ctypes
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from lightning_ssd.errors import OffloaderClosedError
from lightning_ssd.memory import pools
from lightning_ssd.memory.pools import ReloadPool, StagingPool
from tests.support.patience import PATIENCE_S
from tests.support.threads import at_once

MIB = 1 << 20


class TestStagingPool:
    @pytest.fixture
    def pool(self):
        pool = StagingPool()
        yield pool
        pool.close()

    @pytest.mark.parametrize("nbytes", [1, 4095, 4096, 5000, MIB + 1, 3 * MIB])
    def test_buffers_are_aligned_exact_and_writable(self, pool, nbytes):
        with pool.lease(nbytes) as region:
            assert region.nbytes == nbytes
            assert region.address % 4096 == 0
            assert pool.lent_bytes == -(-nbytes // 4096) * 4096
            ctypes.memset(region.address, 7, nbytes)
        assert pool.lent_bytes == 0

    def test_there_are_no_more_than_threads_that_lease(self, pool):
        for nbytes in (3 * MIB, MIB, 4 * MIB, 4096):
            with pool.lease(nbytes), pool.lease(nbytes):
                assert pool.lent_bytes <= 8 * MIB
        assert [block.nbytes for block in pool._spare] == [4 * MIB] * 2

    def test_threads_never_share_a_buffer(self, pool):
        meet, wrong = threading.Barrier(8, timeout=PATIENCE_S), []

        def work(number):
            for turn in range(100):
                with pool.lease(((number + turn) % 8 * MIB) // 8 + 1) as region:
                    ctypes.memset(region.address, number, region.nbytes)
                    meet.wait()
                    if ctypes.string_at(region.address, region.nbytes) != bytes([number]) * region.nbytes:
                        wrong.append((number, turn))

        at_once(*(lambda number=number: work(number) for number in range(8)))
        assert wrong == []
        assert pool.lent_bytes == 0
        assert len(pool._spare) <= 8

    def test_a_failing_body_gives_its_buffer_back(self, pool):
        def fail():
            with pool.lease(4096):
                raise KeyError("injected")

        with pytest.raises(KeyError):
            fail()
        assert pool.lent_bytes == 0

    def test_close(self, pool):
        with pool.lease(4096) as region:
            pool.close()
            pool.close()
            ctypes.memset(region.address, 1, region.nbytes)
        assert pool.lent_bytes == len(pool._spare) == 0
        with pytest.raises(OffloaderClosedError, match="after the pool was closed"), pool.lease(1):
            pass

    def test_pins_each_buffer_once_in_the_context_of_its_device_and_unpins_it(self, monkeypatch):
        """A worker's own device is 0, where another process may train."""
        calls, current = [], ["cuda:0"]

        @contextmanager
        def on(device):
            current.append(str(device))
            yield
            current.pop()

        cudart = SimpleNamespace(
            cudaHostRegister=lambda address, nbytes, flags: calls.append(("pin", address, current[-1], flags)) or 0,
            cudaHostUnregister=lambda address: calls.append(("unpin", address, current[-1])) or 0,
        )
        monkeypatch.setattr(pools.torch.cuda, "cudart", lambda: cudart)
        monkeypatch.setattr(pools.torch.cuda, "device", on)
        pool, leased = StagingPool(pin=True, device=torch.device("cuda", 3)), []
        for nbytes in (MIB, MIB, MIB, 4 * MIB):
            with pool.lease(nbytes) as region:
                leased.append(region.address)
        pool.close()
        small, large = leased[0], leased[3]
        assert calls == [call for at in (small, large) for call in (("pin", at, "cuda:3", 1), ("unpin", at, "cuda:3"))]

    def test_goes_on_unpinned_with_one_warning(self, monkeypatch, caplog):
        monkeypatch.setattr(pools.torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2))
        pool = StagingPool(pin=True)
        with pool.lease(MIB), pool.lease(2 * MIB):
            pass
        pool.close()
        assert [record.message for record in caplog.records] == [
            "CUDA could not lock staging memory (error 2); copies to and from the device are slower"
        ]

    def test_a_buffer_that_could_not_be_made_takes_no_room(self, monkeypatch):
        def lost(*_):
            raise RuntimeError("the device is lost")

        monkeypatch.setattr(pools.torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lost))
        pool = StagingPool(pin=True)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the device is lost"), pool.lease(4 * MIB):
                pass
            assert pool.lent_bytes == 0
        pool.close()

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_pinned_for_real(self):
        pool = StagingPool(pin=True)
        with pool.lease(MIB) as region:
            host = torch.frombuffer((ctypes.c_ubyte * MIB).from_address(region.address), dtype=torch.uint8)
            assert host.is_pinned()
        pool.close()


def test_no_memory_is_said_so():
    pool = ReloadPool(0)
    with pytest.raises(MemoryError, match="free host memory"):
        pool.take(1 << 60, 0, 512)
    with pytest.raises(MemoryError), StagingPool().lease(1 << 60):
        pass
