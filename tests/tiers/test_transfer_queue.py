"""The queue and its workers: order, sharing, cancelling, failing, closing."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import pytest

from lightning_ssd.errors import OffloaderClosedError, StorageError
from lightning_ssd.telemetry.events import EventLog
from lightning_ssd.tiers.read_priority import UrgentGate
from lightning_ssd.tiers.transfer_queue import Chunk, Transfer, TransferQueue
from tests.support.helpers import within
from tests.support.patience import PATIENCE_S
from tests.support.threads import at_once


class Move(Transfer):
    """Runs the given chunks and records what happens to it."""

    def __init__(self, *chunks: Chunk, urgent: bool = False) -> None:
        super().__init__("read", 7, urgent=urgent)
        self._work = chunks
        self.begin_error: Exception | None = None
        self.calls: list[str] = []
        self.result: BaseException | None = None

    def begin(self) -> Sequence[Chunk]:
        self.calls.append("begin")
        if self.begin_error:
            raise self.begin_error
        return list(self._work)

    def finish(self, error: BaseException | None) -> None:
        self.calls.append("finish")
        self.result = error


@pytest.fixture
def events() -> EventLog:
    return EventLog()


@pytest.fixture
def single(events: EventLog) -> Iterator[TransferQueue]:
    queue = TransferQueue("read", 1, events)
    yield queue
    queue.close()


def blocked(queue: TransferQueue) -> threading.Event:
    """Occupy one worker until the event is set."""
    started, release = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        assert release.wait(PATIENCE_S)

    queue.submit(Move(wait))
    assert started.wait(PATIENCE_S)
    return release


def test_runs_all_chunks_and_reports_once(single: TransferQueue, events: EventLog) -> None:
    done: list[int] = []
    move = Move(*(lambda i=i: done.append(i) for i in range(5)))
    single.submit(move)
    move.wait()
    assert sorted(done) == [0, 1, 2, 3, 4]
    assert move.calls == ["begin", "finish"]
    (event,) = events.drain()
    assert (event.direction, event.nbytes, event.failed) == ("read", 7, False)
    assert event.queued_s <= event.start_s <= event.end_s


@pytest.mark.parametrize("where", ["begin", "chunk"])
def test_failures_reach_the_one_who_waits(single: TransferQueue, events: EventLog, where: str) -> None:
    def fail() -> None:
        raise OSError(5, "drive on fire")

    skipped: list[int] = []
    move = Move(fail, lambda: skipped.append(1))
    if where == "begin":
        move.begin_error = OSError(5, "drive on fire")
    single.submit(move)
    move.wait()
    assert isinstance(move.error, OSError)
    assert move.result is move.error
    assert skipped == []
    (event,) = events.drain()
    assert event.failed
    after = Move(lambda: None)  # the worker lives on
    single.submit(after)
    after.wait()
    assert after.error is None


def test_close_discards_what_has_not_begun(events: EventLog) -> None:
    queue = TransferQueue("read", 1, events)
    release = blocked(queue)
    waiting = Move(lambda: None)
    queue.submit(waiting)
    threading.Timer(0.05, release.set).start()
    queue.close()
    queue.close()
    waiting.wait()
    assert waiting.calls == ["finish"]
    assert isinstance(waiting.result, OffloaderClosedError)
    with pytest.raises(OffloaderClosedError, match="open it again"):
        queue.submit(Move())


def test_idle_workers_hold_no_move(single: TransferQueue) -> None:
    """A finished move's memory must not wait for the worker's next job."""
    import gc
    import weakref

    move = Move(lambda: None)
    ref = weakref.ref(move)
    single.submit(move)
    move.wait()
    del move
    single.wait_idle()
    gc.collect()
    deadline = time.monotonic() + PATIENCE_S
    while ref() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ref() is None


def test_many_threads(events: EventLog) -> None:
    queue = TransferQueue("read", 3, events)
    lock, total = threading.Lock(), [0]

    def add() -> None:
        with lock:
            total[0] += 1

    def submit() -> None:
        for i in range(100):
            move = Move(*[add] * (i % 4))
            queue.submit(move)
            if i % 3 == 0:
                queue.promote(move)

    at_once(*[submit] * 4)
    queue.wait_idle()
    queue.close()
    assert total[0] == 4 * 25 * (0 + 1 + 2 + 3)


def test_waiting_is_not_busy(events: EventLog, worker_clock: list[float]) -> None:
    queue = TransferQueue("read", 2, events, tier="host")
    move, busy_s = Move(), []

    def work() -> None:
        for wait_s in (100.0, 50.0):
            worker_clock[0] += 1
            with move.not_busy():
                worker_clock[0] += wait_s
                busy_s.append(queue.progress()[1])

    move._work = (work,)
    queue.submit(move)
    queue.wait_idle()
    assert [*busy_s, queue.progress()[1]] == [1, 2, 2]
    (event,) = events.drain()
    assert event.tier == "host"
    assert event.end_s - event.start_s == 1 + 50, "only the first wait is not part of it"
    queue.close()
    with pytest.raises(RuntimeError, match="submit the transfer first"), Move().not_busy():
        pass


def test_workers_count_the_cpu_time_of_moves(single: TransferQueue) -> None:
    """Not the time in which they wait."""

    def work() -> None:
        begin_s = time.thread_time()
        while time.thread_time() - begin_s < 0.02:
            pass
        time.sleep(0.5)

    single.submit(Move(work, work))
    single.wait_idle()
    assert 0.04 <= single.cpu_s < 0.5


@pytest.mark.parametrize("late_error", [None, OSError(5, "too late")])
def test_a_move_that_outlasts_its_end(single: TransferQueue, events: EventLog, late_error: OSError | None) -> None:
    settled, release = threading.Event(), threading.Event()

    def settle() -> BaseException | None:
        settled.set()
        assert release.wait(PATIENCE_S)
        return late_error

    move = Move(lambda: settle)
    move.outlasts = True
    single.submit(move)
    move.wait()
    assert settled.wait(PATIENCE_S)
    time.sleep(0.03)
    assert events.drain() == []
    assert move.error is None
    release.set()
    with nullcontext() if late_error is None else pytest.raises(OSError, match="too late"):
        single.wait_idle()
    (event,) = events.drain()
    assert event.failed == (late_error is not None)
    assert single.progress()[1] >= 0.03


def test_what_comes_later_gives_way_too(events: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has given way once, and then found nothing to do, gives way again."""
    monkeypatch.setattr("lightning_ssd.tiers.transfer_queue.patience_s", lambda chunk_s: PATIENCE_S)
    gate = UrgentGate()
    queue = TransferQueue("write", 1, events, yields_to=gate)
    gate.enter(1)
    gone, later = Move(lambda: None), Move(lambda: None)
    queue.submit(gone)
    time.sleep(0.02)
    gone._ended.open()  # as if another worker had carried it out meanwhile
    gate.leave(1)
    time.sleep(0.02)
    gate.enter(2)
    queue.submit(later)
    time.sleep(0.02)
    assert gone.calls == later.calls == []
    gate.leave(2)
    later.wait()
    queue.close()


