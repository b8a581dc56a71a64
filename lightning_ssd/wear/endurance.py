"""Estimate how long a drive lasts, from the bytes written per day and the bytes that it may still be written.

A vendor rates a drive for the bytes that hosts may write over its life (its "TBW"). SSDTrain (arXiv 2408.10013, section
on SSD endurance) divides that rating by what a run writes, and assumes more than the rating twice. Large sequential
writes wear less than the mix of the rating, and data that need to last a day instead of years allow far more cycles. No
vendor grants either. So the rating is taken at face value here.
"""

from __future__ import annotations

import math

__all__ = ["DAY_S", "WARN_DAYS", "life_days", "wear_warning"]

WARN_DAYS = 180
"""Days of continuous use below which :func:`wear_warning` returns a warning."""

DAY_S = 86_400
_TB = 10**12


def life_days(endurance_bytes: int, daily_bytes: float) -> float:
    """Return the days until a drive has been written ``endurance_bytes``; infinity if nothing is written.

    With the bytes of a step, and steps per day, this is SSDTrain's ``rating * step time / bytes per step``.
    """
    return endurance_bytes / daily_bytes if daily_bytes > 0 else math.inf


def wear_warning(place: str, endurance_bytes: int, daily_bytes: float, capacity_bytes: int) -> str | None:
    """Return a warning if a drive would not last :data:`WARN_DAYS` of continuous use.

    Args:
        place: a directory on the drive.
        endurance_bytes: bytes that the drive may still be written.
        daily_bytes: bytes that the run writes to it per day.
        capacity_bytes: size of its file system; 0: unknown.

    Returns:
        ``None`` if the drive lasts.
    """
    days = life_days(endurance_bytes, daily_bytes)
    if days >= WARN_DAYS:
        return None
    daily = f"{daily_bytes / _TB:,.1f} TB" if daily_bytes >= _TB / 10 else f"{daily_bytes / 10**9:,.1f} GB"
    writes = f", {daily_bytes / capacity_bytes:.1f} drive writes" if capacity_bytes else ""
    return (
        f"the drive of {place} has been written the {endurance_bytes / _TB:,.1f} TB that drive_endurance allows after "
        f"{days:.1f} days of continuous use (warned of below {WARN_DAYS}): this run writes {daily} to it per "
        f"day{writes}. "
        'To write less, set OffloadPolicy.wear_budget (such as "1DWPD", with activations="auto"), let '
        'HardwareProfile.host_memory take a part, or choose OffloadPolicy.activations="recompute" or "keep"'
    )
