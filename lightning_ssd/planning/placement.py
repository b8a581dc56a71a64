"""Where a saved storage goes; and, without a plan, keep or SSD for the storages of one pass."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["PassTimes", "Placement", "storages_to_keep"]


class Placement(enum.StrEnum):
    """The decision for one storage."""

    KEEP = "keep"
    HOST = "host"
    SSD = "ssd"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class PassTimes:
    """When each saved storage of a pass was packed and first wanted back (seconds of one clock)."""

    sizes: Sequence[int]
    packed_s: Sequence[float]
    wanted_s: Sequence[float | None]
    """``None`` for one that backward never asked for."""
    stayed: frozenset[int] = frozenset()
    """Those whose memory somebody else held all along, so that writing them freed nothing."""


def storages_to_keep(times: PassTimes, *, write_rate: float, read_rate: float) -> frozenset[int]:
    """Which storages would be wanted back before they could have been written and read again.

    The corrected form of SSDTrain's adaptive keep (arXiv 2408.10013, section on adaptive offloading): separate
    rates for both directions, measured times instead of "backward = 2 x forward", writes booked one after the other.
    The tail of forward falls out of it: it is needed at once.

    Args:
        times: of the last pass of the same shape.
        write_rate: bytes per second; 0 if unknown, then only ``times.stayed`` are kept.
        read_rate: likewise.

    Returns:
        Indices to keep in memory in the next pass.
    """
    keep = set(times.stayed)
    if write_rate <= 0 or read_rate <= 0:
        return frozenset(keep)
    write_end = float("-inf")
    for index, (size, packed, wanted) in enumerate(zip(times.sizes, times.packed_s, times.wanted_s, strict=True)):
        if index in keep:
            continue
        end = max(write_end, packed) + size / write_rate
        if wanted is not None and end + size / read_rate > wanted:
            keep.add(index)
        else:
            write_end = end
    return frozenset(keep)
