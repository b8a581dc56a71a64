"""Account for the bytes that a run writes to each drive, and tell how long its drives last."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lightning_ssd.common.formatting import format_sizes
from lightning_ssd.errors import BudgetError
from lightning_ssd.wear.endurance import DAY_S, Drive, life_days, used_bytes, wear_warning
from lightning_ssd.wear.smart import capacity_bytes, read_health

__all__ = ["ACTIVATIONS", "WearMeter", "Written"]

_log = logging.getLogger(__name__)

ACTIVATIONS = "activations"
"""The writer that plans limit."""
_MIN_BORDERS = 8
_MIN_SECONDS = 60.0
"""Time and number of backwards before rates count, because a run's start may write at another rate."""

Written = Callable[[], Sequence[int]]
"""Returns the bytes that were written so far in each directory."""


class WearMeter:
    """One account per drive: which bytes are written, by whom, from the first :meth:`border` on.

    Args:
        directories: existing directories, one per drive.
        rating_bytes: rating of each drive; ``None``: unknown, the used life of the drives is then not read.
        num_processes: processes that write to these drives, each about as much as this one.
        wear_budget: returns the bytes per day that all processes may write, given the capacity of all drives.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        rating_bytes: int | None,
        *,
        num_processes: int = 1,
        wear_budget: Callable[[int], int | None] = lambda capacity: None,
    ) -> None:
        devices = {os.stat(directory).st_dev: directory for directory in directories}
        capacity = sum(capacity_bytes(directory) for directory in devices.values())
        budget = wear_budget(capacity)
        self.bytes_per_day = None if budget is None else budget // num_processes
        """Bytes per day that this process may write by ``wear_budget``; ``None``: no limit."""
        self._num_processes = num_processes
        self._num_directories = len(directories)
        self._drives = () if rating_bytes is None else _drives_of(directories, rating_bytes)
        self._writers: list[tuple[str, Written]] = []
        self._begin_s: float | None = None
        self._begin: Mapping[str, Sequence[int]] = {}
        self._num_borders = 0
        self._warned = rating_bytes is None
        self._doubt: tuple[float, float] | None = None  # seconds and bytes of others when they had exceeded the budget

    def watch(self, who: str, written: Written) -> None:
        """Count what a writer writes. Several may have one name."""
        self._writers.append((who, written))

    def life_days(self) -> dict[int, float]:
        """Return the days of continuous use until a drive reaches its rating, by number of its directory.

        Drives that are not rated, or not written to, are left out.
        """
        elapsed_s, written = self._since_begin()
        if elapsed_s <= 0:
            return {}
        total, drives = _total(written), self._shared_out(written)
        found: dict[int, float] = {}
        for drive, (_, parts) in zip(drives, self._drives, strict=True):
            days = life_days([drive], total, elapsed_s)
            if days is not None and math.isfinite(days):
                found |= {number: min(days, found.get(number, days)) for number in parts}
        return found

    def border(self) -> str | None:
        """Count the end of a backward. Return the warning that a drive will not last, once, else ``None``.

        Raises:
            BudgetError: other writers than activations, which plans do not limit, write more than ``wear_budget``, and
                go on doing so: weights that leave memory in mid-run may be written but once.
        """
        if self._begin_s is None:
            self._begin_s, self._begin = time.perf_counter(), self._written()
        self._num_borders += 1
        if (self._warned and self.bytes_per_day is None) or not self._is_known():
            return None
        self._hold_to_budget()
        if self._warned:
            return None
        elapsed_s, written = self._since_begin()
        warning = wear_warning(self._shared_out(written), _total(written), elapsed_s)
        self._warned = warning is not None
        return None if warning is None else f"{warning}. Written by: {_parts_of(written)}"

    def other_bytes_per_day(self) -> float:
        """Return what this process writes per day besides activations; 0 before that is known."""
        if not self._is_known():
            return 0.0
        elapsed_s, written = self._others()
        return _total(written) / self._num_processes / elapsed_s * DAY_S

    def _hold_to_budget(self) -> None:
        allowed, doubt = self.bytes_per_day, self._doubt
        if allowed is None:
            return
        now_s, written = self._others()
        nbytes = _total(written) / self._num_processes
        others = nbytes / now_s * DAY_S
        if others <= allowed:
            self._doubt = None
            return
        if doubt is not None and now_s < 2 * doubt[0]:
            return
        self._doubt = now_s, nbytes
        if doubt is None or (nbytes - doubt[1]) / (now_s - doubt[0]) * DAY_S <= allowed:
            return
        told = format_sizes(allowed * self._num_processes, others * self._num_processes, decimal=True)
        raise BudgetError(
            f"OffloadPolicy.wear_budget allows {told[0]} per day, and {_parts_of(written)} need {told[1]} per day, "
            "whatever is done with activations. Raise wear_budget above that, keep these in memory (such as "
            'optimizer_states="keep"), or update less often (accumulate gradients)'
        )

    def _others(self) -> tuple[float, dict[str, list[int]]]:
        """Return what :meth:`_since_begin` does, without activations."""
        elapsed_s, written = self._since_begin()
        written.pop(ACTIVATIONS, None)
        return elapsed_s, written

    def _is_known(self) -> bool:
        return self._num_borders >= _MIN_BORDERS and self._since_begin()[0] >= _MIN_SECONDS

    def _written(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for who, written in self._writers:
            before = found.get(who, [0] * self._num_directories)
            found[who] = [a + b for a, b in zip(before, written(), strict=True)]
        return found

    def _since_begin(self) -> tuple[float, dict[str, list[int]]]:
        """Return the seconds since the first border, and what all processes have written since, in each directory."""
        if self._begin_s is None:
            return 0.0, {}
        nothing, found = [0] * self._num_directories, self._written()
        for who, written in found.items():
            before = self._begin.get(who, nothing)
            found[who] = [(a - b) * self._num_processes for a, b in zip(written, before, strict=True)]
        return time.perf_counter() - self._begin_s, found

    def _shared_out(self, written: Mapping[str, Sequence[int]]) -> list[Drive]:
        """Return the drives, each with its share of what was written."""
        in_each = [sum(counts) for counts in zip(*written.values(), strict=True)] or [0] * self._num_directories
        total = max(sum(in_each), 1)
        shares = [sum(in_each[number] * part for number, part in parts.items()) / total for _, parts in self._drives]
        return [replace(drive, share=min(share, 1.0)) for (drive, _), share in zip(self._drives, shares, strict=True)]


def _total(written: Mapping[str, Sequence[int]]) -> int:
    return sum(map(sum, written.values()))


def _parts_of(written: Mapping[str, Sequence[int]]) -> str:
    """Return who has written which part."""
    total = max(_total(written), 1)
    return ", ".join(f"{who} ({sum(counts) / total:.0%})" for who, counts in written.items() if sum(counts))


def _drives_of(directories: Sequence[Path], rating_bytes: int) -> tuple[tuple[Drive, dict[int, float]], ...]:
    """Return each drive below the directories once, with the part of each directory's bytes that it gets.

    Its share of all is not known yet. A drive whose wear is unknown counts as new.
    """
    drives: dict[str, tuple[Drive, dict[int, float]]] = {}
    for number, directory in enumerate(directories):
        report = read_health(directory)
        size = capacity_bytes(directory) or None  # some network file systems tell 0
        for health in report.drives:
            used = used_bytes(rating_bytes, written_bytes=health.written_bytes, percentage_used=health.percentage_used)
            drive = Drive(rating_bytes, used_bytes=used, capacity_bytes=size, name=health.name)
            drives.setdefault(health.name, (drive, {}))[1][number] = health.share
        if report.reason is not None:
            _log.info("the used life of a drive below %s is unknown: %s", directory, report.reason)
            silent = f"number {os.stat(directory).st_dev}"
            drives.setdefault(silent, (Drive(rating_bytes, capacity_bytes=size, name=silent), {}))[1][number] = 1.0
    return tuple(drives.values())