class Faulty(Move):
    """Raises where it must not."""

    def __init__(self, where: str) -> None:
        super().__init__(lambda: self.settle)
        self.where = where

    def finish(self, error: BaseException | None) -> None:
        super().finish(error)
        self._stumble("finish")

    def settle(self) -> BaseException | None:
        self._stumble("settle")
        return None

    def _stumble(self, where: str) -> None:
        memory = Memory()
        memories.append(weakref.ref(memory))
        if where == self.where:
            raise LookupError(f"a fault of {where}")


class Memory:
    """Stands for a tensor in a local variable."""


memories: list[weakref.ref[Memory]] = []


@pytest.mark.parametrize("where", ["finish", "settle"])
def test_an_end_that_raises_ends_no_worker(where: str, events: EventLog) -> None:
    """More often than there are workers: then all would have gone, and moves would wait for ever."""
    memories.clear()
    queue = TransferQueue("read", 2, events)
    moves = [Faulty(where) for _ in range(5)]
    for move in moves:
        queue.submit(move)
        if where == "finish":
            with pytest.raises(LookupError, match=where):
                within(PATIENCE_S, move.wait)
    after = Move(lambda: None)
    queue.submit(after)
    within(PATIENCE_S, after.wait)
    assert after.calls == ["begin", "finish"]

    def flush() -> None:
        memory = Memory()
        memories.append(weakref.ref(memory))
        queue.wait_idle()

    for _ in range(2):
        with pytest.raises(LookupError, match=where):
            within(PATIENCE_S, flush)
    if where == "finish":
        assert [str(move.error) for move in moves] == ["a fault of finish"] * 5
    gc.collect()
    assert [ref() for ref in memories] == [None] * len(memories), "a kept error must not keep memory"
    within(PATIENCE_S, queue.close)
    assert not any(thread.is_alive() for thread in queue._threads)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("has_begun", [True, False])
