"""One call in a thread of its own."""

import gc
import threading
import weakref

import pytest

from lightning_ssd.common.task import Task


def test_an_error_that_a_task_keeps_takes_no_frames_of_the_caller():
    class Misfit(Exception):
        def __init__(self, first, second):
            super().__init__(f"{first} and {second}")
            self.first = first

    def work():
        raise Misfit(1, 2) from ZeroDivisionError()

    met = []

    def ask():
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


def test_a_task_that_never_began_is_not_waited_for():
    task = Task(threading.current_thread, "lightning_ssd-test")
    task.wait()
    assert not task.is_done
    task.start()
    assert task.result().name == "lightning_ssd-test"
    assert task.is_done
