"""Which ranges of a file are lent and which are free: pure arithmetic, no file."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from lightning_ssd.common.tensors import new_tuple

__all__ = ["Extent", "ExtentAllocator"]


class Extent(NamedTuple):
    """``nbytes`` bytes of an arena at ``offset``; both are multiples of the arena's block size."""

    offset: int
    nbytes: int


class ExtentAllocator:
    """Which blocks of a file or of memory are free. Pure arithmetic; its owner locks all but :meth:`free`.

    First fit by offset, in a sorted list: storages come and go in order, so that there are few free ranges.

    Note [freeing never waits]: the owner's lock is held while its file grows. So ``free`` leaves the extent, in one
    step that neither another thread nor an interrupt divides, to the next holder of the lock.
    """

    def __init__(self, block_bytes: int) -> None:
        if block_bytes <= 0:
            raise ValueError(f"block_bytes={block_bytes}; give a positive number of bytes")
        self._block_bytes = block_bytes
        self.capacity_bytes = 0
        """Bytes that exist, free or not."""
        self.used_bytes = 0
        """Bytes in extents that were lent when :meth:`merge_returned` was called last."""
        self._used: dict[int, int] = {}
        self._returned: dict[int, int] = {}
        self._free: dict[int, int] = {}
        self._starts: list[int] = []  # of the free ranges, in order

    @property
    def tail_free_bytes(self) -> int:
        """Length of the free range at the very end."""
        last = self._starts[-1] if self._starts else 0
        nbytes = self._free.get(last, 0)
        return nbytes if last + nbytes == self.capacity_bytes else 0

    def round_up(self, nbytes: int) -> int:
        """``nbytes`` in whole blocks."""
        if nbytes <= 0:
            raise ValueError(f"an extent of {nbytes} bytes was asked for; ask for at least 1 byte")
        return -(-nbytes // self._block_bytes) * self._block_bytes

    def allocate(self, nbytes: int) -> Extent | None:
        """The lowest free extent of at least ``nbytes`` bytes, or ``None`` where no free range is long enough."""
        need = self.round_up(nbytes)
        if self._returned:
            self.merge_returned()
        for index, start in enumerate(self._starts):
            left = self._free[start] - need
            if left >= 0:
                del self._free[start]
                if left:
                    self._starts[index] = start + need
                    self._free[start + need] = left
                else:
                    del self._starts[index]
                self._used[start] = need
                self.used_bytes += need
                extent: Extent = new_tuple(Extent, (start, need))
                return extent
        return None

    def allocate_all(self, sizes: Sequence[int]) -> list[Extent] | None:
        """Return extents of at least so many bytes each, side by side, or ``None`` where no free range is long enough.

        A size of 0 needs no place.
        """
        block = self._block_bytes
        needs = [-(-nbytes // block) * block for nbytes in sizes]
        whole = self.allocate(sum(needs)) if any(needs) else Extent(0, 0)
        if whole is None:
            return None
        ends = accumulate(needs, initial=whole.offset)
        extents = [new_tuple(Extent, (offset if need else 0, need)) for offset, need in zip(ends, needs, strict=False)]
        self._used.update([extent for extent in extents if extent[1]])
        return extents

    def free(self, *extents: Extent) -> None:
        """Take extents back. Needs no lock.

        Raises:
            ValueError: if one is not lent: freed twice, or from another arena.
        """
        used, returned = self._used, self._returned
        for extent in extents:
            offset, nbytes = extent
            if used.get(offset) != nbytes or offset in returned:
                raise ValueError(
                    f"{extent} is not lent by this allocator: it was freed twice, or belongs to another arena"
                )
            returned[offset] = nbytes

    def merge_returned(self) -> None:
        """Make what was freed one with its free neighbours."""
        start = end = 0  # of neighbours that become one range
        try:
            for offset, nbytes in sorted(self._returned.copy().items()):  # a copy: other threads may be freeing
                if self._used.pop(offset, None) is not None:  # else an interrupt has come when it was merged
                    self.used_bytes -= nbytes
                    if offset != end:
                        self._merge(start, end - start)
                        start = offset
                    end = offset + nbytes
                del self._returned[offset]
            self._merge(start, end - start)
        except BaseException:
            self.recover()
            raise

    def grow(self, nbytes: int) -> None:
        """Add ``nbytes`` (whole blocks) at the end."""
        if nbytes <= 0 or nbytes % self._block_bytes:
            raise ValueError(f"growth by {nbytes} bytes; give a positive multiple of {self._block_bytes}")
        start = self.capacity_bytes
        self.capacity_bytes += nbytes
        self._merge(start, nbytes)

    def recover(self) -> None:
        """Find what is free anew from what is lent: an interrupt has divided a change."""
        self.used_bytes = sum(self._used.values())
        self._free, start = {}, 0
        for offset, nbytes in sorted({**self._used, self.capacity_bytes: 0}.items()):
            if offset > start:
                self._free[start] = offset - start
            start = offset + nbytes
        self._starts = sorted(self._free)

    def _merge(self, start: int, nbytes: int) -> None:
        """Add a free range, as one with its free neighbours."""
        if not nbytes:
            return
        index = bisect_left(self._starts, start)
        if index and self._starts[index - 1] + self._free[self._starts[index - 1]] == start:
            index -= 1
            start = self._starts.pop(index)
            nbytes += self._free.pop(start)
        if index < len(self._starts) and self._starts[index] == start + nbytes:
            nbytes += self._free.pop(self._starts.pop(index))
        self._starts.insert(index, start)
        self._free[start] = nbytes
