"""Streams without a device: copies that end late, or when the test lets them."""

import queue
import random
import threading
import time
from collections import deque
from contextlib import contextmanager

from tests.support.patience import PATIENCE_S


class LateMark:
    """Passed when the stream gets there."""

    def __init__(self, *, again=None, stream=""):
        self.stream = stream
        self.passed = threading.Event()
        self.again = again or (lambda: self)

    def synchronize(self):
        self.passed.wait()

    def query(self):
        return self.passed.is_set()


class Copies:
    """In host memory, where the CPU is its own stream."""

    is_asynchronous = True

    def copy_out(self, host, device, after):
        return self._copy("out", host, device, after)

    def copy_in(self, device, host, after):
        return self._copy("in", device, host, after)

    def wait_on_current_stream(self, mark):
        mark.synchronize()

    def is_capturing(self):
        return False

    def protect(self, tensor):
        assert tensor.device.type == "cpu"


class SeveralStreams(Copies):
    """Streams that the test switches between by name: each is a thread that does its work in order.

    ``protected`` has every tensor that somebody said to use, with the stream that it was said on, ``waited_on`` the
    marks that streams have waited for. ``work`` queues what a kernel would do.
    """

    current = "main"

    def __init__(self, before=int):
        self.is_recording = False
        self.protected = []
        self.waited_on = []
        self._before = before
        self._streams = {}

    def work(self, action, stream=None):
        name, waiting = stream or self.current, [action]
        mark = LateMark(again=lambda: self.work(lambda: None, name), stream=name)

        def run():
            waiting.pop()()  # whoever sees the mark finds nobody who holds the tensors of the copy
            mark.passed.set()

        if name not in self._streams:
            self._streams[name] = _stream(name, self._before)
        self._streams[name].put(run)
        return mark

    def close(self):
        for work in self._streams.values():
            work.put(None)

    def mark(self):
        return self.work(lambda: None)

    def _copy(self, stream, target, source, after):
        def copy():
            after.passed.wait()
            target.copy_(source)

        return self.work(copy, stream)

    def wait_on_current_stream(self, mark):
        self.waited_on.append(mark)
        super().wait_on_current_stream(mark)

    def is_capturing(self):
        return self.is_recording

    def protect(self, tensor):
        self.protected.append((self.current, tensor.untyped_storage().data_ptr()))


class StreamOfThread(SeveralStreams):
    """The test's thread has its own stream, as under ``torch.cuda.stream``; all others are on the default one."""

    def __init__(self):
        super().__init__()
        self._thread = threading.get_ident()

    def mark(self):
        is_here = threading.get_ident() == self._thread
        return self.work(lambda: None, self.current if is_here else "default")


class LateCopies(SeveralStreams):
    """Each stream sleeps before each copy. Compute is "queued" too: a mark passes late."""

    def __init__(self, *, seed, max_delay_s):
        draw = random.Random(seed)
        super().__init__(lambda: time.sleep(draw.uniform(0, max_delay_s)))

    protect = Copies.protect


@contextmanager
def late_copies(*, max_delay_s=0.004):
    copies = LateCopies(seed=0, max_delay_s=max_delay_s)
    try:
        yield copies
    finally:
        copies.close()


class HeldMark(LateMark):
    """Passed when its copy was let through."""

    def __init__(self):
        super().__init__(stream=self)  # none stands for another
        self.asked = threading.Event()
        self.error = None

    def synchronize(self):
        self.asked.set()
        assert self.passed.wait(PATIENCE_S), "nobody let this copy through"
        if self.error is not None:
            raise self.error


class HeldCopies(Copies):
    """Copies that run, in the order of queuing, when the test says so. Work on the compute stream is done at once.

    ``queued`` counts copies; ``fail`` maps the number of a copy to what its queuing raises, ``fail_late`` to what
    waiting for it raises.
    """

    def __init__(self, *, held=True):
        self.held = held
        self.fail = {}
        self.fail_late = {}
        self.copied = []
        self.num_queued = 0
        self._changed = threading.Condition()
        self._waiting = deque()

    def mark(self):
        mark = HeldMark()
        mark.passed.set()
        return mark

    def _copy(self, direction, target, source, after):
        mark = HeldMark()
        with self._changed:
            number = self.num_queued
            if number in self.fail:
                self.num_queued += 1
                raise self.fail[number]
            mark.error = self.fail_late.get(number)
            self._waiting.append((direction, target, source, mark))
            self.num_queued += 1
            self._changed.notify_all()
        if not self.held:
            self.let_through(1)
        return mark

    def wait_queued(self, number):
        """Until so many copies have been queued in all."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_queued >= number, 10), f"only {self.num_queued} queued"

    def let_through(self, number):
        for _ in range(number):
            direction, target, source, mark = self._waiting.popleft()
            target.copy_(source)
            self.copied.append((direction, target.numel()))
            del target, source
            mark.passed.set()

    def free_run(self):
        """Everything that is held, and from now on each copy at once."""
        self.held = False
        self.let_through(len(self._waiting))


def _stream(name, before):
    work = queue.SimpleQueue()

    def run():
        while (item := work.get()) is not None:
            before()
            item()
            del item  # it holds the tensors of the copy

    threading.Thread(target=run, name=f"late-{name}", daemon=True).start()
    return work
