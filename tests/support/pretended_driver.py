"""CUDA's part in locking host memory, without a card."""

import threading
from types import SimpleNamespace

import pytest

from lightning_ssd.memory import mmap
from lightning_ssd.tiers import host_arena
from tests.support.patience import PATIENCE_S

AHEAD = "lightning_ssd-host-lock"
"""The thread that locks ahead."""


@pytest.fixture
def driver(monkeypatch):
    """Notes what is locked, by whom; ``may_go`` holds the thread up that locks ahead, in slabs of 4 MiB, ``codes`` are
    the answers but for success."""
    monkeypatch.setattr(host_arena, "_AHEAD_BYTES", 4 << 20)
    driver = SimpleNamespace(calls=[], locked={}, threads=[], codes=iter(()), looks=lambda address, nbytes: None)
    driver.begun, driver.may_go = threading.Event(), threading.Event()

    def register(address, nbytes, flags):
        driver.threads.append(threading.current_thread().name)
        driver.calls.append(("lock", address, nbytes))
        driver.looks(address, nbytes)
        driver.begun.set()
        assert driver.threads[-1] != AHEAD or driver.may_go.wait(PATIENCE_S)
        code = next(driver.codes, 0)
        if not code:
            driver.locked[address] = nbytes
        return code

    def unregister(address):
        driver.calls.append(("unlock", address, 0))
        del driver.locked[address]
        return 0

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(mmap.torch.cuda, "cudart", lambda: cudart)
    yield driver
    driver.may_go.set()
