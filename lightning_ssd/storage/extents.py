"""Which ranges of a file are lent and which are free: pure arithmetic, no file."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from lightning_ssd.common.rounding import round_up

__all__ = ["Extent", "ExtentAllocator"]


@dataclass(frozen=True, slots=True)
class Extent:
    """``nbytes`` bytes of an arena at ``offset``; both are multiples of the arena's block size."""

    offset: int
    nbytes: int


class ExtentAllocator:
    """Which blocks of a file are free. Pure arithmetic, not thread-safe.

    First fit by offset. Free ranges are kept in sorted bins by power of two of their size: any range of a higher bin
    fits, so that only the request's own bin is searched, and there only below the best of the higher bins.
    """

    def __init__(self, block_bytes: int) -> None:
        if block_bytes <= 0:
            raise ValueError(f"block_bytes={block_bytes}; give a positive number of bytes")
        self._block_bytes = block_bytes
        self._capacity_bytes = 0
        self._used: dict[int, int] = {}
        self._used_bytes = 0
        self._free: dict[int, int] = {}
        self._free_by_end: dict[int, int] = {}
        self._bins: list[list[int]] = [[] for _ in range(64)]

    @property
    def capacity_bytes(self) -> int:
        """Bytes that exist, free or not."""
        return self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes in extents that are lent."""
        return self._used_bytes

    @property
    def tail_free_bytes(self) -> int:
        """Length of the free range at the very end."""
        start = self._free_by_end.get(self._capacity_bytes)
        return 0 if start is None else self._free[start]

    def round_up(self, nbytes: int) -> int:
        """``nbytes`` in whole blocks."""
        if nbytes <= 0:
            raise ValueError(f"an extent of {nbytes} bytes was asked for; ask for at least 1 byte")
        return round_up(nbytes, self._block_bytes)

    def allocate(self, nbytes: int) -> Extent | None:
        """The lowest free extent of at least ``nbytes`` bytes, or ``None`` where no free range is long enough."""
        need = self.round_up(nbytes)
        start = self._first_fit(need)
        if start is None:
            return None
        left = self._free[start] - need
        self._remove_free(start)
        if left:
            self._add_free(start + need, left)
        self._used[start] = need
        self._used_bytes += need
        return Extent(start, need)

    def free(self, extent: Extent) -> None:
        """Take an extent back and merge it with its free neighbours.

        Raises:
            ValueError: if the extent is not lent: freed twice, or from another arena.
        """
        if self._used.get(extent.offset) != extent.nbytes:
            raise ValueError(f"{extent} is not lent by this allocator: it was freed twice, or belongs to another arena")
        del self._used[extent.offset]
        self._used_bytes -= extent.nbytes
        self._merge(extent.offset, extent.nbytes)

    def grow(self, nbytes: int) -> None:
        """Add ``nbytes`` (whole blocks) at the end."""
        if nbytes <= 0 or nbytes % self._block_bytes:
            raise ValueError(f"growth by {nbytes} bytes; give a positive multiple of {self._block_bytes}")
        start = self._capacity_bytes
        self._capacity_bytes += nbytes
        self._merge(start, nbytes)

    def recover(self) -> None:
        """Find what is free anew from what is lent: an interrupt has divided a change."""
        self._used_bytes = sum(self._used.values())
        self._free, self._free_by_end, self._bins = {}, {}, [[] for _ in self._bins]
        start = 0
        for offset, nbytes in sorted({**self._used, self._capacity_bytes: 0}.items()):
            if offset > start:
                self._add_free(start, offset - start)
            start = offset + nbytes

    def _bin_of(self, nbytes: int) -> int:
        return (nbytes // self._block_bytes).bit_length()

    def _first_fit(self, need: int) -> int | None:
        own = self._bin_of(need)
        best = min((starts[0] for starts in self._bins[own + 1 :] if starts), default=None)
        for start in self._bins[own]:
            if best is not None and start > best:
                break
            if self._free[start] >= need:
                return start
        return best

    def _merge(self, start: int, nbytes: int) -> None:
        before = self._free_by_end.get(start)
        if before is not None:
            nbytes += self._free[before]
            self._remove_free(before)
            start = before
        end = start + nbytes
        if end in self._free:
            nbytes += self._free[end]
            self._remove_free(end)
        self._add_free(start, nbytes)

    def _add_free(self, start: int, nbytes: int) -> None:
        self._free[start] = nbytes
        self._free_by_end[start + nbytes] = start
        insort(self._bins[self._bin_of(nbytes)], start)

    def _remove_free(self, start: int) -> None:
        nbytes = self._free.pop(start)
        del self._free_by_end[start + nbytes]
        starts = self._bins[self._bin_of(nbytes)]
        del starts[bisect_left(starts, start)]
