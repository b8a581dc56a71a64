"""One interface to devices that queue work on streams: ``torch.cuda`` for CUDA, ``torch.accelerator`` for the others.

CUDA (and ROCm, which PyTorch presents as CUDA) has events on which a waiting thread sleeps, graphs, and page locking.
Other accelerators are used through ``torch.accelerator``, ``torch.Stream`` and ``torch.Event``. Some of these calls are
younger than the oldest supported PyTorch, and an accelerator need not have all of them. A short trial finds out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch

__all__ = [
    "Accelerator",
    "CudaAccelerator",
    "accelerator_of",
    "current_device",
    "device_types",
    "has_streams",
    "is_capturing",
    "locks_host_memory",
    "what_is_missing",
    "with_index",
]

# PyTorch leaves some of these without types, and some versions do not have all of them.
_CUDA: Any = torch.cuda
_GENERIC: Any = torch.accelerator
_TRIAL_NBYTES = 64 << 10
_NO_POOL = (0, 0)
_proved: set[torch.device] = set()


class Accelerator:
    """Calls that the package makes to one device of any kind that ``torch.accelerator`` knows.

    Streams and events are PyTorch's own objects. It has not run on any such device but CUDA's.
    """

    __slots__ = ("_device",)
    locks_host_memory = False
    """Whether host memory that this package has mapped can be page-locked for copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def as_current(self) -> AbstractContextManager[Any]:
        """Make it the calling thread's current device within a context."""
        return cast(AbstractContextManager[Any], _GENERIC.device_index(self._device.index))

    @contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        """Make ``stream`` the calling thread's current stream within a context; only within :meth:`as_current`."""
        before = self.current_stream()
        _GENERIC.set_stream(stream)
        try:
            yield
        finally:
            _GENERIC.set_stream(before)

    def new_stream(self) -> Any:
        """Return a new stream."""
        return torch.Stream(self._device)

    def current_stream(self) -> Any:
        """Return the calling thread's current stream."""
        return _GENERIC.current_stream(self._device)

    def event(self) -> Any:
        """Return an event to wait for."""
        return torch.Event(self._device)  # PyTorch ignores blocking=True here: a thread that waits may spin

    def timing_event(self) -> Any:
        """Return an event that records the time at which the device passes it."""
        return torch.Event(self._device, enable_timing=True)

    def is_capturing(self) -> bool:
        """Return whether the current stream captures a graph instead of running its work."""
        stream = self.current_stream()
        if hasattr(stream, "is_capturing"):
            return bool(stream.is_capturing())
        # Of an older PyTorch: a device has graphs only if its module can say so.
        ask = getattr(torch.get_device_module(self._device), "is_current_stream_capturing", None)
        if ask is None:
            return False
        with self.as_current():
            return bool(ask())

    def may_have_graphs(self) -> bool:
        """Return whether captured graphs own memory; ``True`` if unknown. May take milliseconds."""
        return hasattr(torch.get_device_module(self._device), "graph")

    def synchronize(self) -> None:
        """Wait for the work that is queued on the current stream."""
        event = self.event()  # not every device can wait for all of its streams
        event.record(self.current_stream())
        event.synchronize()

    def empty_cache(self) -> None:
        """Return the unused memory of PyTorch's allocator to the device."""
        self._ask("empty_cache", None, of_device=False)

    def memory_stats(self) -> Mapping[str, int]:
        """Return the statistics of PyTorch's allocator, by CUDA's names; empty if there are none yet."""
        return cast(Mapping[str, int], self._ask("memory_stats", {}))

    def reset_peak(self) -> None:
        """Reset the allocator's peaks to the present values."""
        self._ask("reset_peak_memory_stats", None)

    def allocated_bytes(self) -> int:
        """Return the bytes that tensors have from the allocator; 0 if unknown."""
        return int(self._ask("memory_allocated", 0))

    def free_bytes(self) -> int | None:
        """Return the bytes of the device that no process has allocated; ``None`` if unknown."""
        info = self._ask("get_memory_info", None)
        if info is None:  # asked in the way of before
            ask = getattr(torch.get_device_module(self._device), "mem_get_info", None)
            info = None if ask is None else ask(self._device)
        return None if info is None else int(info[0])

    def allowed_bytes(self) -> int | None:
        """Return the limit of PyTorch's allocator in this process; ``None``: the whole device."""
        return None  # it has no word for that

    def _ask(self, name: str, unknown: object, *, of_device: bool = True) -> Any:
        """Call a function of ``torch.accelerator``; return ``unknown`` if PyTorch or the device does not support it."""
        question: Callable[..., Any] | None = getattr(_GENERIC, name, None)
        if question is None:
            return unknown
        try:
            return question(self._device) if of_device else question()
        except RuntimeError as error:  # PyTorch has no way to ask beforehand
            if isinstance(error, NotImplementedError) or "is not a DeviceAllocator" in str(error):
                return unknown
            raise


