"""Storages on their way out, until there are enough of them for one job.

A job costs its worker and the training thread as much Python as a small write takes, whatever its size. So up to 64
storages leave together (Megatron-Core's fine-grained offloading moves groups of tensors for the same reason). What is
ready is never held back beyond 1 MiB or a sixty-fourth of all that is saved, whichever is more.
"""

from __future__ import annotations

from collections import deque

from lightning_ssd.activations.saved_storage import SavedStorage
from lightning_ssd.planning.placement import Placement

__all__ = ["WriteGroup"]

_MAX_STORAGES = 64
_MIN_BYTES = 1 << 20
_MAX_BYTES = 64 << 20
_MAX_HELD = 64
_NUM_LOOKED_AT = 4
_SHARE = 64
"""One part in so many of all that is saved."""


class WriteGroup:
    """Storages that leave together. Hooks add to it without a lock.

    One of which a part alone has been saved yet, or that an operation may fill after it has saved it, is held back:
    until the operation is over, and all of it has been saved or the program holds it no more; or until the forward is
    over.
    """

    def __init__(self) -> None:
        self._ready: deque[tuple[SavedStorage, Placement]] = deque()
        self._held: deque[tuple[SavedStorage, Placement]] = deque()
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
        if record.operation is None and record.is_whole:
            self._ready.append((record, placement))
            self._nbytes += record.nbytes
        else:
            self._held.append((record, placement))
        if self._held:
            self._look(_NUM_LOOKED_AT, is_over=len(self._held) > _MAX_HELD)
        is_large = self._nbytes >= min(_MAX_BYTES, max(_MIN_BYTES, most_saved_bytes // _SHARE))
        return bool(self._ready) and (is_large or len(self._ready) >= _MAX_STORAGES)

    def _look(self, number: int, *, is_over: bool) -> None:
        """Find those of the first ones that need be held back no longer.

        Args:
            number: of those to look at.
            is_over: what is filled need not be saved as a whole.
        """
        for _ in range(min(number, len(self._held))):
            try:
                record, placement = self._held.popleft()
            except IndexError:  # a flush by a signal handler, or by another thread, has taken the last one
                return
            if record.is_filled() and (is_over or record.is_saved_whole):
                self._ready.append((record, placement))
                self._nbytes += record.nbytes
            else:
                self._held.append((record, placement))

    def taken(self, *, is_over: bool = False) -> list[tuple[SavedStorage, Placement]]:
        """Take out what is ready, in order, but for what was freed or sent meanwhile, or is in use: that stays.

        Args:
            is_over: no more is saved, or memory is short.
        """
        self._look(len(self._held) if is_over else _NUM_LOOKED_AT, is_over=is_over)
        self._nbytes = 0
        taken = [self._ready.popleft() for _ in range(len(self._ready))]
        return [(record, placement) for record, placement in taken if record.can_be_evicted]

    def drop(self) -> None:
        """Have them stay in memory."""
        self._ready.clear()
        self._held.clear()
        self._nbytes = 0
