"""Copies between a device and host memory, on streams of their own.

Note: Who waits for whom
    Pack runs on the *producing* stream and marks it. A copy out runs on the copy-out stream, which first waits for
    that mark; the worker then waits (on the host) for the copy's own mark before it writes the staging buffer. A
    reload allocates its memory on the *consuming* stream and marks it, since the allocator may hand out memory
    whose earlier user is still queued there; the copy-in stream waits for that mark, and the consuming stream waits
    for the copy's mark, so that no Python thread waits for a copy. "Current" streams are asked for at each call.
    Memory in flight is held by the transfer until its mark has passed.

Note: Memory that several streams use
    Plain autograd holds a saved tensor until backward, whichever stream uses it. We let go of it after its write, and
    a reload is allocated by the thread that prefetches it. So every packed and every unpacked tensor is recorded for
    the stream that uses it; for the stream that allocated it this does nothing.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol, cast

import torch

from lightning_ssd.common.accelerators import Accelerator
from lightning_ssd.common.profiling import spanned

__all__ = ["PASSED", "CopyEngine", "HostCopies", "StreamCopies", "StreamEvent"]


class StreamEvent(Protocol):
    """A point in a stream's work."""

    stream: Any
    """Hashable: of two points of equal streams the later one stands for both. ``None``: the host's own."""

    def synchronize(self) -> None:
        """Block the calling thread until the stream has passed this point."""

    def query(self) -> bool:
        """Whether the stream has passed this point."""

    def again(self) -> StreamEvent:
        """The present end of the same stream."""


class CopyEngine(Protocol):
    """Copies between one device and the host. Tests put adversarially slow ones in its place."""

    is_asynchronous: bool
    """Whether work goes on when the call that asked for it has returned."""

    def mark(self) -> StreamEvent:
        """The current stream's present end: all that has been queued so far."""

    def copy_out(self, host: torch.Tensor, device: torch.Tensor, after: StreamEvent) -> StreamEvent:
        """Queue ``host <- device`` on the copy-out stream, behind ``after``; return the copy's own mark."""

    def copy_in(self, device: torch.Tensor, host: torch.Tensor, after: StreamEvent) -> StreamEvent:
        """Queue ``device <- host`` on the copy-in stream, behind ``after``; return the copy's own mark."""

    def wait_on_current_stream(self, mark: StreamEvent) -> None:
        """Let the current stream, not the calling thread, wait for ``mark``."""

    def is_capturing(self) -> bool:
        """Whether the current stream records a graph instead of working."""

    def protect(self, tensor: torch.Tensor) -> None:
        """The current stream uses ``tensor``: when it is freed, its memory may be reused only behind that use."""


class _Passed:
    """A point that was passed before it was asked for."""

    __slots__ = ()
    stream = None

    def synchronize(self) -> None:
        """Nothing is left to wait for."""

    def query(self) -> bool:
        return True

    def again(self) -> StreamEvent:
        return self


PASSED: StreamEvent = _Passed()
"""The mark of all that is done when a call returns."""


class HostCopies:
    """Those of a CPU, whose memory is the host's: they are done when the call returns."""

    is_asynchronous = False

    def mark(self) -> StreamEvent:
        return PASSED

    def copy_out(self, host: torch.Tensor, device: torch.Tensor, after: StreamEvent) -> StreamEvent:
        return self._copy(host, device, after)

    def copy_in(self, device: torch.Tensor, host: torch.Tensor, after: StreamEvent) -> StreamEvent:
        return self._copy(device, host, after)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, after: StreamEvent) -> StreamEvent:
        after.synchronize()
        # PyTorch's own copy would start a pool of threads in each worker that calls it.
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
        return PASSED

    def wait_on_current_stream(self, mark: StreamEvent) -> None:
        mark.synchronize()

    def is_capturing(self) -> bool:
        return False

    def protect(self, tensor: torch.Tensor) -> None:
        """There is one stream only."""


class _EventMark:
    """An event, with its device: a worker that waits for it while its own device is 0 may set up a context there."""

    __slots__ = ("_accelerator", "event", "stream")

    def __init__(self, accelerator: Accelerator, stream: Any, event: Any = None) -> None:
        self._accelerator = accelerator
        self.stream = stream
        self.event = accelerator.event() if event is None else event
        self.event.record(stream)

    @spanned("lightning_ssd::device")
    def synchronize(self) -> None:
        with self._accelerator.as_current():
            self.event.synchronize()

    def query(self) -> bool:
        with self._accelerator.as_current():
            return bool(self.event.query())

    def again(self) -> StreamEvent:
        with self._accelerator.as_current():
            return _EventMark(self._accelerator, self.stream)


class StreamCopies:
    """The real thing: two streams of our own on one device."""

    is_asynchronous = True

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._out = accelerator.new_stream()
        self._in = accelerator.new_stream()

    def mark(self) -> StreamEvent:
        return _EventMark(self._accelerator, self._accelerator.current_stream())

    def copy_out(self, host: torch.Tensor, device: torch.Tensor, after: StreamEvent) -> StreamEvent:
        return self._copy(self._out, host, device, after)

    def copy_in(self, device: torch.Tensor, host: torch.Tensor, after: StreamEvent) -> StreamEvent:
        return self._copy(self._in, device, host, after)

    def wait_on_current_stream(self, mark: StreamEvent) -> None:
        self._accelerator.current_stream().wait_event(cast(_EventMark, mark).event)

    @spanned("lightning_ssd::copy")
    def _copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor, after: StreamEvent) -> StreamEvent:
        # A worker's device is 0 at first. Leaving the stream alone would go back there, and so set up a context on a
        # device that another process trains on; leaving the device does not.
        with self._accelerator.as_current(), self._accelerator.using(stream):
            if after is not PASSED:
                stream.wait_event(cast(_EventMark, after).event)
            event = self._accelerator.event()  # first: without one, no mark could tell when the buffer is free again
            target.copy_(source, non_blocking=True)
            try:
                return _EventMark(self._accelerator, stream, event)
            except BaseException:
                stream.synchronize()
                raise

    def is_capturing(self) -> bool:
        return self._accelerator.is_capturing()

    def protect(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._accelerator.current_stream())
