"""The contract of all tiers. A tier is a place with capacity where the bytes of storages wait."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from lightning_ssd.common.tensors import Region
from lightning_ssd.errors import StorageError
from lightning_ssd.tiers.streams import StreamEvent
from lightning_ssd.tiers.transfer_queue import Transfer

__all__ = [
    "NoMemoryToReadError",
    "Progress",
    "ReadOwner",
    "StoredBytes",
    "Tier",
    "WriteOwner",
    "WriteRequest",
    "check_size",
    "moved_meanwhile",
]


class NoMemoryToReadError(MemoryError):
    """A worker has found no memory for a speculative read. Nothing was read; the bytes are where they were."""


class StoredBytes(Protocol):
    """Where the bytes of one storage wait. Only the tier that made it knows what is in it."""

    @property
    def body_nbytes(self) -> int:
        """Bytes that moved to the tier."""

    @property
    def is_complete(self) -> bool:
        """Whether these are all; else the owner has given the write up, and it must not be read."""


class WriteOwner(Protocol):
    """Whose bytes are written. All methods are called from a worker."""

    def write_begins(self) -> torch.UntypedStorage | None:
        """Hand over the storage to write, or ``None`` when that is no longer wanted."""

    def is_wanted(self) -> bool:
        """Whether a write that has begun is still of use. Where it is not, it never is again."""

    def write_ended(self, stored: StoredBytes | None, error: BaseException | None) -> None:
        """Either ``stored`` or ``error`` is given. The owner frees ``stored`` through the tier. Must not raise."""


class WriteRequest(NamedTuple):
    """One storage to write."""

    owner: WriteOwner
    nbytes: int
    after: StreamEvent | None
    """Written once this has passed."""
    label: str


class ReadOwner(Protocol):
    """Who wants bytes back. Called from a worker."""

    def read_ended(
        self, storage: torch.UntypedStorage | None, mark: StreamEvent | None, error: BaseException | None
    ) -> None:
        """Either ``storage`` (there once ``mark`` has passed) or ``error`` is given. Must not raise."""


class Progress(NamedTuple):
    """Counters of a tier since it was opened. Seconds are those in which at least one move was under way."""

    written_bytes: int
    write_busy_s: float
    read_bytes: int
    read_busy_s: float


class Tier(Protocol):
    """The contract of all tiers. Every method may be called from any thread and under the locks of layers above;
    none but ``flush`` and ``close`` waits for bytes to move.
    """

    @property
    def name(self) -> str:
        """For events and counters: "ssd" or "host"."""

    def write(self, owner: WriteOwner, nbytes: int, after: StreamEvent | None, *, label: str) -> bool:
        """Queue a write of ``nbytes`` bytes behind ``after``.

        Returns:
            Whether there is room. ``False``: nothing was queued and the owner is not called. ``True``: the place is
            taken for good or goes back by itself, when the owner no longer wants the write, it fails or is discarded
            at close. A tier that learns of its room while it writes returns ``True`` and lets the write fail.

        Raises:
            OffloaderClosedError: after close.
        """

    def read(
        self,
        owner: ReadOwner,
        stored: StoredBytes,
        device: torch.device,
        *,
        urgent: bool,
        into: torch.UntypedStorage | None = None,
        after: StreamEvent | None = None,
    ) -> Transfer:
        """Queue a read.

        Args:
            owner: is told of the end.
            stored: what to read.
            device: of the memory to read into.
            urgent: the training thread waits for it.
            into: that memory; ``None``: it is allocated in the calling thread and on its stream, or, where no stream
                is asked and the read is not urgent, by a worker.
            after: of ``into``: it may be written to once this has passed, since PyTorch lends memory of a device while
                kernels of its former owner are still queued.

        Raises:
            OffloaderClosedError: after close.
            MemoryError: no memory (``torch.OutOfMemoryError`` on a device). Nothing was queued. Where a worker finds
                none, the owner is told.
            ValueError: ``into`` has another size.
        """

    def promote(self, read: Transfer) -> None:
        """Serve this read before the speculative ones: the training thread waits for it."""

    def free(self, stored: StoredBytes) -> None:
        """Give the place back. ``stored`` must not be read any more. Harmless after close."""

    def progress(self) -> Progress:
        """Bytes and busy seconds of both directions."""

    def flush(self) -> None:
        """Block until every queued write has ended."""

    def close(self) -> None:
        """End what is under way, drop what has not begun, give everything back. Idempotent."""


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
    """Return what is wrong with the bytes that were read from ``memory`` while it was written.

    ``untyped_storage().resize_()`` and ``share_memory_()`` give a storage other memory and free what it had, with no
    sign in its version. What was written may be anything then; what the storage has now is its owner's.
    """
    if storage is None or memory is None or Region.of(storage) == memory:
        return None
    return StorageError(
        f"{label} was given other memory while it was written (resize_ or share_memory_); it stays in memory"
    )
