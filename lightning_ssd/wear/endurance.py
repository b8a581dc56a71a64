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

from lightning_ssd.errors import ConfigError

__all__ = [
    "DAY_S",
    "WARN_DAYS",
    "Drive",
    "bytes_per_day",
    "life_days",
    "used_bytes",
    "wear_warning",
]

WARN_DAYS = 180
"""Life in days of continuous use, at the vendor's rating, below which :func:`wear_warning` returns a warning."""

DAY_S = 86_400
_TB = 10**12


@dataclass(frozen=True, slots=True)
class Drive:
    """One drive, and its share of the written bytes."""

    rating_bytes: int | None
    """Bytes that hosts may write over the drive's life, by its vendor's rating; ``None``: unknown."""
    used_bytes: int = 0
    """Bytes of the rating that are used up already."""
    capacity_bytes: int | None = None
    """Size of the drive; used only to express writes as drive writes per day."""
    share: float = 1.0
    """Part of all written bytes that goes to this drive, 0 to 1. In a mirror each drive has 1."""
    name: str = ""
    """Name for messages, such as "nvme0n1"."""

    def __post_init__(self) -> None:
        if self.rating_bytes is not None and self.rating_bytes <= 0:
            raise ConfigError(f"Drive.rating_bytes={self.rating_bytes!r} is no rating; give bytes above 0, or None")
        if self.used_bytes < 0:
            raise ConfigError(f"Drive.used_bytes={self.used_bytes!r} is negative; give 0 or more bytes")
        if self.capacity_bytes is not None and self.capacity_bytes <= 0:
            raise ConfigError(f"Drive.capacity_bytes={self.capacity_bytes!r} is no size; give bytes above 0, or None")
        if not 0 <= self.share <= 1:
            raise ConfigError(f"Drive.share={self.share!r} is no share; give a number from 0 to 1")


def used_bytes(
    rating_bytes: int | None, *, written_bytes: int | None = None, percentage_used: float | None = None
) -> int:
    """Return the bytes of a rating that are used up, from what the drive reports of itself.

    A warranty ends with the rated bytes or with the drive's own estimate at 100 %, whichever comes first, so that the
    larger of the two counts.

    Args:
        rating_bytes: rating of the drive; ``None``: unknown, the percentage is then ignored.
        written_bytes: bytes that hosts have written so far; ``None``: unknown.
        percentage_used: the drive's own estimate of used life, which may exceed 100; ``None``: unknown.
    """
    known = [0 if written_bytes is None else written_bytes]
    if rating_bytes is not None and percentage_used is not None:
        known.append(round(percentage_used / 100 * rating_bytes))
    return max(known)


def bytes_per_day(bytes_per_step: float, step_s: float) -> float:
    """Return the bytes that a run writes in a day.

    Args:
        bytes_per_step: bytes that reach the drives per step, after deduplication, forwarding and cancellation.
        step_s: seconds per step, above 0.

    Raises:
        ConfigError: if an argument is out of its bounds.
    """
    _check_step(step_s)
    if not 0 <= bytes_per_step < math.inf:
        raise ConfigError(f"bytes_per_step={bytes_per_step!r} is no amount; give 0 or more bytes")
    return bytes_per_step / step_s * DAY_S


def life_days(drives: Sequence[Drive], bytes_per_step: float, step_s: float) -> float | None:
    """Return the days until the first of the drives has written its rated bytes.

    This is SSDTrain's ``rating * step time / bytes per step`` (arXiv 2408.10013, section on SSD endurance) for each
    drive, by its share and less the used bytes. The smallest number is returned.

    Args:
        drives: drives that the run writes to; unrated ones are ignored.
        bytes_per_step: bytes that reach all drives together per step.
        step_s: seconds per step, above 0.

    Returns:
        ``None`` when no drive is rated; infinity when nothing is written; 0 for a drive past its rating.

    Raises:
        ConfigError: if an argument is out of its bounds.
    """
    daily_bytes = bytes_per_day(bytes_per_step, step_s)
    first = _first_to_wear(drives, daily_bytes)
    return None if first is None else _days_left(first, daily_bytes)


def wear_warning(drives: Sequence[Drive], bytes_per_step: float, step_s: float) -> str | None:
    """Return a warning if a drive would not last :data:`WARN_DAYS` of continuous use at its vendor's rating.

    Args:
        drives: as for :func:`life_days`.
        bytes_per_step: as for :func:`life_days`.
        step_s: as for :func:`life_days`.

    Returns:
        ``None`` if every rated drive lasts, or no drive is rated.

    Raises:
        ConfigError: if an argument is out of its bounds.
    """
    daily_bytes = bytes_per_day(bytes_per_step, step_s)
    drive = _first_to_wear(drives, daily_bytes)
    if drive is None or drive.rating_bytes is None:
        return None
    days = _days_left(drive, daily_bytes)
    if days >= WARN_DAYS:
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


def _first_to_wear(drives: Sequence[Drive], daily_bytes: float) -> Drive | None:
    """Return the rated drive with the fewest days left."""
    rated = [drive for drive in drives if drive.rating_bytes is not None]
    return min(rated, key=lambda drive: _days_left(drive, daily_bytes), default=None)


def _days_left(drive: Drive, daily_bytes: float) -> float:
    to_drive = daily_bytes * drive.share
    if drive.rating_bytes is None or to_drive <= 0:
        return math.inf
    return max(drive.rating_bytes - drive.used_bytes, 0) / to_drive


def _check_step(step_s: float) -> None:
    if not 0 < step_s < math.inf:
        raise ConfigError(f"step_s={step_s!r} is no duration; give seconds above 0")
