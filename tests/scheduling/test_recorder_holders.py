"""The recorder sees who holds what."""

from __future__ import annotations

import itertools
import threading
from collections import Counter

import pytest

from lightning_ssd.common.tensors import StorageKey
from lightning_ssd.scheduling import recorder
from lightning_ssd.scheduling.recorder import Recorder
from tests.support.recorded_passes import NBYTES, FakeClock, begun, pack, saved


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(now_s=100.0)


# -- who holds what ---------------------------------------------------------------------------------------------------


def test_a_variable_of_forward_holds_a_storage_until_it_goes(clock: FakeClock) -> None:
    told = begun(clock)
    first = pack(told, clock, 101, held=True)
    others = [pack(told, clock, 102), pack(told, clock, 103)]
    first.variable = None
    others.append(pack(told, clock, 104))
    clock.at(105)
    told.forward_ended()
    trace = told.trace(clock.at(106))
    assert [s.last_used_s for s in trace.storages] == [4, 3, 4, 5]
    assert all(s.movable for s in trace.storages)


def test_what_is_never_released_is_not_movable(clock: FakeClock) -> None:
    told = begun(clock)
    held = pack(told, clock, 101, held=True), pack(told, clock, 102)
    clock.at(103)
    told.forward_ended()
    clock.at(104)
    told.wanted(0)
    assert [s.movable for s in told.trace(clock.at(105)).storages] == [False, True]
    assert held[0].variable is not None


def test_what_is_released_between_forward_and_backward_is_seen_when_it_is_wanted(clock: FakeClock) -> None:
    told = begun(clock)
    loss = pack(told, clock, 101, held=True)
    clock.at(102)
    told.forward_ended()
    loss.variable = None
    clock.at(104)
    told.wanted(0)
    (storage,) = told.trace(clock.at(105)).storages
    assert (storage.movable, storage.last_used_s, storage.wanted_s) == (True, 4, 4)


def test_several_objects_of_ours_over_one_storage_are_one_holder(clock: FakeClock) -> None:
    told = begun(clock)
    one = saved()
    assert one.variable is not None
    again, once_more = one.variable.untyped_storage(), one.key.resolve()
    second_key = StorageKey(again)
    told.packed(NBYTES, one.key)
    one.variable = None
    clock.at(101)
    told.forward_ended()
    (storage,) = told.trace(clock.at(102)).storages
    assert (storage.movable, storage.last_used_s) == (True, 1)
    assert once_more is not None
    assert second_key.alive()


def test_memory_that_another_thread_has_dropped_counts_as_released(clock: FakeClock) -> None:
    told = begun(clock)
    first = pack(told, clock, 101)

    def write() -> None:
        first.ours = None

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert not first.key.alive()
    second = pack(told, clock, 102)
    clock.at(103)
    told.wanted(0)
    (storage, _) = told.trace(clock.at(104)).storages
    assert (storage.movable, storage.last_used_s) == (True, 2)
    assert second.key.alive()


def test_a_recycled_address_names_nobody_else(clock: FakeClock) -> None:
    """The structs of storages are recycled at once; a key keeps its own one from that."""
    told = begun(clock)
    gone = [pack(told, clock, 101) for _ in range(50)]
    for one in gone:
        one.ours = None
    later = [pack(told, clock, 102, held=True) for _ in range(50)]
    assert len({one.key.cdata for one in (*gone, *later)}) == 100
    clock.at(103)
    told.forward_ended()
    assert [s.movable for s in told.trace(clock.at(104)).storages] == [True] * 50 + [False] * 50


def test_many_held_storages_are_looked_at_in_turns(clock: FakeClock) -> None:
    told = begun(clock)
    held = [pack(told, clock, 101, held=True) for _ in range(100)]
    for one in held:
        one.variable = None
    later = [pack(told, clock, 102 + index) for index in range(10)]
    clock.at(150)
    told.forward_ended()
    released = Counter(s.last_used_s for s in told.trace(clock.at(200)).storages[:100])
    # Those of ours that came later take turns too, and go at their first.
    assert released[2] == released[3] == 4
    assert sum(released.values()) == 100
    assert max(released) == 50, "at the end of forward all are looked at"
    assert len(later) == 10


def test_other_memory_at_its_worst_moment(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_SAMPLE_S", 0.0)  # look each time
    levels = iter([50, 90, 70])
    told = Recorder(clock, lambda: next(levels), now=clock.stamp)
    held = [saved() for _ in range(2)]
    for one, resident_bytes in zip(held, (10, 20), strict=True):
        told.packed(NBYTES, one.key, resident_bytes)
    told.wanted(0, 30)
    assert told.trace(clock.at(101)).other_peak_bytes == 70


def test_asking_for_memory_takes_a_hundredth_of_the_pass(clock: FakeClock) -> None:
    """On a device the allocator's numbers take longer than all else that is recorded of a storage."""
    asked: list[float] = []

    def level() -> int:
        asked.append(clock.now_s)
        clock.at(clock.now_s + 0.01)
        return 0

    told = Recorder(clock, level, now=clock.stamp)
    held = [saved() for _ in range(1000)]
    for one in held:
        told.packed(NBYTES, one.key)
        clock.at(clock.now_s + 0.01)
    assert 9 <= len(asked) <= 11
    assert min(b - a for a, b in itertools.pairwise(asked)) >= 1.0
