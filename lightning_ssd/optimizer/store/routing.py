"""Where a subgroup of optimizer states is written to, and what happens where nothing takes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from lightning_ssd.errors import OffloaderClosedError
from lightning_ssd.optimizer.store.entry import SubgroupEntry, Writer
from lightning_ssd.tiers.base import StoredBytes
from lightning_ssd.tiers.host import HostTier
from lightning_ssd.tiers.ssd import SsdTier
from lightning_ssd.tiers.streams import CopyEngine

__all__ = ["Ended", "WriteFailures", "WriteRouter"]

Ended = Callable[[int, SsdTier | HostTier, StoredBytes | None, BaseException | None], None]
"""Given the subgroup, where it was written to, and what is there or why nothing is."""


class WriteRouter:
    """Host memory while there is room, else the subgroup's own directory, else one that has not refused it yet.

    Not thread-safe: its owner locks.

    Args:
        tiers: one per directory.
        host: a cache in host memory, or none.
        copies: of the device: a write begins behind the work that it has by then.
        lock: of the owner, for workers.
    """

    def __init__(
        self,
        tiers: Sequence[SsdTier],
        host: HostTier | None,
        copies: CopyEngine,
        lock: AbstractContextManager[Any],
    ) -> None:
        self._tiers, self._host, self._copies, self._lock = tiers, host, copies, lock

    def write(self, index: int, home: SubgroupEntry, ended: Ended, *, to_drive: bool) -> None:
        """Begin to write what is in a subgroup's memory.

        Args:
            index: of the subgroup.
            home: the subgroup.
            ended: called at the end, by a worker.
            to_drive: past host memory.
        """
        if to_drive or not self._write_to_host(index, home, ended):
            home.tried = {home.path}
            self._write_to_drive(index, home, ended)

    def write_elsewhere(self, index: int, home: SubgroupEntry, ended: Ended) -> bool:
        """Once more, after a write that has failed: to a directory that has not refused it yet, if there is one."""
        nearest_first = sorted(range(len(self._tiers)), key=lambda path: path != home.path)
        other = next((path for path in nearest_first if path not in home.tried), None)
        if other is None:
            return False
        home.path = other
        home.tried.add(other)
        try:
            self._write_to_drive(index, home, ended)
        except OffloaderClosedError:  # it has closed before the one that refused
            return False
        return True

    def _write_to_host(self, index: int, home: SubgroupEntry, ended: Ended) -> bool:
        """If there is room."""
        if self._host is None or home.storage is None:
            return False
        if home.copy is not None and home.copy.is_cached:
            home.replace_copy(None)  # memory is ahead of it and stays until the write has ended: its room serves
        home.tried = set()
        return self._submit(self._host, index, home, home.storage, ended)

    def _write_to_drive(self, index: int, home: SubgroupEntry, ended: Ended) -> None:
        if home.storage is None:
            raise RuntimeError("a subgroup without memory was to be written")
        self._submit(self._tiers[home.path], index, home, home.storage, ended)

    def _submit(
        self, tier: SsdTier | HostTier, index: int, home: SubgroupEntry, storage: torch.UntypedStorage, ended: Ended
    ) -> bool:
        # A write that was interrupted while it was queued may be in the queue all the same: then it is not this one.
        owner = home.writer = Writer(storage, partial(ended, index, tier), partial(self._is_wanted, home))
        return tier.write(owner, storage.nbytes(), self._copies.mark(), label=f"optimizer states of subgroup {index}")

    def _is_wanted(self, home: SubgroupEntry, writer: Writer) -> bool:
        with self._lock:
            return home.writer is writer


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
