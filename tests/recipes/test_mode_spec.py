"""Names of the benchmark's modes: what each says, and which say nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_ssd.storage.backend import Backend
from recipes.benchmarks import step
from recipes.benchmarks.harness import modes
from recipes.benchmarks.harness.mode_names import MODES, ModeSpec, parse_mode, parse_modes


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["--modes", "keep,ssdd"], "--modes has ssdd; allowed: keep, ssd"), (["--modes", ""], "--modes has nothing")],
)
def test_wrong_modes_name_the_right_ones(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        step.main(arguments)
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "budget"])
def test_every_mode_is_a_name(mode: str) -> None:
    assert parse_mode(mode) == ModeSpec(kind=mode)


@pytest.mark.parametrize(
    ("name", "spec", "budget_bytes"),
    [
        ("budget=40%", ModeSpec(kind="budget", budget="40%"), 400),
        ("budget=1.5GiB", ModeSpec(kind="budget", budget="1.5GiB"), 3 << 29),
        ("budget=12.5%@50MB/s", ModeSpec(kind="budget", budget="12.5%", throttle="50MB/s"), 125),
        ("auto@200MB/s", ModeSpec(kind="auto", throttle="200MB/s"), None),
    ],
)
def test_names_are_read(name: str, spec: ModeSpec, budget_bytes: int | None) -> None:
    assert parse_mode(name) == spec
    assert spec.budget_bytes(1000) == budget_bytes
    assert spec.is_planned == (spec.kind in ("auto", "budget"))


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("budget", "budget=SIZE"),
        ("budget=", "allowed: keep"),
        ("budget=0%", "above 0 %"),
        ("budget=101%", "up to 100 %"),
        ("budget=many%", "up to 100 %"),
        ("budget=0", "above 0"),
        ("budget=lots", "is not a size"),
        ("ssd=40%", "no budget for the other modes"),
        ("auto@fast", "is not a size"),
        ("auto@0", "above 0"),
        ("keep@50MB/s", "so not keep"),
        ("recompute@50MB/s", "so not recompute"),
        ("auto+50MB/s", "allowed: keep"),
    ],
)
def test_names_that_say_nothing_are_refused(name: str, allowed: str) -> None:
    with pytest.raises(ValueError, match=allowed):
        parse_mode(name)


def test_a_share_needs_a_whole() -> None:
    with pytest.raises(ValueError, match="share of what keep holds, which is not known"):
        parse_mode("budget=40%").budget_bytes(None)


def test_no_mode_twice() -> None:
    with pytest.raises(ValueError, match="each mode once"):
        parse_modes("keep,ssd, keep")


def test_a_rate_slows_the_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = []

    class Noted(modes.BucketBackend):
        def __init__(self, inner: Backend, bytes_per_s: float) -> None:
            rates.append(bytes_per_s)
            super().__init__(inner, bytes_per_s)

    monkeypatch.setattr(modes, "BucketBackend", Noted)
    for name in ("ssd", "ssd@50MB/s"):
        with modes.open_mode(name, torch.nn.Linear(2, 2), tmp_path, modes.Settings()):
            pass
    assert rates == [50e6]
