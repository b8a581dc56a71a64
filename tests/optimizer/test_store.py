"""Where subgroups of states are: what was put comes back, nothing waits for ever, memory is bounded."""

import threading
from functools import partial

import pytest
import torch

from lightning_ssd.common.tensors import StorageKey
from lightning_ssd.errors import OffloaderClosedError, StorageError
from lightning_ssd.memory.pools import StagingPool
from lightning_ssd.optimizer.store.buffers import BufferPool
from lightning_ssd.optimizer.store.entry import CopyPin, DeferredReleases, StoredCopy
from lightning_ssd.optimizer.store.store import StateStore
from lightning_ssd.tiers.checksum import Sampler
from lightning_ssd.tiers.copy_paths import StagedMover
from tests.support.faults import always, eio
from tests.support.host_traffic import wait_until
from tests.support.late import StreamOfThread
from tests.support.patience import PATIENCE_S
from tests.support.ssd_tiers import ssd_tier
from tests.support.state_stores import (
    CPU,
    NBYTES,
    assert_all_hold,
    assert_holds,
    mapped_bytes,
    put,
    put_all,
    store_on,
    used_bytes,
    whole,
    within_patience,
)
from tests.support.threads import at_once


def test_new_memory_comes_before_reads_ahead_of_time(drive, tmp_path):
    """Else all that was asked for would be read, and dropped, before there were new memory."""
    with store_on(drive, tmp_path, num_slots=3) as store:
        put_all(store, range(6))
        store.flush()
        store.evict(range(6))
        before = drive.num_reads
        store.prefetch([1, 2, 3, 4, 5])
        store.take(0)
        storage = store.allocate(2 * NBYTES)
        store.give(0, storage, is_dirty=True, keep=True)
        assert drive.num_reads - before <= 5 * NBYTES // 4096
        within_patience(lambda: assert_all_hold(store, range(1, 6)))


@pytest.mark.parametrize("room", [2, 3, 4])
@pytest.mark.parametrize("is_dirty", [True, False])
def test_kept_subgroups_go_before_memory_runs_out(room, is_dirty, drive, tmp_path, monkeypatch):
    """Fewer fit than slots were promised: activations or gradients have taken the memory."""
    with store_on(drive, tmp_path, num_slots=5) as store:
        take = store.slots.take

        def limited(nbytes):
            if store.slots.lent_bytes + nbytes > room * NBYTES:
                raise torch.OutOfMemoryError("injected")
            return take(nbytes)

        monkeypatch.setattr(store.slots, "take", limited)
        for index in range(6):
            within_patience(lambda index=index: put(store, index, index, keep=True))
        if not is_dirty:
            store.flush()
        store.prefetch(range(6))
        within_patience(lambda: assert_all_hold(store, range(6)))
        assert store.slots.peak_bytes <= room * NBYTES
        storage = store.take(0)
        with pytest.raises(torch.OutOfMemoryError):
            store.allocate(room * NBYTES)
        store.give(0, storage, is_dirty=False, keep=False)


def test_who_makes_room_waits_for_the_stream_that_has_changed_the_states(drive, tmp_path, monkeypatch):
    """A worker lets go of a subgroup because memory has run out: its own stream knows nothing of the update."""
    copies, may_compute = StreamOfThread(), threading.Event()
    mover = StagedMover(drive, StagingPool(), copies)
    with ssd_tier(drive, tmp_path, mover=mover, sampler=Sampler("full")) as tier:
        store = StateStore(tier, device=CPU, num_slots=2, copies=copies)
        store.add(3)
        put_all(store, range(3))
        store.wait_for_writes()
        changed, other = store.take(0), store.take(1)
        assert changed is not None
        drive.may_move.clear()
        store.give(1, other, is_dirty=True, keep=False)

        def update():
            may_compute.wait(PATIENCE_S)
            whole(changed).fill_(9)

        copies.work(update)
        store.give(0, changed, is_dirty=True, keep=True)
        del other
        take = store.slots.take

        def limited(nbytes):
            if store.slots.num_lent:
                raise torch.OutOfMemoryError("injected")
            return take(nbytes)

        monkeypatch.setattr(store.slots, "take", limited)
        wanting = threading.Thread(target=lambda: store.give(2, store.take(2), is_dirty=False, keep=False))
        wanting.start()
        drive.may_move.set()
        wanting.join(0.2)
        may_compute.set()
        wanting.join(PATIENCE_S)
        assert_all_hold(store, (1, 2))
        assert_holds(store, 0, 9)
        store.close()
    copies.close()


