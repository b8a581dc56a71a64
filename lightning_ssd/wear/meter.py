"""Tell how long the drives of a run will last, from their rating, their used life, and the bytes that it writes."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lightning_ssd.wear.endurance import Drive, life_days, used_bytes, wear_warning
from lightning_ssd.wear.smart import capacity_bytes, read_health

__all__ = ["WearMeter"]

_log = logging.getLogger(__name__)

_MIN_BORDERS = 8
_MIN_SECONDS = 60.0
"""Time and number of backwards before the first warning, because a run's start may write at another rate."""


class WearMeter:
    """Measures the bytes that are written per second, from the first :meth:`border` on.

    Args:
        directories: existing directories, one per drive; each gets an equal part of the written bytes.
        rating_bytes: rating of each drive; ``None``: unknown, the used life of the drives is then not read.
        num_processes: processes that write to these drives, each about as much as this one.
    """

    def __init__(self, directories: Sequence[Path], rating_bytes: int | None, *, num_processes: int = 1) -> None:
        devices = {os.stat(directory).st_dev: directory for directory in directories}
        self.capacity_bytes = sum(capacity_bytes(directory) for directory in devices.values())
        self._rating_bytes = rating_bytes
        self._num_processes = num_processes
        self._drives = () if rating_bytes is None else _drives_of(directories, rating_bytes)
        self._begin_s: float | None = None
        self._begin_bytes = 0
        self._num_borders = 0
        self._warned = False

    @property
    def is_rated(self) -> bool:
        """Whether the drives' rating is known, so that borders can warn."""
        return self._rating_bytes is not None

    def life_days(self, written_bytes: int) -> float | None:
        """Return the days of continuous use until a drive reaches its rating; ``None``: unknown, or nothing written."""
        elapsed_s, written = self._since_begin(written_bytes)
        if elapsed_s <= 0:
            return None
        days = life_days(self._drives, written, elapsed_s)
        return None if days is None or math.isinf(days) else days

    def border(self, written_bytes: int) -> str | None:
        """Count the end of a backward. Return the warning that a drive will not last, once, else ``None``."""
        if self._rating_bytes is None or self._warned:
            return None
        if self._begin_s is None:
            self._begin_s, self._begin_bytes = time.perf_counter(), written_bytes
        self._num_borders += 1
        elapsed_s, written = self._since_begin(written_bytes)
        if self._num_borders < _MIN_BORDERS or elapsed_s < _MIN_SECONDS:
            return None
        warning = wear_warning(self._drives, written, elapsed_s)
        self._warned = warning is not None
        return warning

    def _since_begin(self, written_bytes: int) -> tuple[float, int]:
        if self._begin_s is None:
            return 0.0, 0
        written = (written_bytes - self._begin_bytes) * self._num_processes
        return time.perf_counter() - self._begin_s, written


def _drives_of(directories: Sequence[Path], rating_bytes: int) -> tuple[Drive, ...]:
    """Return each drive below the directories once, with its share of all writes; as new if its wear is unknown."""
    drives: dict[str, Drive] = {}
    for directory in directories:
        report, part = read_health(directory), 1 / len(directories)
        size = capacity_bytes(directory) or None  # some network file systems tell 0
        told = [
            Drive(
                rating_bytes,
                used_bytes=used_bytes(
                    rating_bytes, written_bytes=health.written_bytes, percentage_used=health.percentage_used
                ),
                capacity_bytes=size,
                share=part * health.share,
                name=health.name,
            )
            for health in report.drives
        ]
        if report.reason is not None:
            _log.info("the used life of a drive below %s is unknown: %s", directory, report.reason)
            silent = f"number {os.stat(directory).st_dev}"
            told.append(Drive(rating_bytes, capacity_bytes=size, share=part, name=silent))
        for drive in told:
            before = drives.get(drive.name)
            share = drive.share if before is None else min(before.share + drive.share, 1.0)
            drives[drive.name] = replace(drive, share=share)
    return tuple(drives.values())
