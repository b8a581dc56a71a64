"""A critical section that Ctrl-C does not divide, and waiting that leaves no lock taken."""

import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from itertools import count

import pytest

from lightning_ssd.common import interrupts
from lightning_ssd.common.interrupts import deferring_interrupts
from lightning_ssd.common.waiting import Changes, Latch
from tests.support.helpers import within
from tests.support.threads import at_once


@pytest.fixture(autouse=True)
def put_back():
    before = signal.getsignal(signal.SIGINT)
    yield
    after = signal.signal(signal.SIGINT, before)
    assert after is before


@contextmanager
def handling(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        assert signal.getsignal(signal.SIGINT) is handler
        signal.signal(signal.SIGINT, before)


@contextmanager
def interrupt_after(seconds):
    timer = threading.Timer(seconds, os.kill, args=(os.getpid(), signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.join()


def interrupted_and_wrong():
    with deferring_interrupts():
        signal.raise_signal(signal.SIGINT)
        raise ZeroDivisionError


def test_an_error_of_the_section_is_its_context():
    with pytest.raises(KeyboardInterrupt) as caught:
        interrupted_and_wrong()
    assert isinstance(caught.value.__context__, ZeroDivisionError)
    with pytest.raises(ZeroDivisionError), deferring_interrupts():
        raise ZeroDivisionError


def test_a_handler_of_the_user_is_called_once_the_section_is_over():
    """Lightning and notebooks have their own. One that raises nothing hides no error."""
    calls = []
    done = []
    with handling(lambda number, frame: calls.append((number, list(done)))):
        with deferring_interrupts():
            signal.raise_signal(signal.SIGINT)
            done.append("section")
        assert calls == [(signal.SIGINT, ["section"])]
        with pytest.raises(ZeroDivisionError):
            interrupted_and_wrong()
        assert len(calls) == 2


def test_a_section_within_a_section_does_nothing():
    done = []

    def work():
        with deferring_interrupts():
            outer = signal.getsignal(signal.SIGINT)
            with deferring_interrupts():
                assert signal.getsignal(signal.SIGINT) is outer
                signal.raise_signal(signal.SIGINT)
            done.append("still within")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["still within"]


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_where_python_has_no_handler_nothing_is_done(handler):
    with handling(handler), deferring_interrupts():
        assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize("is_taken_for_main", [False, True], ids=["another", "that of another interpreter"])
def test_in_a_thread_that_may_set_no_handler_nothing_is_done(is_taken_for_main, monkeypatch):
    if is_taken_for_main:
        monkeypatch.setattr(threading, "main_thread", threading.current_thread)
    seen = []

    def work():
        with deferring_interrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    at_once(work)
    assert seen == [signal.getsignal(signal.SIGINT)]


def test_a_further_interrupt_after_some_seconds_is_obeyed_at_once(monkeypatch):
    """A drive may hang, so that the section has no end. Launchers send two at once: that is one."""
    done = []

    def work():
        with deferring_interrupts():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append("section")
            monkeypatch.setattr(interrupts, "_PATIENCE_S", 0.0)
            time.sleep(0.01)
            signal.raise_signal(signal.SIGINT)
            done.append("goes on")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["section"]


@contextmanager
def interrupt_at(number):
    """Ctrl-C at one of the points of entering and leaving a section at which Python looks for signals; gives which."""
    num, found = 0, list[str]()

    def look(frame, event, arg):
        nonlocal num
        if frame.f_code.co_filename in (interrupts.__file__, signal.__file__) and event in ("call", "c_return"):
            num += 1
            if num > number:
                sys.setprofile(None)
                found.append(f"{frame.f_code.co_qualname}:{frame.f_lineno} {event}")
                signal.raise_signal(signal.SIGINT)

    sys.setprofile(look)
    try:
        yield found
    finally:
        sys.setprofile(None)


def test_at_each_point_the_section_is_whole_or_has_not_begun_and_the_interrupt_comes():
    before, counts = signal.getsignal(signal.SIGINT), {(): 0, ("begun", "over"): 0}
    for number in count():
        done = []
        with interrupt_at(number) as where:
            try:
                with deferring_interrupts():
                    done.append("begun")
                    done.append("over")
            except KeyboardInterrupt:
                assert where
            else:
                assert not where, "was lost"
        assert signal.getsignal(signal.SIGINT) is before, where
        if not where:
            break
        counts[tuple(done)] += 1
    assert min(counts.values()) > 5


def test_a_wait_that_was_interrupted_or_limited_leaves_the_latch_to_others():
    latch = Latch()
    with interrupt_after(0.05), pytest.raises(KeyboardInterrupt):
        latch.wait()
    assert not latch.wait_for(0.01)
    threading.Timer(0.05, latch.open).start()
    assert latch.wait_for(30)
    latch.open()
    within(5, lambda: (latch.wait(), latch.wait()))
    assert latch.wait_for(0.0)


def test_an_interrupted_wait_for_a_change_leaves_the_lock():
    changes = Changes()
    with interrupt_after(0.05), pytest.raises(KeyboardInterrupt):
        changes.until(lambda: None)
    found = []
    with changes.lock:
        changes.tell()  # whoever has gone, too
        found.append(1)
    assert changes.until(lambda: found[0]) == 1
