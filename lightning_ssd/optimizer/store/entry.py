"""Describe where the bytes of a subgroup are, count the holders of stored copies, and note failed writes."""

from __future__ import annotations

import enum
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_ssd.errors import StorageError
from lightning_ssd.memory.file_mapping import FileView
from lightning_ssd.tiers.base import StoredBytes, WriteOwner
from lightning_ssd.tiers.host import HostTier
from lightning_ssd.tiers.ssd import SsdTier
from lightning_ssd.tiers.streams import StreamEvent

__all__ = [
    "CopyPin",
    "DeferredReleases",
    "Residency",
    "StoredCopy",
    "SubgroupEntry",
]


class Residency(enum.Enum):
    """The place of a subgroup's bytes."""

    AWAY = enum.auto()
    """Only on a drive, or never stored."""
    READING = enum.auto()
    HERE = enum.auto()
    """In memory, and not in use."""
    IN_USE = enum.auto()
    WRITING = enum.auto()


class StoredCopy:
    """Bytes on a tier, which are not freed before their last holder releases them. Counted under the store's lock."""

    __slots__ = ("num_holders", "stored", "tier")

    def __init__(self, tier: SsdTier | HostTier, stored: StoredBytes) -> None:
        self.tier, self.stored = tier, stored
        self.num_holders = 1

    @property
    def is_cached(self) -> bool:
        """Whether the bytes are in host memory, not on a drive."""
        return isinstance(self.tier, HostTier)

    def show(self, view: FileView, start: int, offset: int, nbytes: int) -> None:
        """Map ``nbytes`` of the bytes, from ``offset`` on, into a view at ``start``.

        Raises:
            StorageError: the bytes are in host memory.
        """
        if isinstance(self.tier, HostTier):
            raise StorageError("optimizer states are in host memory, in no file; flush() them first")
        self.tier.show(self.stored, view, start, offset, nbytes)

    def release(self) -> None:
        """Drop one holder; the last one frees the extent."""
        # The garbage collector may run this within itself, so that the count is read once.
        self.num_holders = left = self.num_holders - 1
        if left == 0:
            self.tier.free(self.stored)


class CopyPin:
    """Keeps extents from being freed while it lives. Memory that maps these extents holds a reference to it.

    Its maker registers it with :class:`DeferredReleases`.
    """


@dataclass(slots=True)
class SubgroupEntry:
    """The memory, the stored copy and the moves of one subgroup."""

    where: Residency = Residency.AWAY
    storage: torch.UntypedStorage | None = None
    """Its memory, also while a read fills it."""
    copy: StoredCopy | None = None
    """Its bytes on a tier."""
    mark: StreamEvent | None = None
    """Event after which its memory may be read; ``None``: now."""
    used: StreamEvent | None = None
    """Event after which changes of its memory are complete; ``None``: they are, or the memory is in use."""
    is_dirty: bool = False
    """Whether the memory is newer than the copy."""
    is_wanted: bool = False
    """Whether the training thread waits for it, so that it stays in memory when its write ends."""
    is_stuck: bool = False
    """Whether its last write failed. It then has a slot in addition to the limit, until it can be written."""
    error: BaseException | None = None
    """Error of its last read, until it is raised."""
    writer: WriteOwner | None = None
    """Owner of the write under way."""
    targets: list[Any] = field(default_factory=list)
    """Tiers that the write under way has not tried yet, in order."""

    def replace_copy(self, copy: StoredCopy | None) -> None:
        """Set the stored copy, and release the former one."""
        former, self.copy = self.copy, copy
        if former is not None:
            former.release()


class DeferredReleases:
    """Releases stored copies after their holder has died.

    A holder may die anywhere, also in the garbage collector, under any lock. So no Python code runs then: a weak
    reference adds itself to a queue, in C. Only :meth:`give_back` releases copies, under their owner's lock.
    """

    def __init__(self) -> None:
        self._watched: dict[weakref.ref[CopyPin], list[StoredCopy]] = {}
        self._dead: deque[weakref.ref[CopyPin]] = deque()

    def watch(self, hold: CopyPin, copies: list[StoredCopy]) -> None:
        """Release the copies in a list after ``hold`` has died. The caller may add to the list."""
        self._watched[weakref.ref(hold, self._dead.append)] = copies

    def give_back(self) -> None:
        """Release the copies of dead holders."""
        while self._dead:
            copies = self._watched.get(self._dead[0], [])
            while copies:
                copies.pop().release()
            self._watched.pop(self._dead[0], None)
            self._dead.popleft()  # last, so that the next call completes an interrupted one
