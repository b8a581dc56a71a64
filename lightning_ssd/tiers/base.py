"""The contract between tiers and the owners of the bytes that they keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from lightning_ssd.storage.extents import Extent
from lightning_ssd.tiers.copy_paths import Edges
from lightning_ssd.tiers.streams import StreamEvent

if TYPE_CHECKING:
    from lightning_ssd.tiers.tier import Tier

__all__ = [
    "NoMemoryToReadError",
    "Part",
    "Progress",
    "ReadEnd",
    "ReadOwner",
    "ReadRequest",
    "StoredBytes",
    "WriteEnd",
    "WriteOwner",
    "WriteRequest",
]


class NoMemoryToReadError(MemoryError):
    """A worker has found no memory for a speculative read. Nothing was read; the bytes are where they were."""


class Part(NamedTuple):
    """``nbytes`` bytes from ``start`` of a storage on, in one arena: that of the lane."""

    start: int
    nbytes: int
    lane: int
    extent: Extent


@dataclass(eq=False, slots=True)
class StoredBytes:
    """Where the bytes of one storage wait. Only the tier that made it knows what is in it."""

    tier: Tier
    parts: tuple[Part, ...]
    """In order."""
    nbytes: int
    edges: Edges
    checksums: tuple[int, ...]
    """One value per chunk, or none."""
    label: str
    body_nbytes: int
    """Bytes that moved to the tier."""
    missing_nbytes: int = 0
    """Bytes that a write left out when its owner gave it up; it must not be read then."""
    is_freed: bool = False
    """Whether the owner has freed it. The tier's lock guards this and the next."""
    readers: tuple[object, ...] = ()
    """Reads and copies under way: the place is not lent again before the last of them has ended."""


WriteEnd = tuple[Any, StoredBytes | None, BaseException | None]
"""An owner, with either the bytes where they are now, which it frees through the tier, or an error."""
ReadEnd = tuple[Any, torch.UntypedStorage | None, StreamEvent | None, BaseException | None]
"""An owner, with either a storage (there once the mark has passed) or an error."""


class WriteOwner(Protocol):
    """Whose bytes are written. All methods are called from a worker, for owners of one job together."""

    @staticmethod
    def all_begin(owners: Sequence[Any]) -> list[torch.UntypedStorage | None]:
        """Hand over the storages to write; ``None`` for one whose write is no longer wanted."""

    def is_wanted(self) -> bool:
        """Whether a write that has begun is still of use. Where it is not, it never is again."""

    @staticmethod
    def all_written(ends: Sequence[WriteEnd]) -> None:
        """Tell how writes have ended. Must not raise."""


class WriteRequest(NamedTuple):
    """One storage to write."""

    owner: WriteOwner
    nbytes: int
    after: StreamEvent | None
    """Written once this has passed."""
    label: str


class ReadOwner(Protocol):
    """Receives bytes that come back. A worker calls it, for owners of one job together."""

    @staticmethod
    def all_read(ends: Sequence[ReadEnd]) -> None:
        """Tell how reads have ended. Must not raise."""


class ReadRequest(NamedTuple):
    """One storage to read."""

    owner: ReadOwner
    stored: StoredBytes
    into: torch.UntypedStorage | None = None
    """Memory for it; ``None``: it is allocated in the calling thread and on its stream, or, where no stream is asked
    and the read is not urgent, by a worker."""
    after: StreamEvent | None = None
    """Mark of ``into``, which may be written to once this has passed: PyTorch lends memory of a device while kernels of
    its former owner are still queued."""


class Progress(NamedTuple):
    """Counters of a tier since it was opened. Seconds are those in which at least one move was under way."""

    written_bytes: int
    write_busy_s: float
    read_bytes: int
    read_busy_s: float
