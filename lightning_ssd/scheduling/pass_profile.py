"""The lesson of one pass for the next: which storages come, in which order they are wanted back, what to keep.

Pure bookkeeping: no tensors, no I/O, no clock. A *pass* is one entry into ``saved_tensors()`` with the backward that
follows. Everything here is a hint; a wrong one costs time, never correctness.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence, Set
from dataclasses import dataclass

__all__ = ["PassProfile", "PrefetchBudget", "ProfileBook", "storages_to_keep"]

_MAX_PROFILES = 16


def storages_to_keep(
    sizes: Sequence[int],
    packed_s: Sequence[float],
    wanted_s: Sequence[float | None],
    *,
    stayed: Set[int] = frozenset(),
    write_rate: float,
    read_rate: float,
) -> frozenset[int]:
    """Return which storages would be wanted back before they could have been written and read again.

    The corrected form of SSDTrain's adaptive keep (arXiv 2408.10013, section on adaptive offloading): separate
    rates for both directions, measured times instead of "backward = 2 x forward", writes booked one after the other.
    The tail of forward falls out of it: it is needed at once.

    Args:
        sizes: bytes of each storage of the last pass of the same shape.
        packed_s: when each was packed.
        wanted_s: when backward asked for each first, by the same clock; ``None``: it never did.
        stayed: those whose memory the program held all along, because writing them freed nothing.
        write_rate: bytes per second; 0 if unknown, then only ``stayed`` are kept.
        read_rate: likewise.

    Returns:
        Indices to keep in memory in the next pass.
    """
    keep = set(stayed)
    if write_rate <= 0 or read_rate <= 0:
        return frozenset(keep)
    write_end = float("-inf")
    for index, (size, packed, wanted) in enumerate(zip(sizes, packed_s, wanted_s, strict=True)):
        if index in keep:
            continue
        end = max(write_end, packed) + size / write_rate
        if wanted is not None and end + size / read_rate > wanted:
            keep.add(index)
        else:
            write_end = end
    return frozenset(keep)


@dataclass(frozen=True, slots=True)
class PassProfile:
    """One finished pass."""

    sizes: tuple[int, ...]
    """Bytes of the saved storages, in the order in which they were packed."""
    order: tuple[int, ...]
    """Their indices in the order of first unpack. It is not the exact reverse of the pack order."""
    keep: frozenset[int]
    """Those that would come back before they have left, or never leave memory: writing them is wasted."""


class ProfileBook:
    """The last few profiles, found by what has been packed so far (shapes of a step may alternate)."""

    def __init__(self) -> None:
        self._profiles: OrderedDict[tuple[int, ...], PassProfile] = OrderedDict()

    def add(self, profile: PassProfile) -> None:
        """Remember a profile; the latest of equal sizes counts, the least recent goes."""
        self._profiles[profile.sizes] = profile
        self._profiles.move_to_end(profile.sizes)
        while len(self._profiles) > _MAX_PROFILES:
            self._profiles.popitem(last=False)

    def guess(self, sizes_so_far: Sequence[int]) -> PassProfile | None:
        """The latest profile that began like this."""
        count, prefix = len(sizes_so_far), tuple(sizes_so_far)
        for profile in reversed(self._profiles.values()):
            if profile.sizes[:count] == prefix:
                return profile
        return None

    @property
    def latest(self) -> PassProfile | None:
        """The one that was added last."""
        return next(reversed(self._profiles.values()), None)

    def exact(self, sizes: Sequence[int]) -> PassProfile | None:
        """The profile of a pass with exactly these sizes."""
        return self._profiles.get(tuple(sizes))


class PrefetchBudget:
    """How many bytes may be brought up ahead of their use. Adapts to what stalls.

    A stall means that reads began too late: the budget grows by half. A pass without one gives a twentieth back.
    It stays between two of the largest storages that move (below that, nothing overlaps) and an eighth of all that is
    saved.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        """The budget now."""
        self._floor = 0
        self._ceiling = 0
        self._cap = sys.maxsize
        self._stalled = False

    def observe(self, nbytes: int, saved_peak_bytes: int) -> None:
        """A storage of this size goes to the tier."""
        self._set_bounds(max(self._floor, 2 * nbytes), saved_peak_bytes)

    def stalled(self) -> None:
        """Note that the training thread waited for a read."""
        self._stalled = True
        self.nbytes = min(self.nbytes + self.nbytes // 2, self._ceiling)

    def pass_ended(self, profiles: Sequence[PassProfile], saved_peak_bytes: int) -> None:
        """A backward is over: the bounds follow what its passes really moved."""
        if not self._stalled:
            self.nbytes -= self.nbytes // 20
        self._stalled = False
        moved = [n for p in profiles for i, n in enumerate(p.sizes) if i not in p.keep]
        if moved:
            self._set_bounds(2 * max(moved), saved_peak_bytes)

    def out_of_memory(self) -> None:
        """Memory ran out while bytes were brought up: look less far ahead for the rest of the run."""
        self._cap = max(self.nbytes // 2, 1)
        self.nbytes = min(self.nbytes, self._cap)

    def _set_bounds(self, floor: int, saved_peak_bytes: int) -> None:
        self._floor = min(floor, self._cap)
        self._ceiling = min(max(saved_peak_bytes // 8, floor), self._cap)
        self.nbytes = min(max(self.nbytes, self._floor), self._ceiling)