def test_memory_of_an_interrupted_step_comes_back(drive, tmp_path):
    with store_on(drive, tmp_path) as store:
        for _ in range(5):
            store.take(0)
            store.allocate(NBYTES)  # and here Ctrl-C comes
            store.forget(0)
        put(store, 0, 1)
        store.flush()
        store.evict([0])
        assert store.slots.lent_bytes == 0
        assert store.num_slots == 2


def test_a_dying_holder_waits_for_no_lock(drive, tmp_path):
    """It may die in the garbage collector, under a lock that the owner of the store's lock waits for."""
    with store_on(drive, tmp_path) as store:
        put(store, 0, 1)
        store.flush()
        held = store.hold(0)
        assert isinstance(held, StoredCopy)
        put(store, 0, 2)
        store.flush()
        assert used_bytes(store) == 2 * NBYTES
        hold = CopyPin()
        store.release_with(hold, [held])
        with store._lock:
            del hold  # the last reference
        store.evict([0])
        assert used_bytes(store) == NBYTES
        assert_holds(store, 0, 2)


def test_after_close_nobody_waits(drive, tmp_path):
    with store_on(drive, tmp_path) as store:
        put(store, 0, 1)
        store.flush()
        store.evict([0])
        store.close()
        with pytest.raises(OffloaderClosedError):
            store.take(0)
        assert store.slots.lent_bytes == mapped_bytes(store) == 0


@pytest.mark.parametrize("num_slots", [2, 3, 7])
def test_random_use_is_as_a_dictionary(num_slots, drive, tmp_path):
    """Takes, puts, keeps, evictions, wishes, flushes and held copies, while writes fail now and then."""
    generator = torch.Generator().manual_seed(num_slots)

    def draw(n):
        return int(torch.randint(n, (), generator=generator))

    def some():
        return torch.randperm(6, generator=generator)[: draw(7)].tolist()

    expected = {}
    held = []
    drive.fail_write = lambda index: eio() if index % 11 == 3 else None
    with store_on(drive, tmp_path, num_slots=num_slots) as store:

        def act():
            for step in range(400):
                act_once(step)

        def act_once(step):
            index, value = draw(6), draw(256)
            match draw(7):
                case 0:
                    put(store, index, value, keep=bool(draw(2)))
                    expected[index] = value
                case 1 if index in expected:
                    assert_holds(store, index, expected[index])
                case 2:
                    store.prefetch(some())
                case 3:
                    store.evict(some())
                case 4 if (copy := store.hold(index)) is not None and isinstance(copy, StoredCopy):
                    held.append(copy)
                case 5 if held:
                    store.release_with(CopyPin(), [held.pop(draw(len(held)))])
                case 6 if step % 5 == 0:
                    store.forget(index)
                    expected.pop(index, None)
            with store._lock:  # workers change both
                assert store.slots.lent_bytes <= store.num_slots * NBYTES

        within_patience(act)
        store.release_with(CopyPin(), held)
        store.wait_for_writes()  # one of them may be about to fail
        drive.fail_write = None
        store.flush()
        assert used_bytes(store) == len(expected) * NBYTES
        assert store.num_slots <= num_slots + 1
        for index, value in expected.items():
            assert_holds(store, index, value)


def test_a_copy_in_memory_is_a_use_on_the_current_stream(drive, tmp_path):
    """Memory that a worker has allocated on another stream must not be lent again before the copy has been made."""
    with store_on(drive, tmp_path) as store:
        put(store, 0, 7, keep=True)
        calls = []
        store.slots.used_here = lambda storage: calls.append(storage.data_ptr())
        held = store.hold(0)
        assert isinstance(held, torch.UntypedStorage)
        expected = store._homes[0].storage
        assert calls == [expected.data_ptr()]
        assert bool((whole(held) == 7).all())


