"""Host memory for a card's activations is locked by a thread of its own, and used as far as it is locked."""

import threading
from contextlib import contextmanager

import pytest
import torch

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy, _assembly
from lightning_ssd.activations import saved_pass
from lightning_ssd.storage import backend
from tests.support.host_traffic import wait_until
from tests.support.late import late_copies
from tests.support.pretended_driver import AHEAD

MIB = 1 << 20
LENGTH, SIDE = 12, 512


@pytest.fixture(autouse=True)
def locks(monkeypatch):
    for module in (_assembly, backend):
        monkeypatch.setattr(module, "locks_host_memory", lambda device: True)


def step(offloader=None):
    x = torch.linspace(-1, 1, SIDE * SIDE).reshape(SIDE, SIDE).requires_grad_()
    if offloader is None:
        y = x
        for _ in range(LENGTH):
            y = y.sin()
        y.sum().backward()
        return x.grad
    with offloader.saved_tensors():
        y = x
        for _ in range(LENGTH):
            y = y.sin()
        loss = y.sum()
    offloader.flush()
    loss.backward()
    offloader.end_backward()
    offloader.wait_for_plan()
    return x.grad


@contextmanager
def opened(directory, activations):
    policy = OffloadPolicy(activations=activations, max_slowdown=1000.0)
    hardware = HardwareProfile(paths=[directory], allow_unsuitable_paths=True, host_memory="32MiB")
    with late_copies(max_delay_s=0) as copies, Offloader(policy=policy, hardware=hardware, _copies=copies) as offloader:
        yield offloader


def end_locking(offloader, driver):
    driver.may_go.set()
    host = offloader._parts.tiers.host
    wait_until(lambda: host.capacity_bytes >= LENGTH * MIB)


def test_what_is_locked_in_the_midst_of_training_is_used_from_then_on(driver, tmp_path, monkeypatch):
    monkeypatch.setattr(saved_pass, "storages_to_keep", lambda *args, **kwargs: frozenset())
    expected = step()
    with opened(tmp_path, "offload") as offloader:
        found = [step(offloader) for _ in range(3)]
        before = offloader.stats
        end_locking(offloader, driver)  # first: closing waits for it
        assert before.bytes_host == 0, "nothing waits for memory that is not locked"
        assert before.bytes_written >= 3 * (LENGTH - 1) * MIB
        found += [step(offloader) for _ in range(3)]
        after = offloader.stats
        assert after.bytes_host >= 3 * (LENGTH - 1) * MIB
        assert after.bytes_written == before.bytes_written
    assert all(torch.equal(one, expected) for one in found)
    locked = [nbytes for what, _, nbytes in driver.calls if what == "lock"]
    by_workers = [nbytes for name, nbytes in zip(driver.threads, locked, strict=True) if name != AHEAD]
    assert max(by_workers) <= 16 * MIB, "staging buffers"
    assert threading.current_thread().name not in driver.threads


def test_a_plan_is_made_again_when_more_is_locked(driver, tmp_path, caplog):
    caplog.set_level("INFO")
    expected = step()
    with opened(tmp_path, "auto") as offloader:
        found = [step(offloader) for _ in range(4)]
        end_locking(offloader, driver)
        found += [step(offloader) for _ in range(2)]
    assert all(torch.equal(one, expected) for one in found)
    assert "planning again: 33554432 bytes of host memory are there, not 0" in caplog.messages
