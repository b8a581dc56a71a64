"""One subgroup of optimizer states: where its bytes are, and who is told when they have moved."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from lightning_ssd.errors import StorageError
from lightning_ssd.storage.arena import Arena, Extent
from lightning_ssd.storage.file_view import FileView
from lightning_ssd.storage.host_tier import HostTier
from lightning_ssd.storage.movers import storage_bytes
from lightning_ssd.storage.streams import Mark
from lightning_ssd.storage.tiers import SsdTier, StoredBytes
from lightning_ssd.tensors import Region

__all__ = ["Copy", "Hold", "Home", "Owner", "Reader", "Where", "Writer", "copied"]


class Where(enum.Enum):
    """Of a subgroup's bytes."""

    AWAY = enum.auto()
    """On a drive alone, or never stored."""
    READING = enum.auto()
    HERE = enum.auto()
    """In memory; nobody uses it now."""
    IN_USE = enum.auto()
    WRITING = enum.auto()


class Copy:
    """Bytes on a tier that stay as they are while somebody holds them. Counted under the store's lock."""

    __slots__ = ("num_holders", "stored", "tier")

    def __init__(self, tier: SsdTier | HostTier, stored: StoredBytes) -> None:
        self.tier, self.stored = tier, stored
        self.num_holders = 1

    @property
    def is_cached(self) -> bool:
        """Whether it is in host memory, not on a drive."""
        return isinstance(self.tier, HostTier)

    def locate(self) -> tuple[Arena, Extent]:
        """The file and where in it.

        Raises:
            StorageError: it is in host memory.
        """
        if isinstance(self.tier, HostTier):
            raise StorageError("optimizer states are in host memory, in no file; flush() them first")
        return self.tier.locate(self.stored)

    def show(self, view: FileView, start: int, offset: int, nbytes: int) -> None:
        """Part of it, from ``offset`` on, at ``start`` of a view: mapped, or (where the file is encrypted) read."""
        arena, extent = self.locate()
        if arena.reader is not None:
            arena.reader(Region(view.address + start, nbytes), extent.offset + offset)
            return
        with arena.use() as fd:
            arena.is_mapped = True
            view.show(start, fd, extent.offset + offset, nbytes)

    def release(self) -> None:
        """One holder less; the last one gives the extent back."""
        # The garbage collector may run this within itself: what counts is how many there were at this very moment.
        self.num_holders = left = self.num_holders - 1
        if left == 0:
            self.tier.free(self.stored)


class Hold:
    """While it lives, extents stay as they are. Memory that shows them keeps it alive. Whoever makes it has it watched
    by :class:`~lightning_ssd.returned_copies.ReturnedCopies`.
    """


class Owner(Protocol):
    """Who knows what the memory of a subgroup means."""

    contents: Any


@dataclass(slots=True)
class Home:
    """One subgroup."""

    path: int = 0
    where: Where = Where.AWAY
    storage: torch.UntypedStorage | None = None
    """Its memory, also while it is being read into."""
    copy: Copy | None = None
    mark: Mark | None = None
    """Its memory may be read once this has passed; ``None``: now."""
    is_dirty: bool = False
    """Whether memory is ahead of the drive."""
    is_wanted: bool = False
    """Whether somebody waits for the end of its write, to have it at once."""
    is_stuck: bool = False
    """Whether its last write failed: it has a piece of memory beyond the others' until it can be written."""
    error: BaseException | None = None
    """Of its last read, until somebody takes it."""
    writer: Writer | None = None
    """Of the write under way."""
    tried: set[int] = field(default_factory=set)
    """Paths that the write under way was refused by."""

    def take_error(self) -> BaseException | None:
        """What its last read failed with, once."""
        error, self.error = self.error, None
        return error

    def replace_copy(self, copy: Copy | None) -> None:
        """Another one, or none, is good now."""
        former, self.copy = self.copy, copy
        if former is not None:
            former.release()


@dataclass(slots=True)
class Writer:
    """A write's owner."""

    storage: torch.UntypedStorage
    ended: Callable[[StoredBytes | None, BaseException | None], None]
    is_wanted: Callable[[Writer], bool] = lambda writer: True

    def write_begins(self) -> torch.UntypedStorage | None:
        return self.storage if self.is_wanted(self) else None

    def write_ended(self, stored: StoredBytes | None, error: BaseException | None) -> None:
        self.ended(stored, error)


@dataclass(frozen=True, slots=True)
class Reader:
    """A read's owner."""

    ended: Callable[[torch.UntypedStorage | None, Mark | None, BaseException | None], None]

    def read_ended(self, storage: torch.UntypedStorage | None, mark: Mark | None, error: BaseException | None) -> None:
        self.ended(storage, mark, error)


def copied(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """The same bytes in memory of their own."""
    return storage_bytes(storage, 0, storage.nbytes()).clone().untyped_storage()