def test_memory_of_a_device_is_free_once_it_is_written(drive, tmp_path, monkeypatch):
    """There PyTorch's allocator gives each subgroup memory of its own: whoever held on to it, if only what had asked
    for its write, would keep all states on the card. On a CPU slots are used again, and nobody would see it.
    """
    made = []

    def take(pool, nbytes):
        storage = torch.empty(nbytes, dtype=torch.uint8, device="cpu").untyped_storage()
        made.append(StorageKey(storage))
        return storage

    monkeypatch.setattr(BufferPool, "_take", take)
    with store_on(drive, tmp_path, num_slots=2) as store:
        put_all(store, range(6))
        store.wait_for_writes()
        assert len(made) == 6
        assert not any(key.alive() for key in made)
        assert_all_hold(store, range(6))
        assert sum(key.alive() for key in made) <= 2


def test_each_stuck_subgroup_has_one_more_slot_until_it_is_written(drive, tmp_path):
    """Failures that come and go must not let memory grow for ever."""
    drive.fail_write = always(eio)
    with store_on(drive, tmp_path) as store:
        for value in range(4):
            put_all(store, range(3), value)
            store.wait_for_writes()
            assert store.num_slots == 2 + 3
        drive.fail_write = None
        store.flush()
        assert store.num_slots == 2
        store.evict(range(6))
        assert store.slots.lent_bytes == 0
        assert mapped_bytes(store) <= 2 * NBYTES
        assert_all_hold(store, range(3), 3)


def test_a_write_that_fails_while_the_drives_close_kills_no_worker(drive, tmp_path, monkeypatch):
    died = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    drive.fail_write = always(eio)
    with store_on(drive, tmp_path) as store:
        store.prefetch([])
        drive.may_move.clear()
        put(store, 0, 1)
        wait_until(lambda: drive.num_writes or store.tier._writes._num_active)
        closing = threading.Thread(target=store.tier.close)
        closing.start()
        drive.may_move.set()
        closing.join(PATIENCE_S)
        within_patience(store.wait_for_writes)
        assert store.in_memory() == [0]
    assert not died


def test_a_read_that_fails_is_told_to_who_takes_it_and_to_nobody_later(drive, tmp_path):
    """Also where it was read ahead of time, and states have been replaced since."""
    with store_on(drive, tmp_path, num_slots=4) as store:
        put_all(store, range(6), 1)
        store.flush()
        store.evict(range(6))
        drive.fail_read = always(eio)
        store.prefetch(range(6))
        with pytest.raises(StorageError, match="injected") as caught:
            store.take(0)
        assert caught.value.__notes__ == ["This was a read of the optimizer states of subgroup 0."]
        drive.fail_read = None
        for index in range(6):
            store.forget(index)
            put(store, index, 7)
        assert_all_hold(store, range(6), 7)
        store.flush()
        assert used_bytes(store) == 6 * NBYTES


def test_no_memory_for_a_read_is_an_error_not_a_hang(drive, tmp_path, monkeypatch):
    """The read begins in a worker, as soon as a write has freed memory."""
    with store_on(drive, tmp_path) as store:
        put(store, 0, 1)
        store.flush()
        store.evict([0])
        put(store, 1, 1, keep=True)
        put(store, 2, 1, keep=True)
        drive.may_move.clear()
        store.evict([1])
        store.prefetch([0])

        def refuse(nbytes):
            raise MemoryError("injected: no memory")

        monkeypatch.setattr(store.slots, "take", refuse)
        drive.may_move.set()
        with pytest.raises(MemoryError, match="injected"):
            within_patience(lambda: store.take(0))
        monkeypatch.undo()
        assert_holds(store, 0, 1)
        put(store, 3, 4)
        store.flush()


class Tier:
    def __init__(self):
        self.freed = []

    def free(self, stored):
        self.freed.append(stored)


def test_what_another_one_holds_stays():
    tier, returned = Tier(), DeferredReleases()
    copy = StoredCopy(tier, "shared")
    copy.num_holders += 1
    for freed in ([], ["shared"]):
        returned.watch(CopyPin(), [copy])  # dies at once
        returned.give_back()
        assert tier.freed == freed


def test_no_note_is_lost_wherever_holders_die():
    tier, returned = Tier(), DeferredReleases()
    holds = [CopyPin() for _ in range(2000)]
    for number, hold in enumerate(holds):
        returned.watch(hold, [StoredCopy(tier, number)])
    del hold

    def work(first):
        for number in range(first, first + 500):
            holds[number] = None
            if first == 0:  # the owner, who has the lock
                returned.give_back()

    at_once(*(partial(work, 500 * thread) for thread in range(4)))
    returned.give_back()
    assert sorted(tier.freed) == list(range(2000))