_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class CudaAccelerator(Accelerator):
    """One CUDA device."""

    __slots__ = ("_current",)
    locks_host_memory = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._current: tuple[int, Any] | None = None

    def as_current(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self._device)

    def using(self, stream: Any) -> AbstractContextManager[Any]:  # type: ignore[override]  # of a generator there
        return torch.cuda.stream(stream)

    def new_stream(self) -> Any:
        return _CUDA.Stream(self._device)

    def current_stream(self) -> Any:
        # PyTorch makes an object of it by 11 calls of Python, for each saved tensor. Which one it is takes none.
        if _raw_stream is None or self._device.index is None:
            return torch.cuda.current_stream(self._device)
        raw, known = _raw_stream(self._device.index), self._current
        if known is None or known[0] != raw:
            self._current = known = raw, torch.cuda.current_stream(self._device)
        return known[1]

    def event(self) -> Any:
        return _CUDA.Event(blocking=True)  # or workers that wait would each keep a core busy

    def timing_event(self) -> Any:
        return _CUDA.Event(enable_timing=True)

    def is_capturing(self) -> bool:
        with self.as_current():
            return torch.cuda.is_current_stream_capturing()

    def may_have_graphs(self) -> bool:
        # Each has a pool of the allocator for what it makes; so have tensors of torch.cuda.MemPool, which do no harm.
        try:
            segments = _CUDA.memory_snapshot()
        except RuntimeError:  # another allocator than PyTorch's own: that of cudaMallocAsync tells nothing
            return True
        pools = [segment.get("segment_pool_id") for segment in segments if segment["device"] == self._device.index]
        return any(pool is None or tuple(pool) != _NO_POOL for pool in pools)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def memory_stats(self) -> Mapping[str, int]:
        return torch.cuda.memory_stats(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def allocated_bytes(self) -> int:
        # Nested, because flattening it costs many times more, and a pass that is traced asks with each pack.
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        return int(stats["allocated_bytes"]["all"]["current"]) if stats else 0

    def free_bytes(self) -> int | None:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def allowed_bytes(self) -> int | None:
        ask = getattr(_CUDA, "get_per_process_memory_fraction", None)
        fraction = 1.0 if ask is None else ask(self._device)
        return int(fraction * torch.cuda.get_device_properties(self._device).total_memory) if fraction < 1 else None


def accelerator_of(device: torch.device) -> Accelerator | None:
    """Return the interface to ``device``; ``None``: ``torch.accelerator`` does not know it. Starts no device."""
    if device.type == "cuda":
        return CudaAccelerator(device)
    return Accelerator(device) if device.type == _generic_type() else None


def locks_host_memory(device: torch.device) -> bool:
    """Return whether host memory that this package has mapped is page-locked for copies to and from ``device``."""
    accelerator = accelerator_of(device)
    return accelerator is not None and accelerator.locks_host_memory


def has_streams(device: torch.device) -> bool:
    """Return whether the device has streams that tensors can be moved on; see :func:`what_is_missing`."""
    return device.type != "cpu" and what_is_missing(device) is None


def what_is_missing(device: torch.device) -> str | None:
    """Return why tensors on ``device`` cannot be moved, as a clause; ``None``: they can. CPUs and CUDA always can.

    On any other device each call runs a short trial, which starts the device, until one trial has succeeded.
    """
    if device.type in ("cpu", "cuda") or device in _proved:
        return None
    accelerator = accelerator_of(device)
    if accelerator is None:
        return "torch.accelerator knows no such device here"
    missing = _try_out(accelerator, device)
    if missing is None:
        _proved.add(device)
    return missing


def device_types() -> tuple[str, ...]:
    """Return the device types that the package supports: "cpu", "cuda", and the accelerator of this PyTorch build."""
    generic = _generic_type()
    return ("cpu", "cuda") if generic is None else ("cpu", "cuda", generic)


def current_device() -> torch.device | None:
    """Return the calling thread's current device; ``None`` while no device is in use. Starts none."""
    if _CUDA.is_initialized():
        return torch.device("cuda", _CUDA.current_device())
    kind = _generic_type()
    is_initialized = None if kind is None else getattr(torch.get_device_module(kind), "is_initialized", None)
    if kind is None or is_initialized is None or not is_initialized():
        return None
    return torch.device(kind, torch.accelerator.current_device_index())


def with_index(device: torch.device) -> torch.device:
    """Return ``device`` as its tensors name it: with the number of the calling thread's current one if it has none."""
    if device.type == "cpu":
        return torch.device("cpu")  # what lies on "cpu:0" says that it is on "cpu"
    if cast(Any, device).index is not None or accelerator_of(device) is None:
        return device
    current = _CUDA.current_device() if device.type == "cuda" else torch.accelerator.current_device_index()
    return torch.device(device.type, current)


def is_capturing() -> bool:
    """Return whether the calling thread's current stream captures a graph. Starts no device."""
    if _CUDA.is_initialized():
        return torch.cuda.is_current_stream_capturing()
    device = current_device()
    accelerator = None if device is None else accelerator_of(device)
    return accelerator is not None and accelerator.is_capturing()


def _generic_type() -> str | None:
    """Return the device type of this PyTorch's accelerator, built in or loaded; ``None``: there is none, or CUDA."""
    known = torch.accelerator.current_accelerator()
    return None if known is None or known.type == "cuda" else known.type


def _try_out(accelerator: Accelerator, device: torch.device) -> str | None:
    """Move bytes there and back as training does; return what failed, as a clause."""
    numbers = torch.arange(_TRIAL_NBYTES, device="cpu").remainder(251).to(torch.uint8)
    back = torch.zeros_like(numbers)
    try:
        with accelerator.as_current():
            here, side = accelerator.current_stream(), accelerator.new_stream()
            begin, end, ready = accelerator.timing_event(), accelerator.timing_event(), accelerator.event()
            begin.record(here)
            source = torch.empty(_TRIAL_NBYTES, dtype=torch.uint8, device=device).copy_(numbers)
            there = torch.empty(0, dtype=torch.uint8, device=device).set_(source.untyped_storage())
            there.record_stream(side)
            ready.record(here)
            with accelerator.using(side):
                side.wait_event(ready)
                back.copy_(there, non_blocking=True)
                ready = accelerator.event()
                ready.record(side)
            ready.synchronize()
            end.record(here)
            end.synchronize()
            begin.elapsed_time(end)
            accelerator.is_capturing()
            cast(Any, torch.get_device_module(device)).default_generators[device.index or 0].get_state()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AttributeError, IndexError, ValueError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        return f"a trial of it failed ({reason})"
    return None if torch.equal(back, numbers) else "bytes came back from it other than they were"
