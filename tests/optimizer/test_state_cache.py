"""Optimizer states in host memory, for a device that has memory of its own: the CPU plays that device here."""

import threading
from contextlib import closing, contextmanager

import pytest
import torch

from lightning_ssd.optimizer.store.entry import CopyPin, StoredCopy
from lightning_ssd.optimizer.store.store import StateStore
from lightning_ssd.storage.posix import PosixBackend
from lightning_ssd.telemetry.events import EventLog
from lightning_ssd.tiers.checksum import Sampler
from lightning_ssd.tiers.host import HostTier
from tests.support.faults import always, enospc
from tests.support.late import HeldCopies
from tests.support.optimizer_pairs import Pair, adamw, assert_same_states, files_of, offloaded, store_of, wrapped
from tests.support.patience import PATIENCE_S
from tests.support.ssd_tiers import ssd_tier
from tests.support.state_stores import CPU, NBYTES, put

SHAPES = ((600, 512),) * 8
STATE_BYTES = 8 * 600 * 512 * 8


@pytest.fixture(autouse=True)
def a_device_of_its_own(monkeypatch):
    monkeypatch.setattr("lightning_ssd._environment._is_discrete", lambda device: True)
    monkeypatch.setattr("lightning_ssd.planning.update_memory._MIN_SUBGROUP_BYTES", 256 << 10)


def drive_bytes(optimizer):
    store_of(optimizer).wait_for_writes()
    return optimizer.stats.written_bytes, optimizer.stats.read_bytes


@pytest.mark.parametrize("share", [0.0, 0.5, 1.1])
def test_the_cache_saves_its_share_of_the_moves(share, spill_dir):
    pair = Pair(adamw, SHAPES)
    with wrapped(pair.inner, spill_dir, host_memory=round(share * STATE_BYTES)) as optimizer:
        pair.train(optimizer, 3)
        before = drive_bytes(optimizer)
        pair.train(optimizer, 4)
        pair.check()
        moved = [(after - old) / 4 for after, old in zip(drive_bytes(optimizer), before, strict=True)]
        resident = optimizer.stats.resident_peak_bytes
        assert optimizer.stats.num_subgroups > 30
    for nbytes in moved:
        assert nbytes <= max(1 - share, 0) * STATE_BYTES
        assert nbytes >= (1 - share) * STATE_BYTES - resident - 4 * (256 << 10)
    assert resident < 0.2 * STATE_BYTES, "the device holds what the host was to hold"


@pytest.mark.parametrize("share", [0.5, 1.1])
def test_a_checkpoint_finds_everything_on_the_drive(share, spill_dir):
    pair = Pair(adamw, SHAPES)
    with wrapped(pair.inner, spill_dir, host_memory=round(share * STATE_BYTES)) as optimizer:
        pair.train(optimizer, 2)
        saved = optimizer.state_dict()
        host = files_of(optimizer).host
        assert host.used_bytes == 0, "a snapshot would have to copy this"
        assert_same_states(saved, pair.twin.state_dict())
        expected = {n: {k: v.clone() for k, v in s.items()} for n, s in saved["state"].items()}
        pair.train(optimizer, 2)
        assert host.used_bytes > 0.4 * STATE_BYTES
        for number, state in saved["state"].items():
            assert all(torch.equal(value, expected[number][key]) for key, value in state.items())
        pair.check(optimizer)
        pair.step(optimizer)
    pair.check(optimizer)  # after close


def test_a_full_drive_costs_no_checkpoint(spill_dir):
    pair = Pair(adamw, SHAPES)
    with offloaded(pair.inner, spill_dir, host_memory=STATE_BYTES) as (optimizer, drive):
        pair.train(optimizer, 2)
        drive.fail_write = always(enospc)
        pair.check(optimizer)
        with pytest.warns(UserWarning, match="stay in memory, exact as before"):
            pair.step(optimizer)
        drive.fail_write = None
        pair.train(optimizer, 2)
        pair.check(optimizer)


# -- the store by itself, with copies that run when the test says so ---------------------------------------------------


@contextmanager
def store_with(copies, directory, *, num_slots=2):
    backend = PosixBackend([directory], direct=False)
    with (
        ssd_tier(backend, directory, sampler=Sampler("full")) as ssd,
        closing(HostTier(1 << 20, copies, pin=False, events=EventLog())) as host,
        closing(StateStore(ssd, device=CPU, num_slots=num_slots, copies=copies, host=host)) as store,
    ):
        store.add(6)
        try:
            yield store
        finally:
            copies.free_run()


def test_what_comes_from_host_memory_is_waited_for(spill_dir):
    copies = HeldCopies(held=False)
    with store_with(copies, spill_dir) as store:
        put(store, 0, 7)
        store.wait_for_writes()
        copies.held = True
        found = []

        def take():
            storage = store.take(0)
            assert storage is not None
            found.append(int(torch.empty(0, dtype=torch.uint8).set_(storage)[-1]))

        thread = threading.Thread(target=take)
        thread.start()
        copies.wait_queued(2)
        thread.join(0.3)
        assert thread.is_alive(), "taken before its bytes were there"
        copies.let_through(1)
        thread.join(20)
        assert found == [7]


def test_memory_is_not_lent_again_while_a_copy_runs(spill_dir):
    copies = HeldCopies(held=False)
    with store_with(copies, spill_dir, num_slots=1) as store:
        put(store, 0, 7)
        store.wait_for_writes()
        copies.held = True
        store.prefetch([0])
        copies.wait_queued(2)
        evicted = threading.Event()

        def evict():
            while not store.in_memory():
                pass
            store.evict([0])
            evicted.set()

        thread = threading.Thread(target=evict)
        thread.start()
        assert not evicted.wait(0.3)
        copies.let_through(1)
        assert evicted.wait(PATIENCE_S)
        thread.join()
        assert store.in_memory() == []


def test_a_held_copy_may_die_under_the_lock_of_host_memory(spill_dir):
    """The garbage collector may run while the very thread that it runs in holds that lock."""
    with store_with(HeldCopies(held=False), spill_dir) as store:
        put(store, 0, 7)
        store.wait_for_writes()
        held = store.hold(0)
        assert isinstance(held, StoredCopy)
        assert held.is_cached
        put(store, 0, 8)
        store.wait_for_writes()
        assert store._host.used_bytes == 2 * NBYTES
        holds = [CopyPin()]
        store.release_with(holds[0], [held])
        with store._host._lock, store._host.arena._lock:
            thread = threading.Thread(target=holds.clear, daemon=True)  # the last reference
            thread.start()
            thread.join(5)
            assert not thread.is_alive(), "it waits for a lock"
        put(store, 1, 9)
        store.wait_for_writes()
        assert store._host.used_bytes == 2 * NBYTES, "what was held is lost"
