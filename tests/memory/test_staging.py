"""Staging buffers: aligned, used again, and pinned where a device copies."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from lightning_ssd.errors import OffloaderClosedError, StorageError
from lightning_ssd.memory import pools
from lightning_ssd.memory.pools import ReloadPool, SlabPool, StagingPool
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
        with pool.lease(nbytes) as buffer:
            assert buffer.nbytes == nbytes
            assert buffer.data_ptr() % 4096 == 0
            assert pool.lent_bytes == -(-nbytes // 4096) * 4096
            buffer.fill_(7)
        assert pool.lent_bytes == 0

    def test_there_are_no_more_than_threads_that_lease(self, pool):
        for nbytes in (3 * MIB, MIB, 4 * MIB, 4096):
            with pool.lease(nbytes), pool.lease(nbytes):
                assert pool.lent_bytes <= 8 * MIB
        assert [buffer.nbytes for buffer in pool._spare] == [4 * MIB] * 2

    def test_threads_never_share_a_buffer(self, pool):
        meet, wrong = threading.Barrier(8, timeout=PATIENCE_S), []

        def work(number):
            for turn in range(100):
                with pool.lease(((number + turn) % 8 * MIB) // 8 + 1) as buffer:
                    buffer.fill_(number)
                    meet.wait()
                    if not (buffer == number).all():
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
        with pool.lease(4096) as buffer:
            pool.close()
            pool.close()
            buffer.fill_(1)
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
            with pool.lease(nbytes) as buffer:
                leased.append(buffer.data_ptr())
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
        with pool.lease(MIB) as buffer:
            assert buffer.is_pinned()
        pool.close()


class Registrations:
    """Of slabs; the ``refused``-th one fails."""

    def __init__(self, refused=None):
        self.calls, self.open, self._refused = 0, {}, refused

    def __call__(self, slab):
        self.calls += 1
        if self.calls == self._refused:
            raise StorageError("no room in the BAR (test)")
        self.open[slab.address] = slab.nbytes
        return lambda: self.open.pop(slab.address)


class TestSlabPool:
    def test_each_slab_is_registered_once_whole_pages_of_a_gpu(self):
        register = Registrations()
        pool = SlabPool(torch.device("cpu"), MIB, 2, register)
        assert list(register.open.values()) == [MIB, MIB]
        assert not any(address % (64 << 10) for address in register.open)
        for nbytes in (4096, MIB, 8192):
            with pool.lease(nbytes) as one, pool.lease(nbytes) as other:
                assert {one.data_ptr(), other.data_ptr()} == set(register.open)
                assert one.nbytes == nbytes
        with pytest.raises(ValueError, match="1,048,577 bytes were asked for of"), pool.lease(MIB + 1):
            pass
        pool.close()
        assert not register.open

    def test_a_slab_that_is_lent_is_deregistered_when_it_comes_back(self):
        register = Registrations()
        pool = SlabPool(torch.device("cpu"), MIB, 1, register)
        with pool.lease(1):
            pool.close()
            assert register.open
        assert not register.open

    def test_threads_wait_for_a_slab_where_a_device_has_no_room_for_more(self, caplog):
        register, came = Registrations(refused=3), threading.Event()
        pool = SlabPool(torch.device("cpu"), MIB, 4, register)
        assert "2 of 4 buffers of device memory could be registered (" in caplog.text

        def lease():
            with pool.lease(1):
                came.set()

        thread = threading.Thread(target=lease)
        with pool.lease(1):
            with pool.lease(1):
                thread.start()
                assert not came.wait(0.1)
            assert came.wait(PATIENCE_S)
        thread.join(PATIENCE_S)
        assert register.calls == 3
        pool.close()
        assert not register.open

    def test_a_device_without_room_for_one_is_refused(self):
        register = Registrations(refused=1)
        with pytest.raises(StorageError, match="no room in the BAR"):
            SlabPool(torch.device("cpu"), MIB, 4, register)

    def test_one_that_cannot_be_deregistered_keeps_no_other_one(self):
        register = Registrations()
        pool = SlabPool(torch.device("cpu"), MIB, 3, register)
        first = next(iter(register.open))
        gone = pool._undo[first]

        def fail():
            gone()
            raise StorageError(5, "busy")

        pool._undo[first] = fail
        with pytest.raises(StorageError, match="busy"):
            pool.close()
        assert not register.open


def test_no_memory_is_said_so():
    pool = ReloadPool(0)
    with pytest.raises(MemoryError, match="free host memory"):
        pool.take(1 << 60, 0, 512)
    with pytest.raises(MemoryError), StagingPool().lease(1 << 60):
        pass
