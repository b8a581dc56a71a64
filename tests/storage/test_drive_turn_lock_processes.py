"""Turns on a drive between processes: one waits for the other, but not for ever for one that was killed or stopped."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from lightning_ssd.storage import drive_turn_lock as arbiter_module
from lightning_ssd.storage.drive_turn_lock import DriveLock
from tests.support.patience import PATIENCE_S
from tests.support.turn_locks import is_taken, locks

pytestmark = pytest.mark.usefixtures("runtime")

# How long somebody who must wait is watched. No test fails because a machine is slow: then less is seen.
_WATCH_S = 0.2

PRELUDE = """
import os, sys
from pathlib import Path
from lightning_ssd.storage.drive_turn_lock import DriveLock
def say(word): print(word, flush=True)
arbiter = DriveLock(Path(sys.argv[1]))
say(os.getpid())
"""
HOLD = "with arbiter.writing():\n    say('inside')\n    sys.stdin.readline()\nsay('left')\n"
COUNT = """
sys.stdin.readline()
import time
file = Path(sys.argv[1], "count")
for _ in range(100):
    with arbiter.writing():
        number = int(file.read_text())
        time.sleep(0.001)
        file.write_text(str(number + 1))
"""
FORK = """
with arbiter.writing():
    is_child = os.fork() == 0
    if not is_child:
        sys.stdin.readline()
        say("parent leaves")
if is_child:
    say("child")
    with arbiter.writing():
        say("child inside")
else:
    os.wait()
"""
FORK_AND_HANG = """
with arbiter.writing():
    if os.fork() == 0:
        say("child")
    sys.stdin.read()
"""


class Other:
    """A process that runs a script. It is a fork, and ``popen`` who waits for it, so that signals go to its own id."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self.popen = popen
        self.pid = int(heard(self))

    def wait(self) -> int:
        return self.popen.wait(PATIENCE_S)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2][0] != "T":
            time.sleep(0.001)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


Start = Callable[[str], Other]


