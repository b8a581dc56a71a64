"""Plans where a drive is full: the drive is blamed, not the user, and other drives serve."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.errors import BudgetError
from lightning_ssd.storage.backend import Backend, WrappedBackend
from lightning_ssd.storage.spill_file import Arena
from tests.support.helpers import PLANNED, Raised, Session, Setup, assert_identical, open_offloader, outcome
from tests.support.plan_trainings import trains


class FullBackend(WrappedBackend):
    """The file systems of some directories give no byte."""

    def __init__(self, inner: Backend, full: Sequence[Path]) -> None:
        super().__init__(inner)
        self._full = full

    def open_arena(self, directory: Path) -> Arena:
        arena = super().open_arena(directory)
        if directory in self._full:
            arena._preallocate = lambda nbytes: False  # type: ignore[method-assign]
        return arena


def test_a_budget_on_a_full_drive_blames_the_drive(tmp_path: Path) -> None:
    setup = Setup(activations="auto", activation_budget=100_000, drained=False, settled=True)
    full = {"_wrap_backend": lambda inner: FullBackend(inner, [tmp_path])}
    with open_offloader(tmp_path, setup, **full) as offloader:
        # Also of the writes of the first pass, which has no plan.
        with pytest.warns(UserWarning, match="failed|measured") as caught:
            got = outcome(trains(3), Session.of(offloader, setup))
        place = f"the directory {tmp_path} could not be measured "
        assert any(re.match(rf"{place}.*; nothing will be moved there\. Free space", str(w.message)) for w in caught)
        assert offloader.unusable is not None
    assert isinstance(got, Raised)
    assert got.type == BudgetError.__name__
    assert "OffloadPolicy.activation_budget=100000 is too small" in got.text
    assert re.search(
        rf"because no drive can be used: the directory {tmp_path} could not be measured \(the file system of "
        rf"{tmp_path}\S+ is full: [\d,]+ more bytes are needed, [\d,]+ are free, .*\)\. Without one the smallest "
        r"that works is .*\. Free space there, or name other directories in HardwareProfile\(paths=\.\.\.\); or raise",
        got.text,
    )
    assert got.text.count("Free space") == 1


def test_a_run_on_a_full_drive_says_why_nothing_moves(tmp_path: Path) -> None:
    full = {"_wrap_backend": lambda inner: FullBackend(inner, [tmp_path])}
    with open_offloader(tmp_path, PLANNED, **full) as offloader:
        # Also of the writes of the first pass, which has no plan.
        with pytest.warns(UserWarning, match="failed|measured") as caught:
            assert_identical(outcome(trains(6), Session.of(offloader, PLANNED)), outcome(trains(6), Session()))
        assert any("could not be measured" in str(w.message) for w in caught)
        assert offloader.unusable is not None
        assert f"the directory {tmp_path} could not be measured (the file system of" in offloader.unusable
        assert offloader.stats.bytes_written == 0


def test_a_full_drive_is_passed_over_when_the_drives_are_measured(tmp_path: Path) -> None:
    paths = [tmp_path / "full", tmp_path / "empty"]
    hardware = HardwareProfile(paths=paths, allow_unsuitable_paths=True)
    policy = OffloadPolicy(activations="auto", max_slowdown=50.0, min_tensor_bytes=0)
    with Offloader(policy=policy, hardware=hardware, _wrap_backend=lambda b: FullBackend(b, paths[:1])) as offloader:
        assert_identical(outcome(trains(6), Session.of(offloader, PLANNED)), outcome(trains(6), Session()))
        assert offloader.unusable is None
        assert offloader.stats.bytes_written > 0
