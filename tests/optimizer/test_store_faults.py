"""A store of optimizer states on drives that fail: no state is lost, errors reach who asks, memory does not grow."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from lightning_ssd.errors import StorageError
from lightning_ssd.optimizer.store.entry import CopyPin, StoredCopy
from tests.support.faults import always, eio, enospc
from tests.support.patience import PATIENCE_S
from tests.support.state_stores import (
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


def test_each_stuck_subgroup_has_one_more_slot_until_it_is_written(drive: Drive, tmp_path: Path) -> None:
    """Failures that come and go must not let memory grow for ever."""
    drive.fail_write = always(eio)
    with store_on((drive, tmp_path)) as store:
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


def test_a_write_that_fails_leaves_the_last_good_copy(drive: Drive, tmp_path: Path) -> None:
    with store_on((drive, tmp_path)) as store:
        put(store, 0, 1)
        store.flush()
        held = store.hold(0)
        assert isinstance(held, StoredCopy)
        drive.fail_write = always(eio)
        put(store, 0, 2)
        store.wait_for_writes()
        assert used_bytes(store) == NBYTES
        in_memory = store.hold(0)
        assert isinstance(in_memory, torch.UntypedStorage)
        assert bool((whole(in_memory) == 2).all())
        assert_holds(store, 0, 2)
        store.release_with(CopyPin(), [held])


def test_the_other_directory_takes_over(drive: Drive, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    drive.fail_write = always(enospc)
    with store_on((drive, tmp_path), (Drive(tmp_path / "other"), tmp_path / "other")) as store:
        for value in (1, 2):
            put_all(store, range(6), value)
        store.flush()
        assert store.take_warning() is None
        assert set(store.paths) == {1}
        assert store.num_slots == 2
        store.assign([0] * 6)  # as if the rates said so
        for index in range(6):
            assert_holds(store, index, 2)
            put(store, index, 3)
        store.flush()
        assert set(store.paths) == {1}
        assert_all_hold(store, range(6), 3)


def test_a_write_that_fails_while_directories_close_kills_no_worker(
    drive: Drive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory that would take over has closed already."""
    died: list[object] = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    (tmp_path / "other").mkdir()
    drive.fail_write = always(eio)
    with store_on((drive, tmp_path), (Drive(tmp_path / "other"), tmp_path / "other")) as store:
        store.prefetch([])
        drive.may_move.clear()
        put(store, 0, 1)
        deadline_s = time.monotonic() + PATIENCE_S
        while drive.num_writes == 0 and store.tiers[0]._writes._num_active == 0:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
        store.tiers[1].close()
        drive.may_move.set()
        store.tiers[0].close()
        within_patience(store.wait_for_writes)
        assert store.in_memory() == [0]
    assert not died


def test_a_read_that_fails_is_told_to_who_takes_it_and_to_nobody_later(drive: Drive, tmp_path: Path) -> None:
    """Also where it was read ahead of time, and states have been replaced since."""
    with store_on((drive, tmp_path), num_slots=4) as store:
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


def test_no_memory_for_a_read_is_an_error_not_a_hang(
    drive: Drive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read begins in a worker, as soon as a write has freed memory."""
    with store_on((drive, tmp_path)) as store:
        put(store, 0, 1)
        store.flush()
        store.evict([0])
        put(store, 1, 1, keep=True)
        put(store, 2, 1, keep=True)
        drive.may_move.clear()
        store.evict([1])
        store.prefetch([0])

        def refuse(nbytes: int) -> torch.UntypedStorage:
            raise MemoryError("injected: no memory")

        monkeypatch.setattr(store.slots, "take", refuse)
        drive.may_move.set()
        with pytest.raises(MemoryError, match="injected"):
            within_patience(lambda: store.take(0))
        monkeypatch.undo()
        assert_holds(store, 0, 1)
        put(store, 3, 4)
        store.flush()
