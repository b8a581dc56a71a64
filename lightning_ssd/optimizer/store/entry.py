"""One subgroup of optimizer states: where its bytes are, and who is told when they have moved."""

from __future__ import annotations

import enum
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from lightning_ssd.errors import StorageError
from lightning_ssd.memory.file_mapping import FileView
from lightning_ssd.tiers.base import StoredBytes
from lightning_ssd.tiers.copy_paths import storage_bytes
from lightning_ssd.tiers.host import HostTier
from lightning_ssd.tiers.ssd import SsdTier
from lightning_ssd.tiers.streams import StreamEvent

__all__ = [
    "CopyPin",
    "DeferredReleases",
    "Owner",
    "Reader",
    "Residency",
    "StoredCopy",
    "SubgroupEntry",
    "Writer",
    "copied",
]


class Residency(enum.Enum):
    """Of a subgroup's bytes."""

    AWAY = enum.auto()
    """On a drive alone, or never stored."""
    READING = enum.auto()
    HERE = enum.auto()
    """In memory; nobody uses it now."""
    IN_USE = enum.auto()
    WRITING = enum.auto()


class StoredCopy:
    """Bytes on a tier that stay as they are while somebody holds them. Counted under the store's lock."""

    __slots__ = ("num_holders", "stored", "tier")

    def __init__(self, tier: SsdTier | HostTier, stored: StoredBytes) -> None:
        self.tier, self.stored = tier, stored
        self.num_holders = 1

    @property
    def is_cached(self) -> bool:
        """Whether it is in host memory, not on a drive."""
        return isinstance(self.tier, HostTier)

    def show(self, view: FileView, start: int, offset: int, nbytes: int) -> None:
        """Part of it, from ``offset`` on, at ``start`` of a view: mapped, or (where the file is encrypted) read.

        Raises:
            StorageError: it is in host memory.
        """
        if isinstance(self.tier, HostTier):
            raise StorageError("optimizer states are in host memory, in no file; flush() them first")
        self.tier.show(self.stored, view, start, offset, nbytes)

    def release(self) -> None:
        """One holder less; the last one gives the extent back."""
        # The garbage collector may run this within itself: what counts is how many there were at this very moment.
        self.num_holders = left = self.num_holders - 1
        if left == 0:
            self.tier.free(self.stored)


class CopyPin:
    """While it lives, extents stay as they are. Memory that shows them keeps it alive. Whoever makes it has it watched
    by :class:`DeferredReleases`.
    """


class Owner(Protocol):
    """Who knows what the memory of a subgroup means."""

    contents: Any


@dataclass(slots=True)
class SubgroupEntry:
    """One subgroup."""

    path: int = 0
    where: Residency = Residency.AWAY
    storage: torch.UntypedStorage | None = None
    """Its memory, also while it is being read into."""
    copy: StoredCopy | None = None
    mark: StreamEvent | None = None
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

    def replace_copy(self, copy: StoredCopy | None) -> None:
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

    ended: Callable[[torch.UntypedStorage | None, StreamEvent | None, BaseException | None], None]

    def read_ended(
        self, storage: torch.UntypedStorage | None, mark: StreamEvent | None, error: BaseException | None
    ) -> None:
        self.ended(storage, mark, error)


def copied(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """The same bytes in memory of their own."""
    return storage_bytes(storage, 0, storage.nbytes()).clone().untyped_storage()


class DeferredReleases:
    """Whoever holds a copy may die anywhere, also in the garbage collector, under any lock. So no code of ours runs
    then: the weak reference itself, in C, notes that the holder is gone.

    Copies are counted in :meth:`give_back` alone, under their owner's lock.
    """

    def __init__(self) -> None:
        self._watched: dict[weakref.ref[CopyPin], list[StoredCopy]] = {}
        self._dead: deque[weakref.ref[CopyPin]] = deque()

    def watch(self, hold: CopyPin, copies: list[StoredCopy]) -> None:
        """Give the copies back when their holder has died; more may come."""
        self._watched[weakref.ref(hold, self._dead.append)] = copies

    def give_back(self) -> None:
        """What dead holders held."""
        while self._dead:
            copies = self._watched.get(self._dead[0], [])
            while copies:
                copies.pop().release()
            self._watched.pop(self._dead[0], None)
            self._dead.popleft()  # last: an interrupted call is made good by the next one
