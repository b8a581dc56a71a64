"""Account for the bytes that a run writes to each drive, and tell how long its drives last."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lightning_ssd.common.collectives import AllReduceMin
from lightning_ssd.common.formatting import escape_control, format_sizes
from lightning_ssd.errors import BudgetError
from lightning_ssd.wear.endurance import DAY_S, life_days, wear_warning

__all__ = ["ACTIVATIONS", "WearMeter", "Written"]

ACTIVATIONS = "activations"
"""The writer that plans limit."""
_MIN_BORDERS = 8
_MIN_SECONDS = 60.0
"""Time and number of backwards before rates count, because a run's start may write at another rate."""
_MAX_WINDOW = 1024
"""Backwards of the longest window over which a rate is measured."""

Written = Callable[[], Sequence[int]]
"""Returns the bytes that were written so far in each directory."""


class _Drive(NamedTuple):
    """One file system that the run writes to."""

    place: str
    """Its first directory, for messages."""
    capacity_bytes: int
    """Size; some network file systems tell 0."""
    numbers: list[int]
    """Numbers of the directories on it."""

    def written(self, written: Mapping[str, Sequence[int]]) -> int:
        """Return the bytes of all writers on this drive."""
        return sum(counts[number] for counts in written.values() for number in self.numbers)


class WearMeter:
    """One account per drive: which bytes are written, by whom, from the first :meth:`border` on.

    Args:
        directories: existing directories, one per drive.
        endurance_bytes: bytes that each drive may still be written; ``None``: unknown.
        num_processes: processes that write to these drives, each about as much as this one.
        wear_budget: returns the bytes per day that all processes may write, given the capacity of all drives.
        agree: has all processes of the run refuse the budget together; ``None``: there is one process.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        endurance_bytes: int | None,
        *,
        num_processes: int = 1,
        wear_budget: Callable[[int], int | None] = lambda capacity: None,
        agree: AllReduceMin | None = None,
    ) -> None:
        drives: dict[int, _Drive] = {}
        for number, directory in enumerate(directories):
            space = os.statvfs(directory)
            new = _Drive(escape_control(directory), space.f_blocks * space.f_frsize, [])
            drives.setdefault(os.stat(directory).st_dev, new).numbers.append(number)
        self._drives = tuple(drives.values())
        budget = wear_budget(sum(drive.capacity_bytes for drive in self._drives))
        self.bytes_per_day = None if budget is None else budget // num_processes
        """Bytes per day that this process may write by ``wear_budget``; ``None``: no limit."""
        self._num_processes = num_processes
        self._num_directories = len(directories)
        self._endurance_bytes = endurance_bytes
        self._writers: list[tuple[str, Written]] = []
        self._begin_s: float | None = None
        self._begin: Mapping[str, Sequence[int]] = {}
        self._num_borders = 0
        self._warned = False
        self._agree = agree
        # Bytes per second of writers besides activations in the last two windows. What is written once is in one alone.
        self._windows: deque[float] = deque(maxlen=2)
        self._window_begin = 0.0, 0.0  # seconds, and bytes of these writers
        self._others_per_s = 0.0

    def watch(self, who: str, written: Written) -> None:
        """Count what a writer writes. Several may have one name."""
        self._writers.append((who, written))

    def life_days(self) -> dict[int, float]:
        """Return the days of continuous use until a drive has been written what it may be, by number of its directory.

        Drives that are not written to are left out, and all of them where ``endurance_bytes`` is unknown.
        """
        elapsed_s, written = self._since_begin()
        if elapsed_s <= 0 or self._endurance_bytes is None:
            return {}
        found: dict[int, float] = {}
        for drive in self._drives:
            days = life_days(self._endurance_bytes, drive.written(written) / elapsed_s * DAY_S)
            if math.isfinite(days):
                found |= dict.fromkeys(drive.numbers, days)
        return found

    def border(self) -> str | None:
        """Count the end of a backward. Return the warning that a drive will not last, once, else ``None``.

        Raises:
            BudgetError: other writers than activations, which plans do not limit, write more than ``wear_budget`` in
                two windows: weights that leave memory in mid-run are written but once. All processes raise it together.
        """
        if self._begin_s is None:
            self._begin_s, self._begin = time.perf_counter(), self._written()
        self._num_borders += 1
        if self.bytes_per_day is not None and self._ends_window():
            self._hold_to_budget(self.bytes_per_day)
        if self._warned or self._endurance_bytes is None or self._num_borders < _MIN_BORDERS:
            return None
        elapsed_s, written = self._since_begin()
        if elapsed_s < _MIN_SECONDS:
            return None
        worst = max(self._drives, key=lambda drive: drive.written(written))
        daily_bytes = worst.written(written) / elapsed_s * DAY_S
        warning = wear_warning(worst.place, self._endurance_bytes, daily_bytes, worst.capacity_bytes)
        self._warned = warning is not None
        return None if warning is None else f"{warning}. Written by: {_parts_of(written)}"

    def other_bytes_per_day(self) -> float:
        """Return what this process writes per day besides activations; 0 before two windows have shown it."""
        return self._others_per_s * DAY_S

    def _ends_window(self) -> bool:
        """Return whether this backward ends a window. All processes count them alike, so that they meet there."""
        num = self._num_borders
        return num >= _MIN_BORDERS and (num & (num - 1) == 0 or num % _MAX_WINDOW == 0)

    def _hold_to_budget(self, allowed: int) -> None:
        now_s, written = self._since_begin()
        written.pop(ACTIVATIONS, None)
        begin_s, begin = self._window_begin
        nbytes = _total(written) / self._num_processes
        if now_s - begin_s >= _MIN_SECONDS:
            self._windows.append((nbytes - begin) / (now_s - begin_s))
            self._window_begin = now_s, nbytes
            if len(self._windows) == self._windows.maxlen:
                self._others_per_s = min(nbytes / now_s, *self._windows)
        others = self.other_bytes_per_day()
        excess = others if others > allowed else 0.0
        if self._agree is not None:
            excess = -self._agree([-excess])[0]
        if not excess:
            return
        told = format_sizes(allowed * self._num_processes, excess * self._num_processes, decimal=True)
        who = _parts_of(written) or "other processes"
        raise BudgetError(
            f"OffloadPolicy.wear_budget allows {told[0]} per day, and {who} need {told[1]} per day, whatever is done "
            "with activations. Raise wear_budget above that, keep these in memory (such as "
            'optimizer_states="keep"), or update less often (accumulate gradients)'
        )

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


def _total(written: Mapping[str, Sequence[int]]) -> int:
    return sum(map(sum, written.values()))


def _parts_of(written: Mapping[str, Sequence[int]]) -> str:
    """Return who has written which part."""
    total = max(_total(written), 1)
    return ", ".join(f"{who} ({sum(counts) / total:.0%})" for who, counts in written.items() if sum(counts))
