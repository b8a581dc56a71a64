"""Processes that share a drive move bytes in turns, if a trial at start shows that this is faster than all at once."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from lightning_ssd.common.collectives import AllReduceMin
from lightning_ssd.common.tensors import Region
from lightning_ssd.errors import StorageError
from lightning_ssd.storage.backend import Backend, WrappedBackend
from lightning_ssd.storage.drive_probe import PROBE_BYTES, measure_rates
from lightning_ssd.storage.drive_turn_lock import DriveLock
from lightning_ssd.storage.spill_file import Arena

__all__ = ["ExclusiveBackend", "exclusive_is_faster", "open_exclusive"]

_log = logging.getLogger(__name__)

_MIN_GAIN = 0.03
_NUM_ROUNDS = 4


class ExclusiveBackend(WrappedBackend):
    """Another backend, whose chunks wait for the turn of this process on their drive.

    Args:
        inner: moves the bytes. Whoever opened it closes it.
        directories: on the drives where turns are taken; all other moves go straight through.

    Raises:
        StorageError: see :class:`DriveLock`.
    """

    def __init__(self, inner: Backend, directories: Iterable[Path]) -> None:
        super().__init__(inner)
        self._arbiters: dict[Path, DriveLock] = {}
        with ExitStack() as stack:
            for directory in directories:
                self._arbiters[directory] = DriveLock(directory)
                stack.callback(self._arbiters[directory].close)
            self._resources = stack.pop_all()

    def write(self, arena: Arena, region: Region, offset: int) -> None:
        arbiter = self._arbiters.get(arena.directory)
        if arbiter is None:
            self.inner.write(arena, region, offset)
            return
        with arbiter.writing():
            self.inner.write(arena, region, offset)

    def read(self, arena: Arena, region: Region, offset: int) -> None:
        arbiter = self._arbiters.get(arena.directory)
        if arbiter is None:
            self.inner.read(arena, region, offset)
            return
        with arbiter.reading():
            self.inner.read(arena, region, offset)

    def close(self) -> None:
        """Give the locks back; the other backend stays open. Idempotent."""
        self._resources.close()


def open_exclusive(stack: ExitStack, backend: Backend, directories: Sequence[Path], agree: AllReduceMin) -> Backend:
    """``backend``, or one in front of it that takes turns on the drives where this gains.

    Every process of the run calls this at the same point: they measure together.

    Args:
        stack: closes what was opened.
        backend: moves the bytes.
        directories: that will be used, all made.
        agree: the smallest of each number over all processes.
    """
    gaining = [directory for directory in directories if _gains(backend, directory, agree)]
    if not gaining:
        return backend
    _log.info("processes take turns on the drives of %s", ", ".join(map(str, gaining)))
    turns = ExclusiveBackend(backend, gaining)
    stack.callback(turns.close)
    return turns


def _gains(backend: Backend, directory: Path, agree: AllReduceMin) -> bool:
    turns: ExclusiveBackend | None = None
    try:
        turns = ExclusiveBackend(backend, [directory])
    except StorageError as error:
        _log.warning("processes cannot take turns: %s", error)
    try:
        return exclusive_is_faster(
            lambda: _seconds(backend, directory), lambda: _seconds(turns, directory) if turns else math.inf, agree
        )
    finally:
        if turns is not None:
            turns.close()


def _seconds(backend: Backend, directory: Path) -> float:
    """What a write and a read of some bytes take; infinite where that fails, for the others wait for a number."""
    try:
        rates = measure_rates(backend, directory)
    except (OSError, StorageError) as error:
        _log.warning("%s could not be measured: %s", directory, error)
        return math.inf
    return PROBE_BYTES / rates.write_per_s + PROBE_BYTES / rates.read_per_s


def exclusive_is_faster(at_once: Callable[[], float], in_turns: Callable[[], float], agree: AllReduceMin) -> bool:
    """Try both, side by side, a few times: turns must gain each time. A round takes as long as its slowest process.

    Single rounds differ by half on a shared drive, and turns that do not pay cost more than a trial that is too strict.

    Args:
        at_once: seconds of this process for its share while the others do the same.
        in_turns: the same when processes take turns.
        agree: the smallest of each number over all processes; every process waits in it for the others.
    """

    def seconds(measure: Callable[[], float]) -> float:
        agree([0.0])  # nobody begins before all are here
        return -agree([-measure()])[0]

    # What is agreed is the same everywhere, so that all processes stop after the same round.
    return all(seconds(in_turns) < (1 - _MIN_GAIN) * seconds(at_once) for _ in range(_NUM_ROUNDS))