@pytest.fixture
def start(tmp_path: Path, forks: list[str]) -> Iterator[Start]:
    """Runs a script in another process, with an arbiter for the same directory; it is ended with the test."""
    with ExitStack() as stack:

        def run(script: str) -> Other:
            command = [*forks, "-c", PRELUDE + script, str(tmp_path)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
            stack.enter_context(process)
            stack.callback(process.kill)
            return Other(process)

        yield run


def heard(other: Other) -> str:
    assert other.popen.stdout is not None
    return other.popen.stdout.readline().strip()


def is_silent(other: Other) -> bool:
    assert other.popen.stdout is not None
    return not select.select([other.popen.stdout], [], [], _WATCH_S)[0]


def tell(other: Other) -> None:
    assert other.popen.stdin is not None
    other.popen.stdin.write("\n")
    other.popen.stdin.flush()


def late_turn_over() -> None:
    """Wait for the thread that waits for a turn, and does with it what is right."""
    while any(thread.name == "lightning_ssd-turn" for thread in threading.enumerate()):
        time.sleep(0.01)


class _LateForWaiters:
    """A mutex that threads which wait for a turn get only when the test says so."""

    def __init__(self, mutex: threading.Lock) -> None:
        self._mutex = mutex
        self.release_waiters = threading.Event()

    def __enter__(self) -> None:
        if threading.current_thread().name == "lightning_ssd-turn":
            assert self.release_waiters.wait(PATIENCE_S)
        self._mutex.acquire()

    def __exit__(self, *_: object) -> None:
        self._mutex.release()


class TestSeveralProcesses:
    def test_one_waits_for_the_other(self, arbiter: DriveLock, start: Start) -> None:
        with arbiter.writing():
            other = start(HOLD)
            assert is_silent(other), "let in beside us"
        assert heard(other) == "inside"
        tell(other)
        assert heard(other) == "left"

    def test_the_other_direction_does_not_wait(self, arbiter: DriveLock, start: Start) -> None:
        with arbiter.reading():
            assert heard(start(HOLD)) == "inside"

    def test_no_update_is_lost(self, start: Start, tmp_path: Path) -> None:
        (tmp_path / "count").write_text("0")
        both = [start(COUNT), start(COUNT)]
        for process in both:
            tell(process)
        assert [process.wait() for process in both] == [0, 0]
        assert (tmp_path / "count").read_text() == "200"

    def test_a_killed_process_holds_nothing(self, arbiter: DriveLock, start: Start, runtime: Path) -> None:
        other = start(HOLD)
        assert heard(other) == "inside"
        assert is_taken(locks(runtime)["write"])
        other.kill()
        with arbiter.writing():
            pass

    def test_a_stopped_process_is_not_waited_for_for_ever(
        self,
        arbiter: DriveLock,
        start: Start,
        runtime: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(arbiter_module, "_PATIENCE_S", 0.05)
        other = start(HOLD)
        assert heard(other) == "inside"
        other.stop()
        with arbiter.writing():
            assert is_taken(locks(runtime)["write"]), "the other one was to hold it"
        assert "let it go on" in caplog.text
        monkeypatch.setattr(arbiter_module, "_PATIENCE_S", 1e6)
        for _ in range(3):  # once is enough: each chunk of a step would wait as long
            with arbiter.writing():
                pass
        assert len(caplog.records) == 1
        other.go_on()
        tell(other)
        assert heard(other) == "left"
        late_turn_over()
        assert not is_taken(locks(runtime)["write"]), "it came too late, and was kept"
        with arbiter.writing():
            assert is_taken(locks(runtime)["write"]), "there are no turns any more"
        assert not is_taken(locks(runtime)["write"])

    def test_a_turn_that_came_in_time_is_not_taken_for_the_next_one(
        self, arbiter: DriveLock, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The thread that waited for it may end when the next turn has been asked for."""
        other, third = start(HOLD), start("sys.stdin.readline()\n" + HOLD)
        assert heard(other) == "inside"
        assert arbiter._locks is not None
        lock = arbiter._locks["write"]
        mutex = _LateForWaiters(lock._mutex)
        monkeypatch.setattr(lock, "_mutex", mutex)
        leaving = threading.Timer(0.2, tell, [other])
        leaving.start()
        with arbiter.writing():
            assert heard(other) == "left"
        leaving.join()
        tell(third)
        assert heard(third) == "inside"
        monkeypatch.setattr(arbiter_module, "_PATIENCE_S", 0.05)
        with arbiter.writing():
            assert "let it go on" in caplog.text, "let in beside the other one without waiting"
        mutex.release_waiters.set()
        tell(third)
        assert heard(third) == "left"
        late_turn_over()

    def test_a_turn_that_comes_late_is_kept_until_the_end(
        self, arbiter: DriveLock, start: Start, runtime: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(arbiter_module, "_PATIENCE_S", 0.01)
        other, third = start(HOLD), start("sys.stdin.readline()\n" + HOLD)
        assert heard(other) == "inside"
        with arbiter.writing():
            tell(other)
            assert heard(other) == "left"
            late_turn_over()
            tell(third)
            assert is_silent(third), "let in beside us"
        assert heard(third) == "inside"

    def test_closing_does_not_wait_for_a_stopped_process(
        self, tmp_path: Path, start: Start, runtime: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(arbiter_module, "_PATIENCE_S", 0.01)
        other = start(HOLD)
        assert heard(other) == "inside"
        before, one = len(os.listdir("/proc/self/fd")), DriveLock(tmp_path)
        with one.writing():
            pass
        one.close()
        tell(other)
        assert heard(other) == "left"
        late_turn_over()
        assert not is_taken(locks(runtime)["write"]), "the waiting thread has kept what it got"
        assert len(os.listdir("/proc/self/fd")) == before

    def test_a_forked_child_takes_its_own_turns(self, start: Start) -> None:
        parent = start(FORK)
        assert heard(parent) == "child"
        assert is_silent(parent), "let in on the parent's turn"
        tell(parent)
        assert heard(parent) == "parent leaves"
        assert heard(parent) == "child inside"
        assert parent.wait() == 0

    def test_a_forked_child_does_not_keep_a_dead_parents_turn(
        self, arbiter: DriveLock, start: Start, runtime: Path
    ) -> None:
        parent = start(FORK_AND_HANG)
        assert heard(parent) == "child"
        assert is_taken(locks(runtime)["write"])
        parent.kill()
        with arbiter.writing():  # the child lives until its input ends
            pass
