"""Where subgroups of states are: what was put comes back, nothing waits for ever, memory is bounded."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch

from lightning_ssd.common.tensors import StorageKey
from lightning_ssd.errors import OffloaderClosedError
from lightning_ssd.memory.pools import StagingPool
from lightning_ssd.optimizer.store.buffers import BufferPool
from lightning_ssd.optimizer.store.entry import CopyPin, StoredCopy
from lightning_ssd.optimizer.store.store import StateStore
from lightning_ssd.telemetry.events import EventLog
from lightning_ssd.tiers.checksum import Sampler
from lightning_ssd.tiers.copy_paths import StagedMover
from lightning_ssd.tiers.ssd import SsdTier
from tests.support.faults import eio
from tests.support.late import StreamOfThread
from tests.support.patience import PATIENCE_S
from tests.support.state_stores import (
    CPU,
    NBYTES,
    Drive,
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


def test_what_was_put_comes_back(drive: Drive, tmp_path: Path) -> None:
    with store_on((drive, tmp_path)) as store:
        assert store.take(5) is None
        store.give(5, None, is_dirty=True, keep=False)
        for value in (1, 2):
            for index in range(5):
                put(store, index, 10 * value + index)
            store.prefetch(range(5))
            for index in range(5):
                assert_holds(store, index, 10 * value + index)
        store.wait_for_writes()
        assert used_bytes(store) == 5 * NBYTES
        assert store.slots.peak_bytes <= 2 * NBYTES
        assert mapped_bytes(store) <= 2 * NBYTES


def test_new_memory_comes_before_reads_ahead_of_time(drive: Drive, tmp_path: Path) -> None:
    """Else all that was asked for would be read, and dropped, before there were new memory."""
    with store_on((drive, tmp_path), num_slots=3) as store:
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
def test_kept_subgroups_go_before_memory_runs_out(
    room: int, is_dirty: bool, drive: Drive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer fit than slots were promised: activations or gradients have taken the memory."""
    with store_on((drive, tmp_path), num_slots=5) as store:
        take = store.slots.take

        def limited(nbytes: int) -> torch.UntypedStorage:
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


def test_who_makes_room_waits_for_the_stream_that_has_changed_the_states(
    drive: Drive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker lets go of a subgroup because memory has run out: its own stream knows nothing of the update."""
    copies, may_compute = StreamOfThread(), threading.Event()
    mover = StagedMover(drive, StagingPool(), copies)
    with closing(SsdTier(drive, mover, [tmp_path], events=EventLog(), sampler=Sampler("full"))) as tier:
        store = StateStore([tier], device=CPU, num_slots=2, copies=copies)
        store.add([0, 0, 0])
        put_all(store, range(3))
        store.wait_for_writes()
        changed, other = store.take(0), store.take(1)
        assert changed is not None
        drive.may_move.clear()
        store.give(1, other, is_dirty=True, keep=False)

        def update() -> None:
            may_compute.wait(PATIENCE_S)
            whole(changed).fill_(9)

        copies.work(update)
        store.give(0, changed, is_dirty=True, keep=True)
        del other
        take = store.slots.take

        def limited(nbytes: int) -> torch.UntypedStorage:
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


def test_memory_of_an_interrupted_step_comes_back(drive: Drive, tmp_path: Path) -> None:
    with store_on((drive, tmp_path)) as store:
        for _ in range(5):
            store.take(0)
            store.allocate(NBYTES)  # and here Ctrl-C comes
            store.forget(0)
        put(store, 0, 1)
        store.flush()
        store.evict([0])
        assert store.slots.lent_bytes == 0
        assert store.num_slots == 2


def test_a_dying_holder_waits_for_no_lock(drive: Drive, tmp_path: Path) -> None:
    """It may die in the garbage collector, under a lock that the owner of the store's lock waits for."""
    with store_on((drive, tmp_path)) as store:
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


def test_after_close_nobody_waits(drive: Drive, tmp_path: Path) -> None:
    with store_on((drive, tmp_path)) as store:
        put(store, 0, 1)
        store.flush()
        store.evict([0])
        store.close()
        with pytest.raises(OffloaderClosedError):
            store.take(0)
        assert store.slots.lent_bytes == mapped_bytes(store) == 0


@pytest.mark.parametrize("num_slots", [2, 3, 7])
def test_random_use_is_as_a_dictionary(num_slots: int, drive: Drive, tmp_path: Path) -> None:
    """Takes, puts, keeps, evictions, wishes, flushes and held copies, while writes fail now and then."""
    generator = torch.Generator().manual_seed(num_slots)

    def draw(n: int) -> int:
        return int(torch.randint(n, (), generator=generator))

    def some() -> Sequence[int]:
        return torch.randperm(6, generator=generator)[: draw(7)].tolist()

    expected: dict[int, int] = {}
    held: list[StoredCopy] = []
    drive.fail_write = lambda index: eio() if index % 11 == 3 else None
    with store_on((drive, tmp_path), num_slots=num_slots) as store:

        def act() -> None:
            for step in range(400):
                act_once(step)

        def act_once(step: int) -> None:
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


def test_a_copy_in_memory_is_a_use_on_the_current_stream(drive: Drive, tmp_path: Path) -> None:
    """Memory that a worker has allocated on another stream must not be lent again before the copy has been made."""
    with store_on((drive, tmp_path)) as store:
        put(store, 0, 7, keep=True)
        calls: list[int] = []
        store.slots.used_here = lambda storage: calls.append(storage.data_ptr())  # type: ignore[method-assign]
        held = store.hold(0)
        assert isinstance(held, torch.UntypedStorage)
        expected = store._homes[0].storage
        assert expected is not None
        assert calls == [expected.data_ptr()]
        assert bool((whole(held) == 7).all())


def test_memory_of_a_device_is_free_once_it_is_written(
    drive: Drive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There PyTorch's allocator gives each subgroup memory of its own: whoever held on to it, if only what had asked
    for its write, would keep all states on the card. On a CPU slots are used again, and nobody would see it.
    """
    made = []

    def take(pool: BufferPool, nbytes: int) -> torch.UntypedStorage:
        storage = torch.empty(nbytes, dtype=torch.uint8, device="cpu").untyped_storage()
        made.append(StorageKey(storage))
        return storage

    monkeypatch.setattr(BufferPool, "_take", take)
    with store_on((drive, tmp_path), num_slots=2) as store:
        put_all(store, range(6))
        store.wait_for_writes()
        assert len(made) == 6
        assert not any(key.alive() for key in made)
        assert_all_hold(store, range(6))
        assert sum(key.alive() for key in made) <= 2
