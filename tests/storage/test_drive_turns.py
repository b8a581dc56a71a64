"""Turns on a shared drive: only where a trial shows a gain, by all processes alike, and never at the cost of a byte."""

from __future__ import annotations

import math
import subprocess
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch

from lightning_ssd.common.tensors import Region
from lightning_ssd.errors import OffloaderClosedError
from lightning_ssd.storage import drive_turns as module_under_test
from lightning_ssd.storage.drive_turns import ExclusiveBackend, exclusive_is_faster, open_exclusive
from lightning_ssd.storage.posix import PosixBackend
from tests.support.faults import FaultyBackend, always, eio
from tests.support.patience import PATIENCE_S

MIB = 1 << 20

pytestmark = pytest.mark.usefixtures("runtime")


@pytest.fixture
def backend(spill_dir: Path) -> Iterator[PosixBackend]:
    with closing(PosixBackend([spill_dir])) as opened:
        yield opened


def times(*seconds: float) -> Callable[[], float]:
    left = list(seconds)
    return lambda: left.pop(0)


def alone(values: Sequence[float]) -> list[float]:
    return list(values)


@pytest.mark.parametrize(
    ("at_once", "in_turns", "pays"),
    [
        ((1.0,) * 4, (0.9,) * 4, True),
        ((1.0,) * 4, (0.98,) * 4, False),
        ((1.0,) * 4, (1.2,) * 4, False),
        ((1.0, 5.0, 2.0, 1.0), (0.9, 4.0, 1.9, 0.9), True),
        ((1.0, 5.0, 2.0, 1.0), (0.5, 0.5, 0.5, 1.0), False),  # the last round says no
        ((1.0, 1.0, 1.0, 1.0), (1.0, 0.5, 0.5, 0.5), False),  # the first one
        ((1.0,) * 4, (math.inf,) * 4, False),
        ((math.inf,) * 4, (1.0,) * 4, True),
        ((math.inf,) * 4, (math.inf,) * 4, False),
    ],
)
def test_turns_must_gain_in_each_round(at_once: tuple[float], in_turns: tuple[float], pays: bool) -> None:
    assert exclusive_is_faster(times(*at_once), times(*in_turns), alone) is pays


def test_the_slowest_process_counts() -> None:
    theirs = -10.0  # another process, slow in whatever way
    assert not exclusive_is_faster(times(1.0), times(0.1), lambda values: [min(value, theirs) for value in values])


def test_all_wait_for_each_other_before_each_measurement() -> None:
    order: list[str] = []

    def agree(values: Sequence[float]) -> list[float]:
        order.append("agree")
        return list(values)

    def measured(name: str, seconds: float) -> Callable[[], float]:
        return lambda: (order.append(name), seconds)[1]

    exclusive_is_faster(measured("at once", 1.0), measured("in turns", 0.5), agree)
    assert order == ["agree", "in turns", "agree", "agree", "at once", "agree"] * 4


@pytest.mark.parametrize("gains", [True, False])
def test_turns_are_taken_where_they_gain(
    gains: bool, backend: PosixBackend, spill_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_under_test, "_seconds", lambda chosen, _: 1.0 if (chosen is backend) == gains else 0.5)
    with ExitStack() as stack:
        chosen = open_exclusive(stack, backend, [spill_dir], alone)
        assert isinstance(chosen, ExclusiveBackend) == gains
        assert (chosen is backend) != gains
        round_trip(chosen, spill_dir)


def round_trip(backend: object, directory: Path) -> None:
    assert isinstance(backend, ExclusiveBackend | PosixBackend)
    written = torch.arange(MIB, dtype=torch.int64)
    read = torch.zeros_like(written)
    with closing(backend.open_arena(directory)) as arena:
        extent = arena.allocate(written.nbytes)
        for start in range(0, written.nbytes, MIB):
            backend.write(arena, Region(written.data_ptr() + start, MIB), extent.offset + start)
        backend.read(arena, Region(read.data_ptr(), read.nbytes), extent.offset)
    assert torch.equal(written, read)


def test_the_real_trial_measures_and_leaves_nothing(backend: PosixBackend, spill_dir: Path) -> None:
    before = sorted(spill_dir.iterdir())
    with ExitStack() as stack:
        round_trip(open_exclusive(stack, backend, [spill_dir], alone), spill_dir)
    assert sorted(spill_dir.iterdir()) == before


def test_a_drive_that_cannot_be_measured_is_left_alone(backend: PosixBackend, spill_dir: Path) -> None:
    broken = FaultyBackend(backend)
    broken.fail_write = always(eio)
    with ExitStack() as stack:
        assert open_exclusive(stack, broken, [spill_dir], alone) is broken


def test_what_is_asked_of_it_is_what_is_inside(backend: PosixBackend, spill_dir: Path) -> None:
    with closing(ExclusiveBackend(backend, [spill_dir])) as turns:
        assert turns.name == backend.name
        assert turns.block_bytes == backend.block_bytes
        assert turns.memory_alignment == backend.memory_alignment
        assert turns.moves_device_memory == backend.moves_device_memory


def test_other_directories_take_no_turns(backend: PosixBackend, spill_dir: Path) -> None:
    (spill_dir / "other").mkdir()
    turns = ExclusiveBackend(backend, [spill_dir])
    turns.close()
    round_trip(turns, spill_dir / "other")
    with pytest.raises(OffloaderClosedError):
        round_trip(turns, spill_dir)


def test_another_process_waits_for_its_turn(backend: PosixBackend, spill_dir: Path, forks: list[str]) -> None:
    """The child holds the drive's writing turn; we get it when the child has died."""
    code = f"""
        import sys, time
        from pathlib import Path
        from lightning_ssd.storage.drive_turn_lock import DriveLock
        arbiter = DriveLock(Path({str(spill_dir)!r}))
        with arbiter.writing():
            print("inside", flush=True)
            time.sleep(600)
    """
    child = subprocess.Popen([*forks, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "inside\n"
        with closing(ExclusiveBackend(backend, [spill_dir])) as turns, closing(turns.open_arena(spill_dir)) as arena:
            done = threading.Event()
            memory = torch.ones(MIB, dtype=torch.uint8)
            extent = arena.allocate(MIB)

            def write() -> None:
                turns.write(arena, Region(memory.data_ptr(), MIB), extent.offset)
                done.set()

            writer = threading.Thread(target=write)
            writer.start()
            assert not done.wait(0.3)
            child.kill()
            assert done.wait(PATIENCE_S)
            writer.join()
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
