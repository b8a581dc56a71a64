"""Tell whether another process may have memory of this one.

PyTorch reports all memory of a CUDA device as shared, since it could be sent. Its cache of what was sent
(``torch.multiprocessing.reductions``) names allocations, of which each has many storages. So as soon as any memory of a
device is sent, all of it counts as shared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing import reductions

__all__ = ["is_in_other_processes", "noting_sent", "sending_is_noted"]

_FILE = b"/torch_"
"""Beginning of the names of PyTorch's files in shared memory."""


class _Noted:
    """State of the record in this process."""

    has_sent = False
    """Whether memory of a device was sent."""


def is_in_other_processes(storage: torch.UntypedStorage) -> bool:
    """Return whether another process may have the memory of ``storage``, too."""
    if storage.device.type == "cpu":
        return storage.is_shared()
    # What this process has received has an entry of its own.
    return _Noted.has_sent or any(known.cdata == storage._cdata for known in list(reductions.shared_cache.values()))


def sending_is_noted() -> None:
    """Note that :func:`noting_sent` is at work from now on. PyTorch's cache tells of what was sent before."""
    sent = [key for key in list(reductions.shared_cache) if isinstance(key, bytes) and not key.startswith(_FILE)]
    _Noted.has_sent = _Noted.has_sent or bool(sent)


def noting_sent(share: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of ``UntypedStorage._share_cuda_``, which sends memory of a device, that notes it."""

    def note_and_share(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        _Noted.has_sent = True
        return share(storage, *args, **kwargs)

    return note_and_share
