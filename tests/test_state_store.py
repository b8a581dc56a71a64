"""Where subgroups of states are, under failing and slow drives: nothing is lost, nothing hangs, nothing grows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from lightning_ssd.errors import CorruptionError, OffloaderClosedError, StorageError
from lightning_ssd.events import EventLog
from lightning_ssd.inner_step import State
from lightning_ssd.slots import SlotMover, Slots
from lightning_ssd.state_home import Copy
from lightning_ssd.state_layout import Layout
from lightning_ssd.state_store import StateStore
from lightning_ssd.storage.integrity import Sampler
from lightning_ssd.storage.movers import HostMover
from lightning_ssd.storage.posix import PosixBackend
from lightning_ssd.storage.staging import ReloadPool
from lightning_ssd.storage.tiers import SsdTier
from tests.helpers import within
from tests.storage.faults import FaultyBackend, always, eio, enospc, on_calls

CPU = torch.device("cpu")
NBYTES = 16 << 10
PATIENCE_S = 20.0


class Drive(FaultyBackend):
    """A directory whose moves wait while the test wants it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(PosixBackend([directory], direct=False))
        self.may_move = threading.Event()
        self.may_move.set()

    def _stumble(self, fail: Callable[[int], BaseException | None] | None, index: int) -> None:
        assert self.may_move.wait(PATIENCE_S)
        super()._stumble(fail, index)


@contextmanager
def store_on(*drives: tuple[Drive, Path], num_slots: int = 2, num: int = 6) -> Iterator[StateStore]:
    """A store of ``num`` subgroups, turn by turn on each of the drives."""
    with ExitStack() as stack:
        tiers, mover = [], None
        for drive, directory in drives:
            mover = SlotMover(HostMover(drive, ReloadPool(0)))
            tiers.append(
                SsdTier(drive, mover, [directory], events=EventLog(), sampler=Sampler("full"), chunk_bytes=4096)
            )
            stack.callback(tiers[-1].close)
            stack.callback(drive.may_move.set)
        assert mover is not None
        store = StateStore(tiers, mover, device=CPU, num_slots=num_slots)
        store.add(index % len(drives) for index in range(num))
        yield store
        store.close()


@pytest.fixture
def drive(tmp_path: Path) -> Drive:
    return Drive(tmp_path)


