"""Where a subgroup of optimizer states is written to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from lightning_ssd.errors import OffloaderClosedError
from lightning_ssd.state_home import Home, Writer
from lightning_ssd.storage.host_tier import HostTier
from lightning_ssd.storage.streams import Mark
from lightning_ssd.storage.tiers import SsdTier, StoredBytes

__all__ = ["Destinations", "Ended"]

Ended = Callable[[int, SsdTier | HostTier, StoredBytes | None, BaseException | None], None]
"""Given the subgroup, where it was written to, and what is there or why nothing is."""


class Destinations:
    """Host memory while there is room, else the subgroup's own directory, else one that has not refused it yet.

    Not thread-safe: its owner locks.

    Args:
        tiers: one per directory.
        host: a cache in host memory, or none.
        mark: a point in the device's work that writes begin behind; ``None`` on CPU.
        lock: of the owner, for workers.
    """

    def __init__(
        self,
        tiers: Sequence[SsdTier],
        host: HostTier | None,
        mark: Callable[[], Mark | None] = lambda: None,
        lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        self._tiers, self._host, self._mark = tiers, host, mark
        self._lock = lock or nullcontext()

    def write(self, index: int, home: Home, ended: Ended, *, to_drive: bool) -> None:
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

    def write_elsewhere(self, index: int, home: Home, ended: Ended) -> bool:
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

    def _write_to_host(self, index: int, home: Home, ended: Ended) -> bool:
        """If there is room."""
        if self._host is None or home.storage is None:
            return False
        if home.copy is not None and home.copy.is_cached:
            home.replace_copy(None)  # memory is ahead of it and stays until the write has ended: its room serves
        home.tried = set()
        return self._submit(self._host, index, home, home.storage, ended)

    def _write_to_drive(self, index: int, home: Home, ended: Ended) -> None:
        if home.storage is None:
            raise RuntimeError("a subgroup without memory was to be written")
        self._submit(self._tiers[home.path], index, home, home.storage, ended)

    def _submit(
        self, tier: SsdTier | HostTier, index: int, home: Home, storage: torch.UntypedStorage, ended: Ended
    ) -> bool:
        # A write that was interrupted while it was queued may be in the queue all the same: then it is not this one.
        owner = home.writer = Writer(storage, partial(ended, index, tier), partial(self._is_wanted, home))
        return tier.write(owner, storage.nbytes(), self._mark(), label=f"optimizer states of subgroup {index}")

    def _is_wanted(self, home: Home, writer: Writer) -> bool:
        with self._lock:
            return home.writer is writer
