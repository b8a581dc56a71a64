"""Storages on their way out, until there are enough of them for one job.

A job costs its worker and the training thread as much Python as a small write takes, whatever its size. So up to 16
storages leave together (Megatron-Core's fine-grained offloading moves groups of tensors for the same reason). A group
never holds back more than a sixty-fourth of all that is saved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from lightning_ssd.activations.saved_storage import SavedStorage
from lightning_ssd.planning.placement import Placement

__all__ = ["WriteGroup"]

_MAX_STORAGES = 16
_MAX_BYTES = 64 << 20
_SHARE = 64
"""One part in so many of all that is saved."""


class WriteGroup:
    """Storages that leave together. Hooks add to it without a lock."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[SavedStorage, Placement]] = deque()
        self._nbytes = 0

    def add(self, record: SavedStorage, placement: Placement, most_saved_bytes: int) -> bool:
        """Have a storage leave with the group.

        Args:
            record: stays as it is until then.
            placement: where it goes.
            most_saved_bytes: of all that was saved at the worst moment of the run so far.

        Returns:
            Whether there is enough for a job.
        """
        self._waiting.append((record, placement))
        self._nbytes += record.nbytes
        is_large = self._nbytes >= min(_MAX_BYTES, most_saved_bytes // _SHARE)
        return is_large or len(self._waiting) >= _MAX_STORAGES

    def taken(self) -> Iterator[tuple[SavedStorage, Placement]]:
        """Take all of them out, in order, but for what was freed or sent meanwhile, or is in use: that stays."""
        self._nbytes = 0
        while self._waiting:
            record, placement = self._waiting.popleft()
            if record.can_be_evicted:
                yield record, placement

    def drop(self) -> None:
        """Have them stay in memory."""
        self._waiting.clear()
        self._nbytes = 0
