"""``torch.cuda`` with two devices that are not there: who asks one of them while another is current has made a fault.

Work is done at once, in host memory. A thread's device is 0 until it says otherwise, as CUDA's is.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from lightning_ssd.tiers import streams


@dataclass
class PretendedCuda:
    """What was asked of the devices."""

    faults: list[str] = field(default_factory=list)
    threads: dict[str, set[int]] = field(default_factory=dict)
    """Threads, with the devices that they have used."""
    local: threading.local = field(default_factory=threading.local)

    @property
    def current(self):
        """This thread's device."""
        return getattr(self.local, "device", 0)

    def used(self, device, what):
        """CUDA sets up a context on the device that is current, and fails on another one's streams or marks."""
        thread = threading.current_thread().name
        self.threads.setdefault(thread, set()).add(device)
        if self.current != device:
            self.faults.append(f"{what} of device {device} while {self.current} was current (in {thread})")

    @contextmanager
    def entered(self, device):
        """In the place of ``torch.cuda.device``."""
        before, self.local.device = self.current, device.index
        try:
            yield
        finally:
            self.local.device = before

    @contextmanager
    def streaming(self, stream):
        """In the place of ``torch.cuda.stream``: it goes to the stream's device, and back to the one before."""
        self.used(stream.device, "a stream was made current")
        yield
        self.used(stream.device, "a stream was left")


class Stream:
    def __init__(self, cuda, device):
        self._cuda, self.device = cuda, device

    def wait_event(self, event):
        assert event.device is not None, "nobody has recorded this event"


class Event:
    def __init__(self, cuda):
        self._cuda = cuda
        self.device = None

    def record(self, stream):
        self.device = stream.device
        # Recording on a stream is allowed anywhere.

    def synchronize(self):
        self._ask("an event was waited for")

    def query(self):
        self._ask("an event was asked for")
        return True

    def _ask(self, what):
        assert self.device is not None, "nobody has recorded this event"
        self._cuda.used(self.device, what)


@contextmanager
def pretended_cuda():
    """While it is entered, ``torch.cuda`` has streams and events of devices that are not there."""
    cuda = PretendedCuda()

    def make_stream(device):
        return Stream(cuda, device.index)

    def make_event(**_):
        return Event(cuda)

    def is_capturing():
        cuda.threads.setdefault(threading.current_thread().name, set()).add(cuda.current)
        return False

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "Stream": make_stream,
            "Event": make_event,
            "device": cuda.entered,
            "stream": cuda.streaming,
            "current_stream": make_stream,
            "is_current_stream_capturing": is_capturing,
        }.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(streams, "_STREAM", make_stream, raising=False)
        patch.setattr(streams, "_EVENT", make_event, raising=False)
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: cuda.used(stream.device, "memory"))
        yield cuda
