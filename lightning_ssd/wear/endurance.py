"""Estimate how long the drives of a run last, from the bytes written per step and the vendors' ratings.

A vendor rates a drive for the bytes that hosts may write over its life (its "TBW"). SSDTrain (arXiv 2408.10013, section
on SSD endurance) divides that rating by what a run writes, and assumes more than the rating twice. Large sequential
writes wear less than the mix of the rating, and data that need to last a day instead of years allow far more cycles. No
vendor grants either. So the rating is taken at face value here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["DAY_S", "WARN_DAYS", "Drive", "life_days", "used_bytes", "wear_warning"]

WARN_DAYS = 180
"""Life in days of continuous use, at the vendor's rating, below which :func:`wear_warning` returns a warning."""

DAY_S = 86_400
_TB = 10**12


@dataclass(frozen=True, slots=True)
class Drive:
    """One rated drive, and its share of the written bytes."""

    rating_bytes: int
    """Bytes that hosts may write over the drive's life, by its vendor's rating."""
    used_bytes: int = 0
    """Bytes of the rating that are used up already."""
    capacity_bytes: int | None = None
    """Size of the drive; used only to express writes as drive writes per day."""
    share: float = 1.0
    """Part of all written bytes that goes to this drive, 0 to 1. In a mirror each drive has 1."""
    name: str = ""
    """Name for messages, such as "nvme0n1"."""


def used_bytes(rating_bytes: int, *, written_bytes: int | None, percentage_used: float) -> int:
    """Return the bytes of a rating that are used up, from what the drive reports of itself.

    A warranty ends with the rated bytes or with the drive's own estimate at 100 %, whichever comes first, so that the
    larger of the two counts.

    Args:
        rating_bytes: of the drive.
        written_bytes: bytes that hosts have written so far; ``None``: unknown.
        percentage_used: the drive's own estimate of used life, which may exceed 100.
    """
    return max(written_bytes or 0, round(percentage_used / 100 * rating_bytes))


def life_days(drives: Sequence[Drive], bytes_per_step: float, step_s: float) -> float | None:
    """Return the days until the first of the drives has written its rated bytes.

    This is SSDTrain's ``rating * step time / bytes per step`` (arXiv 2408.10013, section on SSD endurance) for each
    drive, by its share and less the used bytes. The smallest number is returned.

    Args:
        drives: that the run writes to.
        bytes_per_step: bytes that reach all drives together per step.
        step_s: seconds per step, above 0.

    Returns:
        ``None`` without a drive; infinity when nothing is written; 0 for a drive past its rating.
    """
    return min((_days_left(drive, bytes_per_step / step_s * DAY_S) for drive in drives), default=None)


def wear_warning(drives: Sequence[Drive], bytes_per_step: float, step_s: float) -> str | None:
    """Return a warning if a drive would not last :data:`WARN_DAYS` of continuous use at its vendor's rating.

    Args:
        drives: as for :func:`life_days`.
        bytes_per_step: as for :func:`life_days`.
        step_s: as for :func:`life_days`.

    Returns:
        ``None`` if every drive lasts.
    """
    daily_bytes = bytes_per_step / step_s * DAY_S
    drive = min(drives, key=lambda one: _days_left(one, daily_bytes), default=None)
    if drive is None or (days := _days_left(drive, daily_bytes)) >= WARN_DAYS:
        return None
    name = f"drive {drive.name}" if drive.name else "a drive"
    rating = f"{drive.rating_bytes / _TB:,.1f} TB"
    if days > 0:
        life = f"reaches its rated {rating} after {days:.1f} days of continuous use"
    else:
        life = f"is past its rated {rating} already ({drive.used_bytes / _TB:,.1f} TB used)"
    to_drive = daily_bytes * drive.share
    daily = f"{to_drive / _TB:,.1f} TB" if to_drive >= _TB / 10 else f"{to_drive / 10**9:,.1f} GB"
    writes = f", {to_drive / drive.capacity_bytes:.1f} drive writes" if drive.capacity_bytes else ""
    return (
        f"{name} {life} (warned of below {WARN_DAYS}): this run writes {daily} to it per day{writes}. "
        'To write less, set OffloadPolicy.wear_budget (such as "1DWPD", with activations="auto"), let '
        'HardwareProfile.host_memory take a part, or choose OffloadPolicy.activations="recompute" or "keep"'
    )


def _days_left(drive: Drive, daily_bytes: float) -> float:
    to_drive = daily_bytes * drive.share
    return max(drive.rating_bytes - drive.used_bytes, 0) / to_drive if to_drive > 0 else math.inf
