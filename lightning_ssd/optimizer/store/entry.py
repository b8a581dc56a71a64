"""One subgroup of optimizer states: where its bytes are, who holds them, and what no drive took."""

from __future__ import annotations

import enum
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from lightning_ssd.errors import StorageError
from lightning_ssd.memory.file_mapping import FileView
from lightning_ssd.tiers.base import StoredBytes, WriteOwner
from lightning_ssd.tiers.copy_paths import storage_bytes
from lightning_ssd.tiers.host import HostTier
from lightning_ssd.tiers.ssd import SsdTier
from lightning_ssd.tiers.streams import StreamEvent

__all__ = [
    "CopyPin",
    "DeferredReleases",
    "Owner",
    "Residency",
    "StoredCopy",
    "SubgroupEntry",
    "WriteFailures",
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
        """Map part of it, from ``offset`` on, at ``start`` of a view.

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
    used: StreamEvent | None = None
    """Its memory has been changed once this has passed; ``None``: by now, or it is in use."""
    is_dirty: bool = False
    """Whether memory is ahead of the drive."""
    is_wanted: bool = False
    """Whether somebody waits for the end of its write, to have it at once."""
    is_stuck: bool = False
    """Whether its last write failed: it has a piece of memory beyond the others' until it can be written."""
    error: BaseException | None = None
    """Of its last read, until somebody takes it."""
    writer: WriteOwner | None = None
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


class WriteFailures:
    """Subgroups whose states stay in memory because they cannot be written. Its owner locks."""

    def __init__(self) -> None:
        self.num_stuck = 0
        """Subgroups that have a piece of memory beyond the others' now, or training would wait for one for ever."""
        self.last_error: str | None = None
        self._warning: str | None = None

    def note(self, home: SubgroupEntry, error: BaseException | None, *, quietly: bool) -> None:
        """A subgroup stays in memory; ``quietly``: nobody needs to know."""
        self.num_stuck += not home.is_stuck
        home.is_stuck = True
        if self.last_error is None and not quietly:
            self._warning = (
                f"optimizer states could not be written and stay in memory, exact as before: {error}. Free space on "
                "the drive, or name another directory in HardwareProfile.paths"
            )
        self.last_error = str(error) or repr(error)  # not itself: its frames hold what was to be written

    def is_written(self, home: SubgroupEntry) -> None:
        """Memory is not ahead of the drive any more."""
        home.is_dirty = False
        self.num_stuck -= home.is_stuck
        home.is_stuck = False

    def take_warning(self) -> str | None:
        """What the user should know, once."""
        warning, self._warning = self._warning, None
        return warning
