"""The modes of the whole process that decide what an operation computes, and putting them back.

PyTorch's checkpoint looks after autocast, the default device, the mode of gradients and random numbers by itself.

Note: Other threads
    What is put back for one thread every other one sees. So it is not where others train, too; and while it is, no
    thread begins to. Threads that use PyTorch without us cannot be known.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.nn.utils import parametrize

from lightning_ssd.common.restore import Meanwhile

__all__ = ["GlobalModes", "forget_threads", "note_thread", "training_threads"]

_C: Any = torch._C
_parametrize: Any = parametrize


class _Mode(NamedTuple):
    """One of them; what cannot be read is ``None``, and is not put back."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


def _read_deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _write_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


class _Cache(NamedTuple):
    """Values that ``torch.nn.utils.parametrize.cached()`` has computed so far, and how many of them are entered."""

    depth: Any
    keys: tuple[Any, ...]
    values: tuple[Any, ...]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Cache)
            and (self.depth, self.keys) == (other.depth, other.keys)
            and all(one is two for one, two in zip(self.values, other.values, strict=True))
        )

    def __ne__(self, other: object) -> bool:
        return not self == other


def _read_cache() -> _Cache:
    cache = _parametrize._cache
    return _Cache(_parametrize._cache_enabled, tuple(cache), tuple(cache.values()))


def _write_cache(value: _Cache) -> None:
    _parametrize._cache_enabled = value.depth
    _parametrize._cache = dict(zip(value.keys, value.values, strict=True))


def _read_precision() -> str | None:
    """``None`` where the settings of several precisions contradict each other, which PyTorch does not answer."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _write_precision(value: str | None) -> None:
    if value is not None:
        torch.set_float32_matmul_precision(value)


def _known(names: dict[str, str]) -> list[_Mode]:
    """Pairs of functions of ``torch._C``, as far as this version has both."""
    return [
        _Mode(getattr(_C, read), getattr(_C, write))
        for read, write in names.items()
        if hasattr(_C, read) and hasattr(_C, write)
    ]


_MODES = (
    _Mode(torch.get_default_dtype, torch.set_default_dtype),
    _Mode(_read_deterministic, _write_deterministic),
    _Mode(_read_cache, _write_cache),
    _Mode(_read_precision, _write_precision),
    *_known(
        {
            "_get_flash_sdp_enabled": "_set_sdp_use_flash",
            "_get_mem_efficient_sdp_enabled": "_set_sdp_use_mem_efficient",
            "_get_math_sdp_enabled": "_set_sdp_use_math",
            "_get_cudnn_sdp_enabled": "_set_sdp_use_cudnn",
            "_get_overrideable_sdp_enabled": "_set_sdp_use_overrideable",
            "_get_sdp_priority_order": "_set_sdp_priority_order",
            "_get_math_sdp_allow_fp16_bf16_reduction": "_set_math_sdp_allow_fp16_bf16_reduction",
            "_get_cudnn_enabled": "_set_cudnn_enabled",
            "_get_cudnn_benchmark": "_set_cudnn_benchmark",
            "_get_cudnn_deterministic": "_set_cudnn_deterministic",
            "_get_mkldnn_enabled": "_set_mkldnn_enabled",
        }
    ),
)


_training: dict[tuple[int, int], threading.Thread] = {}
"""By its number, and that of the object that it trains with."""
# Guards the threads. Blocks run again under it, so that it comes before every other lock in the order.
_lock = threading.RLock()


def note_thread(owner: object) -> None:
    """This thread trains with ``owner``, until :func:`forget_threads`."""
    key, thread = (threading.get_ident(), id(owner)), threading.current_thread()
    if _training.get(key) is not thread:
        with _lock:
            _training[key] = thread


def training_threads(owner: object) -> list[threading.Thread]:
    """Those that have begun a pass with ``owner``, and live."""
    known = list(_training.items())
    return [thread for (_, number), thread in known if number == id(owner) and thread.is_alive()]


def forget_threads(owner: object) -> None:
    """Forget ``owner``, with which no thread trains any more."""
    for key in [key for key in list(_training) if key[1] == id(owner)]:
        _training.pop(key, None)


class GlobalModes:
    """The modes as they are now, in the thread whose forward it is."""

    def __init__(self) -> None:
        self._values = [mode.read() for mode in _MODES]
        self._thread = threading.current_thread()

    def _differing(self) -> list[tuple[_Mode, Any, Any]]:
        now = [mode.read() for mode in _MODES]
        changes = zip(_MODES, self._values, now, strict=True)
        return [(mode, before, after) for mode, before, after in changes if before is not None and before != after]

    def claim(self) -> AbstractContextManager[object]:
        """While it is entered, no other thread begins to train if modes differ."""
        return _lock if self._differing() else nullcontext()

    def why_not(self) -> str | None:
        """Why they cannot be put back. Ask within :meth:`claim`."""
        if not self._differing():
            return None
        others = [thread for thread in list(_training.values()) if thread is not self._thread and thread.is_alive()]
        return (
            "modes of the process (sdpa_kernel, a precision, a default dtype ...) have changed since, and another "
            f"thread trains ({others[0].name}), which would see them change"
            if others
            else None
        )

    def as_before(self) -> Meanwhile:
        """While it is entered they are as they were when this was made; then as they were when it was called."""
        differing = self._differing()

        def enter() -> None:
            for mode, before, _ in differing:
                mode.write(before)

        def leave() -> None:
            for mode, _, after in differing:
                mode.write(after)

        return Meanwhile(enter, leave)
