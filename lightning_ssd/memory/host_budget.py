"""Host memory that several users share: a count of bytes, not the memory itself."""

from __future__ import annotations

import threading

from lightning_ssd.common.rounding import round_up
from lightning_ssd.memory.mmap import PAGE_BYTES

__all__ = ["BudgetShare", "HostMemoryBudget"]


class HostMemoryBudget:
    """So many bytes for all together, first come, first served. Thread-safe.

    Args:
        total_bytes: rounded down to whole pages, as is all that is taken: what is left is whole pages, too.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes // PAGE_BYTES * PAGE_BYTES
        self._left_bytes = self.total_bytes
        # Guards what is left and every share's size. A leaf lock.
        self._lock = threading.Lock()

    @property
    def left_bytes(self) -> int:
        """Bytes that are not taken."""
        return self._left_bytes

    def share(self) -> BudgetShare:
        """For one more user, with nothing in it yet."""
        return BudgetShare(self)

    def change(self, share: BudgetShare, least_bytes: int, most_bytes: int, unit_bytes: int) -> int:
        """See :class:`BudgetShare`."""
        with self._lock:
            room = share.nbytes + self._left_bytes
            nbytes = min(most_bytes, room // unit_bytes * unit_bytes)
            if nbytes < least_bytes:
                return share.nbytes
            self._left_bytes = room - nbytes
            share.nbytes = nbytes
            return nbytes


class BudgetShare:
    """The part that one user has taken from a :class:`HostMemoryBudget`."""

    def __init__(self, host_budget: HostMemoryBudget) -> None:
        self.host_budget = host_budget
        self.nbytes = 0

    def grow(self, least_bytes: int, most_bytes: int) -> int:
        """Take ``most_bytes`` more, or what is left if that is at least ``least_bytes``. Both are whole pages.

        Returns:
            How many were taken; 0 where there are too few.
        """
        before = self.nbytes
        return self.host_budget.change(self, before + least_bytes, before + most_bytes, PAGE_BYTES) - before

    def fit(self, num: int, unit_bytes: int) -> int:
        """Have ``num`` units, or as many as there is room for, instead of what there was.

        Returns:
            How many there are now.
        """
        unit = round_up(unit_bytes, PAGE_BYTES)
        return self.host_budget.change(self, 0, num * unit, unit) // unit

    def give_back(self, nbytes: int) -> None:
        """Some of it, whole pages."""
        self.host_budget.change(self, 0, self.nbytes - nbytes, PAGE_BYTES)

    def close(self) -> None:
        """Give all of it back. Idempotent."""
        self.host_budget.change(self, 0, 0, PAGE_BYTES)
