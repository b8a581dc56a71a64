"""The queue and its workers: order, sharing, cancelling, failing, closing."""

import gc
import threading
import time
import weakref
from contextlib import closing, nullcontext

import pytest

from lightning_ssd.errors import OffloaderClosedError, StorageError
from lightning_ssd.telemetry.events import EventLog
from lightning_ssd.tiers.read_priority import UrgentGate
from lightning_ssd.tiers.transfer_queue import Transfer, TransferQueue
from tests.support.helpers import within
from tests.support.host_traffic import wait_until
from tests.support.patience import PATIENCE_S


class Move(Transfer):
    """Runs the given chunks and records what happens to it."""

    def __init__(self, *chunks, urgent=False):
        super().__init__("read", 7, urgent=urgent)
        self._work = chunks
        self.begin_error = None
        self.calls = []
        self.result = None

    def begin(self):
        self.calls.append("begin")
        if self.begin_error:
            raise self.begin_error
        return list(self._work)

    def finish(self, error):
        self.calls.append("finish")
        self.result = error


@pytest.fixture
def events():
    return EventLog()


@pytest.fixture
def single(events):
    with closing(TransferQueue("read", 1, events)) as queue:
        yield queue


def blocked(queue):
    """Occupy one worker until the event is set."""
    started, release = threading.Event(), threading.Event()

    def wait():
        started.set()
        assert release.wait(PATIENCE_S)

    queue.submit(Move(wait))
    assert started.wait(PATIENCE_S)
    return release


@pytest.mark.parametrize("where", ["begin", "chunk"])
def test_failures_reach_the_one_who_waits(single, events, where):
    def fail():
        raise OSError(5, "drive on fire")

    skipped = []
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


def test_an_event_says_when_its_move_was_begun_and_done(single, events, worker_clock):
    release = blocked(single)
    move = Move(lambda: worker_clock.__setitem__(0, 3))
    worker_clock[0] = 1
    single.submit(move)
    release.set()
    single.wait_idle()
    _, event = events.drain()
    assert (event.direction, event.nbytes, event.failed) == ("read", 7, False)
    assert (event.start_s, event.end_s) == (1, 3)


@pytest.mark.parametrize("late_error", [None, OSError(5, "too late")])
@pytest.mark.parametrize("outlasts", [True, False])
def test_a_move_may_outlast_its_end(single, events, worker_clock, outlasts, late_error):
    """Its worker is busy until the device is done; the event comes then, or with the end."""
    settles, release = threading.Event(), threading.Event()

    def settle():
        settles.set()
        assert release.wait(PATIENCE_S)
        return late_error

    move = Move(lambda: settle)
    move.outlasts = outlasts
    single.submit(move)
    move.wait()
    assert settles.wait(PATIENCE_S)
    told, worker_clock[0] = events.drain(), 3
    busy_s = single.progress()[1]
    release.set()
    with nullcontext() if late_error is None else pytest.raises(OSError, match="too late"):
        single.wait_idle()
    assert len(told) == (not outlasts)
    (event,) = [*told, *events.drain()]
    assert (event.end_s, event.failed) == ((3, late_error is not None) if outlasts else (0, False))
    assert move.error is None
    assert busy_s == single.progress()[1] == 3


def test_waiting_is_not_busy(events, worker_clock):
    queue = TransferQueue("read", 2, events, tier="host")
    move, busy_s = Move(), []

    def work():
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


def test_idle_workers_hold_no_move(single):
    """A finished move's memory must not wait for the worker's next job."""
    move = Move(lambda: None)
    ref = weakref.ref(move)
    single.submit(move)
    move.wait()
    del move
    single.wait_idle()
    gc.collect()
    wait_until(lambda: ref() is None)


def test_workers_count_the_cpu_time_of_moves(single):
    """Not the time in which they wait."""

    def work():
        begin_s = time.thread_time()
        while time.thread_time() - begin_s < 0.02:
            pass
        time.sleep(0.5)

    single.submit(Move(work, work))
    single.wait_idle()
    assert 0.04 <= single.cpu_s < 0.5


def test_what_comes_later_gives_way_too(events, monkeypatch):
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

    def __init__(self, where):
        super().__init__(lambda: self.settle)
        self.where = where

    def finish(self, error):
        super().finish(error)
        self._stumble("finish")

    def settle(self):
        self._stumble("settle")
        return

    def _stumble(self, where):
        memory = Memory()
        memories.append(weakref.ref(memory))
        if where == self.where:
            raise LookupError(f"a fault of {where}")


