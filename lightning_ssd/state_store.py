"""Where the states of each subgroup are: in memory, on a drive, or on the way.

A subgroup's bytes move as a whole. A write goes to a fresh extent, and the last good copy is given back only when the
new one is complete, so that no failure of a drive costs a state: what cannot be written stays in memory.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from lightning_ssd.errors import OffloaderClosedError, StorageError
from lightning_ssd.slots import SlotMover, Slots
from lightning_ssd.storage.streams import Mark
from lightning_ssd.storage.tiers import SsdTier, StoredBytes

__all__ = ["Copy", "StateStore"]


class _Where(enum.Enum):
    AWAY = enum.auto()
    """On a drive alone, or never stored."""
    READING = enum.auto()
    HERE = enum.auto()
    """In memory; nobody uses it now."""
    IN_USE = enum.auto()
    WRITING = enum.auto()


class Copy:
    """Bytes on a drive that stay as they are while somebody holds them. Counted under the store's lock."""

    __slots__ = ("num_holders", "path", "stored", "tier")

    def __init__(self, tier: SsdTier, path: int, stored: StoredBytes) -> None:
        self.tier, self.path, self.stored = tier, path, stored
        self.num_holders = 1


@dataclass(slots=True)
class _Home:
    """One subgroup."""

    path: int = 0
    where: _Where = _Where.AWAY
    storage: torch.UntypedStorage | None = None
    """Its memory, also while it is being read into."""
    copy: Copy | None = None
    is_dirty: bool = False
    """Whether memory is ahead of the drive."""
    is_wanted: bool = False
    """Whether somebody waits for the end of its write, to have it at once."""
    error: BaseException | None = None
    tried: set[int] = field(default_factory=set)
    """Paths that the write under way was refused by."""


