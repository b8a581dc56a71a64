"""Memory of a CUDA device that was sent to other processes.

PyTorch says of all memory of a CUDA device that it is shared, since it could be sent. What was sent is in the cache of
the module that does it: but by the handle of an allocation of the device, in which many storages lie, so that the cache
knows the last one alone. What this process has received has an entry of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing import reductions

from lightning_ssd.common.tensors import StorageKey

__all__ = ["is_in_other_processes", "noting_sent", "sending_is_noted"]

_sent: dict[int, StorageKey] = {}
"""By their addresses, which are not lent again as long as the keys live."""
_MIN_LIMIT = 128
_FILE = b"/torch_"
"""As all names of PyTorch's files in shared memory begin."""


class _Noting:
    """Of this process."""

    has_missed = False
    """Whether storages may have been sent that nobody knows of."""
    limit = _MIN_LIMIT


def is_in_other_processes(storage: torch.UntypedStorage) -> bool:
    """Whether another process may have the memory, too."""
    if storage.device.type == "cpu":
        return storage.is_shared()
    if _Noting.has_missed or storage._cdata in _sent:
        return True
    return any(known.cdata == storage._cdata for known in list(reductions.shared_cache.values()))


def sending_is_noted() -> None:
    """From now on, by :func:`noting_sent`. Beside what PyTorch's cache has and is alive there may be more."""
    cache = list(reductions.shared_cache.items())
    _Noting.has_missed = any(_is_of_allocation(key) and not known.expired() for key, known in cache)


def _is_of_allocation(key: object) -> bool:
    """Not the name of a file, by which memory of a CPU is shared (torch.multiprocessing's "file_system")."""
    return isinstance(key, bytes) and not key.startswith(_FILE)


def noting_sent(share: Callable[..., Any]) -> Callable[..., Any]:
    """What stands in for ``UntypedStorage._share_cuda_``, by which all memory of a device is sent."""

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
