"""Work that an interrupt does not divide, and waiting that leaves no lock taken."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from lightning_ssd.common.uninterrupted import Task, undisturbed
from lightning_ssd.common.waiting import Changes, Latch


@contextmanager
def interrupt_after(seconds: float) -> Iterator[None]:
    """Ctrl-C, to the main thread."""
    timer = threading.Timer(seconds, os.kill, args=(os.getpid(), signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.join()


def test_it_runs_elsewhere_and_its_result_comes_back() -> None:
    assert undisturbed(threading.current_thread, "lightning_ssd-test").name == "lightning_ssd-test"
    with pytest.raises(ZeroDivisionError):
        undisturbed(lambda: 1 // 0, "lightning_ssd-test")
    inner: list[str] = []
    thread = threading.Thread(
        target=lambda: inner.append(undisturbed(threading.current_thread, "lightning_ssd-test").name), name="mine"
    )
    thread.start()
    thread.join()
    assert inner == ["mine"], "no interrupt comes there"


def test_an_error_that_a_task_keeps_takes_no_frames_of_the_caller() -> None:
    class Misfit(Exception):
        def __init__(self, first: int, second: int) -> None:
            super().__init__(f"{first} and {second}")
            self.first = first

    def work() -> None:
        raise Misfit(1, 2) from ZeroDivisionError()

    met: list[weakref.ref[threading.Event]] = []

    def ask() -> None:
        memory = threading.Event()
        met.append(weakref.ref(memory))
        task.result()

    task = Task(work, "lightning_ssd-test")
    task.start()
    for _ in range(2):
        with pytest.raises(Misfit, match="1 and 2") as caught:
            ask()
        assert caught.value.first == 1
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert caught.traceback[-1].name == "work"
        del caught
    gc.collect()
    assert [memory() for memory in met] == [None, None]


def test_an_interrupt_is_raised_when_the_work_has_ended_and_is_undone() -> None:
    undone: list[str] = []

    def work() -> str:
        time.sleep(0.3)
        return "made"

    with interrupt_after(0.05), pytest.raises(KeyboardInterrupt):
        undisturbed(work, "lightning_ssd-test", undo=undone.append)
    assert undone == ["made"]


def test_work_that_takes_long_is_undone_without_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_ssd.common.uninterrupted._PATIENCE_S", 0.05)
    go_on, undone = threading.Event(), threading.Event()
    with interrupt_after(0.05), pytest.raises(KeyboardInterrupt):
        undisturbed(partial(go_on.wait, 20), "lightning_ssd-test", undo=lambda result: undone.set())
    assert not undone.is_set()
    go_on.set()
    assert undone.wait(20)


def test_without_a_new_thread_it_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("_thread.start_new_thread", refuse)
    assert undisturbed(threading.current_thread, "lightning_ssd-test") is threading.main_thread()


def test_a_task_that_never_began_is_not_waited_for() -> None:
    task = Task(lambda: 1, "lightning_ssd-test")
    task.wait()
    assert not task.is_done
    task.start()
    assert task.result() == 1
    assert task.is_done


def test_an_interrupted_wait_leaves_the_latch_to_others() -> None:
    latch = Latch()
    with interrupt_after(0.05), pytest.raises(KeyboardInterrupt):
        latch.wait()
    assert not latch.wait_for(0.01)
    latch.open()
    latch.open()
    for _ in range(2):
        latch.wait()
    assert latch.wait_for(0.0)


def test_an_interrupted_wait_for_a_change_leaves_the_lock() -> None:
    changes = Changes()
    with interrupt_after(0.05), pytest.raises(KeyboardInterrupt):
        changes.until(lambda: None)
    found: list[int] = []
    with changes.lock:
        changes.tell()  # whoever has gone, too
        found.append(1)
    assert changes.until(lambda: found[0]) == 1


def test_a_latch_that_was_waited_for_with_a_limit_can_be_waited_for_again() -> None:
    latch = Latch()
    assert not latch.wait_for(0.01)
    threading.Timer(0.05, latch.open).start()
    assert latch.wait_for(30)
    waiter = threading.Thread(target=latch.wait, daemon=True)
    waiter.start()
    waiter.join(5)
    assert not waiter.is_alive()