class StateStore:
    """Subgroups by number, in a bounded number of pieces of memory and any number of directories.

    One thread trains: it calls everything but the tiers' callbacks.

    Args:
        tiers: one per directory.
        mover: of all tiers.
        device: where the memory is.
        num_slots: pieces of memory at most; each holds a subgroup. More only after a write has failed.
        mark: a point in the device's work that writes begin behind; ``None`` on CPU.
        block_bytes: memory that is asked for is a multiple of this many bytes.
    """

    def __init__(
        self,
        tiers: Sequence[SsdTier],
        mover: SlotMover,
        *,
        device: torch.device,
        num_slots: int,
        mark: Callable[[], Mark | None] = lambda: None,
        block_bytes: int = 4096,
    ) -> None:
        self.tiers = tuple(tiers)
        self.num_slots = num_slots
        self.block_bytes = block_bytes
        self.stall_s = 0.0
        self.kept_bytes = 0
        self.resident_bytes = self.resident_peak_bytes = 0
        self._device = device
        self._mover = mover
        self._slots = Slots(device)
        self._mark = mark
        self._homes: list[_Home] = []
        self._queue: deque[int] = deque()
        self._num_used = 0
        self._last_error: BaseException | None = None
        self._warning: str | None = None
        self._is_closed = False
        # Guards everything above; told of every end of a move. Tiers' locks are taken under it, never it under theirs.
        self._changed = threading.Condition(threading.RLock())

    # -- what there is -------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._homes)

    def add(self, paths: Iterable[int]) -> None:
        """More subgroups, with the tier that each is to be written to."""
        self._homes += [_Home(path=path) for path in paths]

    @property
    def paths(self) -> list[int]:
        """Of each subgroup, the tier that its next write goes to."""
        return [home.path for home in self._homes]

    def assign(self, paths: Sequence[int]) -> None:
        """Send next writes elsewhere. What is on a drive already stays there until then."""
        for home, path in zip(self._homes, paths, strict=True):
            home.path = path

    def in_memory(self) -> list[int]:
        """Subgroups that need no fetch."""
        with self._changed:
            return [i for i, home in enumerate(self._homes) if home.storage is not None]

    # -- up ------------------------------------------------------------------------------------------------------

    def prefetch(self, indices: Iterable[int]) -> None:
        """Bring these up, in this order, as memory becomes free."""
        with self._changed:
            self._queue = deque(indices)
            self._pump()

    def take(self, index: int) -> torch.UntypedStorage | None:
        """The memory of a subgroup, for the caller alone until :meth:`give`; ``None`` if it was never stored.

        Raises:
            StorageError: it cannot be read; its copy on the drive stays as it is.
        """
        home = self._homes[index]
        begin_s = time.perf_counter()
        with self._changed:
            if home.where is _Where.AWAY and home.copy is not None and index not in self._queue:
                self._queue.appendleft(index)
                self._pump()
            home.is_wanted = True
            while home.where in (_Where.READING, _Where.WRITING) or index in self._queue:
                self._wait()
            home.is_wanted = False
            self.stall_s += time.perf_counter() - begin_s
            error, home.error = home.error, None
            if error is not None:
                raise error
            home.where = _Where.IN_USE
            return home.storage

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """Memory for a subgroup that has none that fits, once there is a slot for it. :meth:`give` takes it back."""
        with self._changed:
            begin_s = time.perf_counter()
            while self._num_used >= self.num_slots:
                self._wait()
            self.stall_s += time.perf_counter() - begin_s
            return self._new(nbytes)

    def _new(self, nbytes: int) -> torch.UntypedStorage:
        storage = self._slots.take(nbytes)
        self._num_used += 1
        self.resident_bytes += nbytes
        self.resident_peak_bytes = max(self.resident_peak_bytes, self.resident_bytes)
        return storage

    def _free(self, storage: torch.UntypedStorage | None) -> None:
        if storage is not None:
            self._slots.give_back(storage)
            self._num_used -= 1
            self.resident_bytes -= storage.nbytes()

    # -- down ----------------------------------------------------------------------------------------------------

    def give(self, index: int, storage: torch.UntypedStorage | None, *, is_dirty: bool, keep: bool) -> None:
        """End of use.

        Args:
            index: of the subgroup.
            storage: what holds it now: that of :meth:`take`, or a new one of :meth:`allocate`; ``None``: nothing.
            is_dirty: whether it has changed.
            keep: leave it in memory; else it is written if dirty, and its memory becomes free.
        """
        with self._changed:
            home = self._homes[index]
            if home.storage is not storage:
                self._free(home.storage)
            home.storage = storage
            home.is_dirty = (home.is_dirty or is_dirty) and storage is not None
            home.where = _Where.AWAY if storage is None else _Where.HERE
            if storage is not None and keep:
                self.kept_bytes += storage.nbytes()
            elif storage is not None:
                self._let_go(index)
            self._changed.notify_all()
            self._pump()

    def evict(self, indices: Iterable[int]) -> None:
        """Let go of what is in memory and not in use."""
        with self._changed:
            for index in indices:
                if self._homes[index].where is _Where.HERE:
                    self._let_go(index)
            self._pump()

    def flush(self) -> None:
        """Write what is ahead of its drive, and wait for all writes. What stays in memory stays there.

        Raises:
            StorageError: something cannot be written; it stays in memory.
        """
        with self._changed:
            for index, home in enumerate(self._homes):
                home.is_wanted = home.is_wanted or home.storage is not None
                if home.where is _Where.HERE and home.is_dirty:
                    self._let_go(index)
            while any(home.where is _Where.WRITING for home in self._homes):
                self._wait()
            for home in self._homes:
                home.is_wanted = False
            if any(home.is_dirty for home in self._homes):
                raise StorageError(f"optimizer states could not be written, and stay in memory: {self._last_error}")

    def wait_for_writes(self) -> None:
        """Until no write is under way. What was to leave memory has left it then."""
        with self._changed:
            while any(home.where is _Where.WRITING for home in self._homes):
                self._wait()

    def _let_go(self, index: int) -> None:
        home = self._homes[index]
        if not home.is_dirty:
            self._drop(home)
            return
        home.where = _Where.WRITING
        home.tried = {home.path}
        self._submit(index)

    def _submit(self, index: int) -> None:
        home = self._homes[index]
        storage = home.storage
        if storage is None:
            raise RuntimeError("a subgroup without memory was to be written")
        tier = self.tiers[home.path]
        owner = _Writer(storage, partial(self._written, index, home.path))
        tier.write(owner, storage.nbytes(), self._mark(), label=f"optimizer states of subgroup {index}")

    def _written(self, index: int, path: int, stored: StoredBytes | None, error: BaseException | None) -> None:
        with self._changed:
            home = self._homes[index]
            if stored is not None:
                self._release(home.copy)
                home.copy = Copy(self.tiers[path], path, stored)
                home.is_dirty = False
                home.where = _Where.HERE
                if not home.is_wanted:
                    self._drop(home)
            elif not self._is_closed and (other := self._other_path(home)) is not None:
                home.path = other
                home.tried.add(other)
                self._submit(index)
                return
            else:
                home.where = _Where.HERE
                self._stay_in_memory(error)
            self._changed.notify_all()
            self._pump()

    def _other_path(self, home: _Home) -> int | None:
        return next((path for path in range(len(self.tiers)) if path not in home.tried), None)

    def _stay_in_memory(self, error: BaseException | None) -> None:
        self.num_slots += 1  # or training would wait for a slot for ever
        if self._last_error is None and not self._is_closed:
            self._warning = (
                f"optimizer states could not be written and stay in memory, exact as before: {error}. Free space on "
                "the drive, or name another directory in HardwareProfile.paths"
            )
        self._last_error = error

    def take_warning(self) -> str | None:
        """What the user should know, once."""
        with self._changed:
            warning, self._warning = self._warning, None
            return warning

    def _drop(self, home: _Home) -> None:
        self._free(home.storage)
        home.storage = None
        home.where = _Where.AWAY

    # -- moves ---------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Begin reads while there is memory for them."""
        while self._queue and self._num_used < self.num_slots and not self._is_closed:
            index = self._queue.popleft()
            home = self._homes[index]
            if home.where is _Where.WRITING:
                home.is_wanted = True
            if home.where is _Where.AWAY and home.copy is not None:
                self._begin_read(index, home, home.copy)
            self._changed.notify_all()

    def _begin_read(self, index: int, home: _Home, copy: Copy) -> None:
        storage = self._new(copy.stored.body_nbytes)
        try:
            self._mover.offer(storage)
            copy.tier.read(_Reader(partial(self._came_up, index)), copy.stored, self._device, urgent=False)
        except BaseException:
            self._free(storage)
            raise
        home.storage, home.where = storage, _Where.READING

    def _came_up(self, index: int, storage: torch.UntypedStorage | None, error: BaseException | None) -> None:
        with self._changed:
            home = self._homes[index]
            if storage is None:
                home.error = error or StorageError("a read ended with neither bytes nor an error")
                self._drop(home)
            else:
                home.where = _Where.HERE
            self._changed.notify_all()

    def forget(self, index: int) -> None:
        """There is no such state any more, neither in memory nor on a drive."""
        with self._changed:
            home = self._homes[index]
            while home.where in (_Where.READING, _Where.WRITING):
                self._wait()
            self._drop(home)
            self._release(home.copy)
            home.copy, home.is_dirty = None, False
            self._pump()

    def copy_of_memory(self, index: int) -> torch.UntypedStorage | None:
        """A copy of what is ahead of its drive; ``None`` where the drive has it."""
        with self._changed:
            home = self._homes[index]
            return _copied(home.storage) if home.is_dirty and home.storage is not None else None

    # -- copies --------------------------------------------------------------------------------------------------

    def hold(self, index: int) -> Copy | None:
        """The copy on the drive, which stays as it is until :meth:`release`; ``None`` if there is none."""
        with self._changed:
            copy = self._homes[index].copy
            if copy is not None:
                copy.num_holders += 1
            return copy

    def release(self, copies: Iterable[Copy]) -> None:
        """Let go of held copies."""
        with self._changed:
            for copy in copies:
                self._release(copy)

    def _release(self, copy: Copy | None) -> None:
        if copy is not None:
            copy.num_holders -= 1
            if copy.num_holders == 0:
                copy.tier.free(copy.stored)

    def _wait(self) -> None:
        """Until something has changed."""
        if self._is_closed:
            raise OffloaderClosedError("the optimizer's files are closed; make a new offloader for more steps")
        if not any(home.where in (_Where.READING, _Where.WRITING) for home in self._homes):
            # Nothing will free a slot by itself: let go of what is kept, or of one more than was allowed.
            kept = next((i for i, home in enumerate(self._homes) if home.where is _Where.HERE), None)
            if kept is None:
                self.num_slots += 1
            else:
                self._let_go(kept)
            self._pump()
            return
        self._changed.wait()

    def close(self) -> None:
        """Forget everything. The tiers belong to whoever opened them."""
        with self._changed:
            self._is_closed = True
            self._queue.clear()
            for home in self._homes:
                self._drop(home)
            self._slots.clear()
            self._changed.notify_all()


def _copied(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
    return whole.clone().untyped_storage()


@dataclass(slots=True)
class _Writer:
    """A write's owner."""

    storage: torch.UntypedStorage
    ended: Callable[[StoredBytes | None, BaseException | None], None]

    def write_begins(self) -> torch.UntypedStorage:
        return self.storage

    def write_ended(self, stored: StoredBytes | None, error: BaseException | None) -> None:
        self.ended(stored, error)


@dataclass(frozen=True, slots=True)
class _Reader:
    """A read's owner. Its bytes are there when it ends: every worker waits for its own copies."""

    ended: Callable[[torch.UntypedStorage | None, BaseException | None], None]

    def read_ended(self, storage: torch.UntypedStorage | None, mark: Mark | None, error: BaseException | None) -> None:
        self.ended(storage, error)