class Memory:
    """Stands for a tensor in a local variable."""


memories = []


@pytest.mark.parametrize("where", ["finish", "settle"])
def test_an_end_that_raises_ends_no_worker(where, events):
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

    def flush():
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
def test_a_fault_that_nobody_was_told_is_raised_by_close(has_begun, events):
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


def test_closing_discards_what_has_not_begun(events):
    queue = TransferQueue("read", 1, events)
    release, waiting = blocked(queue), Move(lambda: None)
    queue.submit(waiting)
    thread = threading.Thread(target=queue.close)
    thread.start()
    wait_until(lambda: queue._closed)
    release.set()
    for end in (thread.join, waiting.wait, queue.close):
        within(PATIENCE_S, end)
    assert waiting.calls == ["finish"]
    assert isinstance(waiting.result, OffloaderClosedError)
    assert [event.failed for event in events.drain()] == [False], "what was discarded has moved nothing"


def test_closing_names_what_does_not_end(events, monkeypatch):
    """A drive that does not answer: the thread is left to it, and ends with it."""
    monkeypatch.setattr("lightning_ssd.tiers.transfer_queue._PATIENCE_S", 0.05)
    queue, answer, asked = TransferQueue("write", 1, events), threading.Event(), threading.Event()

    def run():
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
    with pytest.raises(OffloaderClosedError, match="open it again"):
        queue.submit(Move())


def test_closing_runs_what_a_move_that_is_just_beginning_brings_for_another_lane():
    """That lane's worker has found nothing to do, and may not leave before."""
    begun, goes_on = threading.Event(), threading.Event()

    class Beginning(Move):
        def begin(self):
            begun.set()
            assert goes_on.wait(PATIENCE_S)
            self.lanes = [0, 1]
            return super().begin()

    done = []
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


class TwoDrives:
    """A queue whose chunks take as long as their drive says; it notes which drive has taken each."""

    def __init__(self, queue):
        self.seconds, self.taken = [0.01, 0.2], []
        self._queue = queue

    def move(self, num):
        """Write so many chunks at once, and return the seconds that it took."""
        begin_s = time.perf_counter()
        one = Move(*[self._chunk] * num)
        self._queue.submit(one)
        one.wait()
        return time.perf_counter() - begin_s

    def _chunk(self):
        self.taken.append(self._queue.lane)
        time.sleep(self.seconds[self._queue.lane])


@pytest.fixture
def drives(events):
    with closing(TransferQueue("write", 1, events, num_lanes=2)) as queue:
        yield TwoDrives(queue)


def test_a_slow_drive_leaves_the_last_chunks_to_the_others(drives):
    """Taken by the slow one, each of them would end long after all others."""
    drives.move(40)  # it learns
    assert set(drives.taken) == {0, 1}
    drives.taken.clear()
    assert drives.move(8) < drives.seconds[1]
    assert drives.taken == [0] * 8
    drives.move(60)
    assert drives.taken.count(1) >= 2, "while there is much to do, it helps"


def test_a_drive_that_was_slow_is_asked_again(drives):
    drives.move(40)
    drives.seconds[1] = 0.01
    drives.move(60)
    drives.taken.clear()
    drives.move(20)
    assert drives.taken.count(1) >= 5


def test_a_drive_that_is_asked_again_shows_with_one_chunk_that_it_is_still_slow(events):
    """Of two that it took at once, the others would have done the second one long before."""
    taken, goes_on = [], threading.Event()
    with closing(TransferQueue("write", 2, events, num_lanes=2)) as queue:
        queue._chunk_s, queue._is_forgotten = [0.001, 0.02], [False, True]

        def chunk():
            taken.append(queue.lane)
            if queue.lane:
                goes_on.wait(PATIENCE_S)
            time.sleep(0.001)

        one = Move(*[chunk] * 400)
        queue.submit(one)
        wait_until(lambda: taken.count(0) >= 300)
        num_slow = taken.count(1)
        goes_on.set()
        one.wait()
    assert num_slow == 1


@pytest.mark.parametrize(
    ("before", "num"), [([0.002, 0.2], 12), ([0.1, 0.1], 1)], ids=["one hiccup", "large chunks before small ones"]
)
def test_a_drive_that_was_slow_once_does_not_stay_away(before, num, drives):
    """Also where so little is queued at a time that the others can do it all."""
    drives.seconds = before
    drives.move(4)
    drives.seconds = [0.002, 0.002]
    while len(drives.taken) < 400:
        drives.move(num)
    assert {0, 1} <= set(drives.taken[200:])