def test_a_fault_that_nobody_was_told_is_raised_by_close(has_begun: bool, events: EventLog) -> None:
    queue = TransferQueue("read", 1, events)
    if not has_begun:
        release = blocked(queue)
        threading.Timer(0.1, release.set).start()
    first, second = Faulty("finish"), Faulty("finish")
    for move in (first, second):
        queue.submit(move)
    while has_begun and not second.ended:
        time.sleep(0.001)
    with pytest.raises(LookupError, match="finish"):
        within(PATIENCE_S, queue.close)
    assert first.ended
    assert second.ended
    assert not any(thread.is_alive() for thread in queue._threads)
    queue.close()


def test_closing_names_what_does_not_end(events: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drive that does not answer: the thread is left to it, and ends with it."""
    monkeypatch.setattr("lightning_ssd.tiers.transfer_queue._PATIENCE_S", 0.05)
    queue, answer, asked = TransferQueue("write", 1, events), threading.Event(), threading.Event()

    def run() -> None:
        asked.set()
        assert answer.wait(20)

    move = Move(run)
    queue.submit(move)
    assert asked.wait(20)
    with pytest.raises(StorageError, match=r"waited .* for lightning_ssd-ssd-write-0, which moves no byte \(1 moves"):
        queue.close()
    answer.set()
    move.wait()
    queue.close()


def test_closing_runs_what_a_move_that_is_just_beginning_brings_for_another_lane() -> None:
    """That lane's worker has found nothing to do, and may not leave before."""
    begun, goes_on = threading.Event(), threading.Event()

    class Beginning(Move):
        def begin(self) -> Sequence[Chunk]:
            begun.set()
            assert goes_on.wait(PATIENCE_S)
            self.lanes = [0, 1]
            return super().begin()

    done: list[int] = []
    move = Beginning(lambda: done.append(0), lambda: done.append(1))
    queue = TransferQueue("read", 1, EventLog(), num_lanes=2)
    queue.submit(move)
    assert begun.wait(PATIENCE_S)
    closing = threading.Thread(target=queue.close)
    closing.start()
    time.sleep(0.05)  # the other worker hears of the end
    goes_on.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert sorted(done) == [0, 1]
    assert move.ended


# -- several drives ----------------------------------------------------------------------------------------------------


def test_a_slow_drive_leaves_the_last_chunks_to_the_others(events: EventLog) -> None:
    """Taken by the slow one, each of them would end long after all others."""
    seconds = (0.01, 0.2)
    queue = TransferQueue("write", 1, events, num_lanes=2)
    taken: list[list[int]] = []

    def move(num: int) -> float:
        lanes: list[int] = []
        taken.append(lanes)

        def chunk() -> None:
            lanes.append(queue.lane)
            time.sleep(seconds[queue.lane])

        begin_s = time.perf_counter()
        one = Move(*[chunk] * num)
        queue.submit(one)
        one.wait()
        return time.perf_counter() - begin_s

    try:
        move(40)  # it learns
        assert set(taken.pop()) == {0, 1}
        assert move(8) < seconds[1]
        assert taken.pop() == [0] * 8
        move(60)
        assert taken.pop().count(1) >= 2, "while there is much to do, it helps"
    finally:
        queue.close()


def test_a_drive_that_was_slow_is_asked_again(events: EventLog) -> None:
    seconds = [0.01, 0.2]
    queue = TransferQueue("write", 1, events, num_lanes=2)
    lanes: list[int] = []

    def chunk() -> None:
        lanes.append(queue.lane)
        time.sleep(seconds[queue.lane])

    try:
        for num in (40, 60):
            queue.submit(Move(*[chunk] * num))
            queue.wait_idle()
            seconds[1] = 0.01
        lanes.clear()
        queue.submit(Move(*[chunk] * 20))
        queue.wait_idle()
        assert lanes.count(1) >= 5
    finally:
        queue.close()


@pytest.mark.parametrize(
    ("before", "num"), [([0.002, 0.2], 12), ([0.1, 0.1], 1)], ids=["one hiccup", "large chunks before small ones"]
)
def test_a_drive_that_was_slow_once_does_not_stay_away(before: list[float], num: int, events: EventLog) -> None:
    """Also where so little is queued at a time that the others can do it all."""
    seconds = before
    queue = TransferQueue("write", 1, events, num_lanes=2)
    lanes: list[int] = []

    def chunk() -> None:
        lanes.append(queue.lane)
        time.sleep(seconds[queue.lane])

    def move(num: int) -> None:
        queue.submit(Move(*[chunk] * num))
        queue.wait_idle()

    try:
        move(4)
        seconds = [0.002, 0.002]
        while len(lanes) < 400:
            move(num)
        assert {0, 1} <= set(lanes[200:])
    finally:
        queue.close()
