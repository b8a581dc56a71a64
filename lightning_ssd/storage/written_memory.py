"""Whether memory that is written is still its storage's own: when the write begins, and when it has ended."""

from __future__ import annotations

import torch

from lightning_ssd.errors import StorageError
from lightning_ssd.tensors import Region

__all__ = ["check_size", "moved_meanwhile"]


def check_size(storage: torch.UntypedStorage, nbytes: int, label: str) -> Region:
    """Where the memory of a storage is, when its write begins.

    Raises:
        StorageError: it has not the size any more with which its write was queued. It stays with its owner then.
    """
    if storage.nbytes() != nbytes:
        raise StorageError(
            f"{label} has {storage.nbytes():,} bytes, and had {nbytes:,} when its write was queued; saved storages "
            "must not be resized"
        )
    return Region.of(storage)


def moved_meanwhile(storage: torch.UntypedStorage | None, memory: Region | None, label: str) -> StorageError | None:
    """What is wrong with the bytes that were read from ``memory`` while it was written.

    ``untyped_storage().resize_()`` and ``share_memory_()`` give a storage other memory and free what it had, with no
    sign in its version. What was written may be anything then; what the storage has now is its owner's.
    """
    if storage is None or memory is None or Region.of(storage) == memory:
        return None
    return StorageError(
        f"{label} was given other memory while it was written (resize_ or share_memory_); it stays in memory"
    )
