"""One interface to devices that queue work on streams: CUDA's, and ROCm's, which PyTorch presents as CUDA."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

import torch

__all__ = ["Accelerator", "accelerator_of", "device_types", "is_capturing", "locks_host_memory", "with_index"]

_CUDA: Any = torch.cuda  # PyTorch leaves some of it without types
_NO_POOL = (0, 0)
_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class Accelerator:
    """Calls that the package makes to one device. Streams and events are PyTorch's own objects."""

    __slots__ = ("_current", "_device")
    locks_host_memory = True
    """Whether host memory that this package has mapped can be page-locked for copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._current: tuple[int, Any] | None = None

    @staticmethod
    def current_index() -> int:
        """Return the number of the calling thread's current device."""
        return torch.cuda.current_device()

    def as_current(self) -> AbstractContextManager[Any]:
        """Make it the calling thread's current device within a context."""
        return torch.cuda.device(self._device)

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """Make ``stream`` the calling thread's current stream within a context; only within :meth:`as_current`."""
        return torch.cuda.stream(stream)

    def new_stream(self) -> Any:
        """Return a new stream."""
        return _CUDA.Stream(self._device)

    def current_stream(self) -> Any:
        """Return the calling thread's current stream."""
        # PyTorch makes an object of it by 11 calls of Python, for each saved tensor. Which one it is takes none.
        if _raw_stream is None or self._device.index is None:
            return torch.cuda.current_stream(self._device)
        raw, known = _raw_stream(self._device.index), self._current
        if known is None or known[0] != raw:
            self._current = known = raw, torch.cuda.current_stream(self._device)
        return known[1]

    def event(self) -> Any:
        """Return an event to wait for."""
        return _CUDA.Event(blocking=True)  # or workers that wait would each keep a core busy

    def timing_event(self) -> Any:
        """Return an event that records the time at which the device passes it."""
        return _CUDA.Event(enable_timing=True)

    def is_capturing(self) -> bool:
        """Return whether the current stream captures a graph instead of running its work."""
        with self.as_current():
            return torch.cuda.is_current_stream_capturing()

    def may_have_graphs(self) -> bool:
        """Return whether captured graphs own memory; ``True`` if unknown. May take milliseconds."""
        # Each has a pool of the allocator for what it makes; so have tensors of torch.cuda.MemPool, which do no harm.
        try:
            segments = _CUDA.memory_snapshot()
        except RuntimeError:  # another allocator than PyTorch's own: that of cudaMallocAsync tells nothing
            return True
        pools = [segment.get("segment_pool_id") for segment in segments if segment["device"] == self._device.index]
        return any(pool is None or tuple(pool) != _NO_POOL for pool in pools)

    def synchronize(self) -> None:
        """Wait for the work that is queued on the device."""
        torch.cuda.synchronize(self._device)

    def empty_cache(self) -> None:
        """Return the unused memory of PyTorch's allocator to the device."""
        torch.cuda.empty_cache()

    def memory_stats(self) -> Mapping[str, int]:
        """Return the statistics of PyTorch's allocator; empty if there are none yet."""
        return torch.cuda.memory_stats(self._device)

    def reset_peak(self) -> None:
        """Reset the allocator's peaks to the present values."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def allocated_bytes(self) -> int:
        """Return the bytes that tensors have from the allocator."""
        # Nested, because flattening it costs many times more, and a pass that is traced asks with each pack.
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        return int(stats["allocated_bytes"]["all"]["current"]) if stats else 0

    def free_bytes(self) -> int | None:
        """Return the bytes of the device that no process has allocated; ``None`` if unknown."""
        return int(torch.cuda.mem_get_info(self._device)[0])

    def allowed_bytes(self) -> int | None:
        """Return the limit of PyTorch's allocator in this process; ``None``: the whole device."""
        ask = getattr(_CUDA, "get_per_process_memory_fraction", None)
        fraction = 1.0 if ask is None else ask(self._device)
        return int(fraction * torch.cuda.get_device_properties(self._device).total_memory) if fraction < 1 else None


_KINDS: dict[str, type[Accelerator]] = {"cuda": Accelerator}


def accelerator_of(device: torch.device) -> Accelerator | None:
    """Return the interface to ``device``; ``None``: it is the host, or no device that tensors are moved from. Starts
    no device.
    """
    kind = _KINDS.get(device.type)
    return None if kind is None else kind(device)


def locks_host_memory(device: torch.device) -> bool:
    """Return whether host memory that this package has mapped is page-locked for copies to and from ``device``."""
    accelerator = accelerator_of(device)
    return accelerator is not None and accelerator.locks_host_memory


def device_types() -> tuple[str, ...]:
    """Return the types of the devices that tensors are moved from."""
    return ("cpu", *_KINDS)


def with_index(device: torch.device) -> torch.device:
    """Return ``device`` as its tensors name it: with the number of the calling thread's current one if it has none."""
    if device.type == "cpu":
        return torch.device("cpu")  # what lies on "cpu:0" says that it is on "cpu"
    kind = _KINDS.get(device.type)
    return (
        device
        if cast(Any, device).index is not None or kind is None
        else torch.device(device.type, kind.current_index())
    )


def is_capturing() -> bool:
    """Return whether the calling thread's current stream captures a graph. Starts no device."""
    return bool(_CUDA.is_initialized()) and torch.cuda.is_current_stream_capturing()
