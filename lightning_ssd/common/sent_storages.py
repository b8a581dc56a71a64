"""Record which memory of a CUDA device was sent to other processes.

PyTorch reports all memory of a CUDA device as shared, since it could be sent. The cache of
``torch.multiprocessing.reductions`` names storages that were sent, but by the handle of the device's allocation. Many
storages lie in one allocation, and the cache knows only the last one. Each storage that this process has received has
an entry of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing import reductions

from lightning_ssd.common.tensors import StorageKey

__all__ = ["is_in_other_processes", "noting_sent", "sending_is_noted"]

_sent: dict[int, StorageKey] = {}
"""Storages that were sent, by the addresses of their structs, which are not reused while the keys live."""
_MIN_LIMIT = 128
_FILE = b"/torch_"
"""Beginning of the names of PyTorch's files in shared memory."""


class _Noting:
    """State of the record in this process."""

    has_missed = False
    """Whether storages may have been sent before the record began."""
    limit = _MIN_LIMIT


def is_in_other_processes(storage: torch.UntypedStorage) -> bool:
    """Return whether another process may have the memory of ``storage``, too."""
    if storage.device.type == "cpu":
        return storage.is_shared()
    if _Noting.has_missed or storage._cdata in _sent:
        return True
    return any(known.cdata == storage._cdata for known in list(reductions.shared_cache.values()))


def sending_is_noted() -> None:
    """Note that the record begins now. Storages in the allocations of PyTorch's cache may have been sent before."""
    cache = list(reductions.shared_cache.items())
    _Noting.has_missed = any(_is_of_allocation(key) and not known.expired() for key, known in cache)


def _is_of_allocation(key: object) -> bool:
    """Return whether a key is a handle of an allocation, not the name of a file with shared memory of a CPU."""
    return isinstance(key, bytes) and not key.startswith(_FILE)


def noting_sent(share: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of ``UntypedStorage._share_cuda_``, which sends memory of a device, that records each."""

    def share_and_note(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        _note(storage)
        return share(storage, *args, **kwargs)

    return share_and_note


def _note(storage: torch.UntypedStorage) -> None:
    _sent[storage._cdata] = StorageKey(storage)
    if len(_sent) > _Noting.limit:
        for number, key in list(_sent.items()):
            if not key.alive():
                _sent.pop(number, None)
        _Noting.limit = max(_MIN_LIMIT, 2 * len(_sent))