def whole(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def put(store: StateStore, index: int, value: int, *, keep: bool = False) -> None:
    store.take(index)
    storage = store.allocate(NBYTES)
    whole(storage).fill_(value)
    store.give(index, storage, is_dirty=True, keep=keep)


def assert_holds(store: StateStore, index: int, value: int) -> None:
    """Looks at it and gives it back unchanged."""
    storage = store.take(index)
    assert storage is not None
    assert bool((whole(storage) == value).all()), f"subgroup {index}"
    store.give(index, storage, is_dirty=False, keep=False)


def assert_all_hold(store: StateStore, indices: Iterable[int]) -> None:
    """Their own numbers."""
    for index in indices:
        assert_holds(store, index, index)


def used_bytes(store: StateStore) -> int:
    return sum(arena.used_bytes for tier in store.tiers for arena in tier._arenas)


def mapped_bytes(store: StateStore) -> int:
    """Memory of the slots, lent or spare."""
    return sum(map(len, (*store.slots._spare, *store.slots._lent.values())))


def within_patience(what: Callable[[], object]) -> None:
    """A hang is a failure of this test alone."""
    within(PATIENCE_S, what)


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


def test_a_subgroup_that_lost_its_moving_states_takes_no_space(drive: Drive, tmp_path: Path) -> None:
    with store_on((drive, tmp_path)) as store:
        put(store, 0, 1)
        assert store.take(0) is not None
        store.give(0, None, is_dirty=True, keep=False)
        assert store.take(0) is None
        assert used_bytes(store) == 0


@pytest.mark.parametrize("error", [eio, enospc])
def test_a_failed_write_keeps_memory_and_warns_once(
    error: Callable[[], StorageError], drive: Drive, tmp_path: Path
) -> None:
    drive.fail_write = always(error)
    with store_on((drive, tmp_path)) as store:
        for value in (1, 2, 3):
            for index in range(6):
                put(store, index, value)
        for index in range(6):
            assert_holds(store, index, 3)
        with pytest.raises(StorageError, match="stay in memory"):
            store.flush()
        warning = store.take_warning()
        assert warning is not None
        assert "stay in memory, exact as before: [Errno" in warning
        assert store.take_warning() is None
        assert used_bytes(store) == 0


def test_each_stuck_subgroup_has_one_more_slot_until_it_is_written(drive: Drive, tmp_path: Path) -> None:
    """Failures that come and go must not let memory grow for ever."""
    drive.fail_write = always(eio)
    with store_on((drive, tmp_path)) as store:
        for value in range(4):
            for index in range(3):
                put(store, index, value)
            store.wait_for_writes()
            assert store.num_slots == 2 + 3
        drive.fail_write = None
        store.flush()
        assert store.num_slots == 2
        store.evict(range(6))
        assert store.slots.lent_bytes == 0
        assert mapped_bytes(store) <= 2 * NBYTES
        for index in range(3):
            assert_holds(store, index, 3)


def test_a_write_that_fails_leaves_the_last_good_copy(drive: Drive, tmp_path: Path) -> None:
    with store_on((drive, tmp_path)) as store:
        put(store, 0, 1)
        store.flush()
        held = store.hold(0)
        assert isinstance(held, Copy)
        drive.fail_write = always(eio)
        put(store, 0, 2)
        store.wait_for_writes()
        assert used_bytes(store) == NBYTES
        in_memory = store.hold(0)
        assert isinstance(in_memory, torch.UntypedStorage)
        assert bool((whole(in_memory) == 2).all())
        assert_holds(store, 0, 2)
        store.release([held])


def test_the_other_directory_takes_over(drive: Drive, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    drive.fail_write = always(enospc)
    with store_on((drive, tmp_path), (Drive(tmp_path / "other"), tmp_path / "other")) as store:
        for value in (1, 2):
            for index in range(6):
                put(store, index, value)
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
        for index in range(6):
            assert_holds(store, index, 3)


def test_a_read_that_fails_once_is_tried_again(drive: Drive, tmp_path: Path) -> None:
    with store_on((drive, tmp_path)) as store:
        put(store, 0, 1)
        store.flush()
        store.evict([0])
        drive.fail_read = on_calls({0}, eio)
        assert_holds(store, 0, 1)
        assert store.tiers[0].num_retries == 1


def test_a_read_that_fails_is_told_to_who_takes_it_and_to_nobody_later(drive: Drive, tmp_path: Path) -> None:
    """Also where it was read ahead of time, and states have been replaced since."""
    with store_on((drive, tmp_path), num_slots=4) as store:
        for index in range(6):
            put(store, index, 1)
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
        for index in range(6):
            assert_holds(store, index, 7)
        store.flush()
        assert used_bytes(store) == 6 * NBYTES


def test_wrong_bytes_are_not_handed_on(drive: Drive, tmp_path: Path) -> None:
    with store_on((drive, tmp_path)) as store:
        put(store, 3, 1)
        store.flush()
        store.evict([3])
        drive.corrupt_read = lambda index: True
        with pytest.raises(CorruptionError, match="subgroup 3"):
            store.take(3)
        drive.corrupt_read = None
        assert_holds(store, 3, 1)


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


def test_a_stale_wish_does_not_stop_another(drive: Drive, tmp_path: Path) -> None:
    """More is asked for ahead of time than there is memory; then something else is taken."""
    with store_on((drive, tmp_path)) as store:
        for index in range(6):
            put(store, index, index)
        store.prefetch([5, 4, 3, 2, 1, 0])
        within_patience(lambda: assert_all_hold(store, range(6)))


def test_new_memory_comes_before_reads_ahead_of_time(drive: Drive, tmp_path: Path) -> None:
    """Else all that was asked for would be read, and dropped, before there were new memory."""
    with store_on((drive, tmp_path), num_slots=3) as store:
        for index in range(6):
            put(store, index, index)
        store.flush()
        store.evict(range(6))
        before = drive.num_reads
        store.prefetch([1, 2, 3, 4, 5])
        store.take(0)
        storage = store.allocate(2 * NBYTES)
        store.give(0, storage, is_dirty=True, keep=True)
        assert drive.num_reads - before <= 5 * NBYTES // 4096
        within_patience(lambda: assert_all_hold(store, range(1, 6)))


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
        assert isinstance(held, Copy)
        put(store, 0, 2)
        store.flush()
        assert used_bytes(store) == 2 * NBYTES
        with store._changed:
            within_patience(lambda: store.release([held]))
        store.evict([0])
        assert used_bytes(store) == NBYTES
        assert_holds(store, 0, 2)


def test_a_flush_waits_for_what_is_under_way(drive: Drive, tmp_path: Path) -> None:
    with store_on((drive, tmp_path)) as store:
        drive.may_move.clear()
        put(store, 0, 1)
        timer = threading.Timer(0.05, drive.may_move.set)
        timer.start()
        store.flush()
        timer.join()
        assert isinstance(store.hold(0), Copy)
        assert store.in_memory() == [0], "what is wanted at once must not leave"


def test_what_is_taken_while_it_is_written_is_not_read(drive: Drive, tmp_path: Path) -> None:
    with store_on((drive, tmp_path)) as store:
        drive.may_move.clear()
        put(store, 0, 9)
        timer = threading.Timer(0.05, drive.may_move.set)
        timer.start()
        assert_holds(store, 0, 9)
        timer.join()
        assert drive.num_reads == 0


def test_after_close_nobody_waits(drive: Drive, tmp_path: Path) -> None:
    with store_on((drive, tmp_path)) as store:
        put(store, 0, 1)
        store.flush()
        store.evict([0])
        store.close()
        with pytest.raises(OffloaderClosedError):
            store.take(0)
        assert store.slots.lent_bytes == mapped_bytes(store) == 0


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


def test_states_that_change_places_do_not_overwrite_each_other() -> None:
    """An optimizer may swap two of its tensors, or keep one as a part of another."""
    states: list[State] = [{"a": torch.arange(2048.0), "b": -torch.arange(2048.0)}]
    layout = Layout.of(states, CPU, 4096, [False])
    storage = torch.empty(layout.nbytes, dtype=torch.uint8).untyped_storage()
    layout.collect(states, storage)
    filled = layout.fill(layout.templates(states), storage)
    filled[0]["a"], filled[0]["b"] = filled[0]["b"], filled[0]["a"]
    layout.collect(filled, storage)
    swapped = layout.fill(layout.templates(filled), storage)
    assert torch.equal(swapped[0]["a"], -torch.arange(2048.0))
    assert torch.equal(swapped[0]["b"], torch.arange(2048.0))


@pytest.mark.parametrize("num_slots", [2, 3, 7])
def test_random_use_is_as_a_dictionary(num_slots: int, drive: Drive, tmp_path: Path) -> None:
    """Takes, puts, keeps, evictions, wishes, flushes and held copies, while writes fail now and then."""
    generator = torch.Generator().manual_seed(num_slots)

    def draw(n: int) -> int:
        return int(torch.randint(n, (), generator=generator))

    def some() -> Sequence[int]:
        return torch.randperm(6, generator=generator)[: draw(7)].tolist()

    expected: dict[int, int] = {}
    held: list[Copy] = []
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
                case 4 if (copy := store.hold(index)) is not None and isinstance(copy, Copy):
                    held.append(copy)
                case 5 if held:
                    store.release([held.pop(draw(len(held)))])
                case 6 if step % 5 == 0:
                    store.forget(index)
                    expected.pop(index, None)
            with store._changed:  # workers change both
                assert store.slots.lent_bytes <= store.num_slots * NBYTES

        within_patience(act)
        store.release(held)
        store.wait_for_writes()  # one of them may be about to fail
        drive.fail_write = None
        store.flush()
        assert used_bytes(store) == len(expected) * NBYTES
        assert store.num_slots <= num_slots + 1
        for index, value in expected.items():
            assert_holds(store, index, value)


def test_a_larger_piece_takes_the_place_of_a_smaller_one() -> None:
    slots = Slots(CPU)
    for nbytes, expected in ((4096, 4096), (8192, 8192), (4096, 8192)):
        slots.give_back(slots.take(nbytes))
        assert [len(array) for array in slots._spare] == [expected]


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
