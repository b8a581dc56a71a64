"""Names of the benchmark's modes: what each says, and which say nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_ssd.storage.backend import Backend
from recipes.benchmarks.harness import modes
from recipes.benchmarks.harness.mode_names import ModeSpec, parse_mode, parse_modes


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
        ("budget=101%", "up to 100 %"),
        ("budget=0", "above 0"),
        ("budget=lots", "is not a size"),
        ("ssd=40%", "no budget for the other modes"),
        ("auto@fast", "is not a size"),
        ("keep,ssd, keep", "each mode once"),
        ("keep@50MB/s", "so not keep"),
    ],
)
def test_names_that_say_nothing_are_refused(name: str, allowed: str) -> None:
    with pytest.raises(ValueError, match=allowed):
        parse_modes(name)


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
