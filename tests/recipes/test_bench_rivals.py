"""The comparison with rivals: what of it runs without their packages, and what it says where these are missing."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from recipes.benchmarks import rivals


def row(mode: str, step_s: float, peak_bytes: int, equal: int = 2) -> dict[str, Any]:
    return {
        "mode": mode,
        "fate": "trained",
        "losses": [1.0],
        "bits": {"equal": equal, "of": 2},
        "step_s": step_s,
        "sync_s": 0.0,
        "peak_bytes": peak_bytes,
    }


@pytest.mark.exhaustive
def test_those_without_packages_train_to_the_same_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    arguments = ["--tiny", "--modes", "plain,swap,fsdp2,ours", "--steps", "1", "--dir", str(tmp_path)]
    assert rivals.main([*arguments, "--json", str(report)]) == 0
    rows = json.loads(report.read_text())["rows"]
    assert [found["mode"] for found in rows] == ["plain", "swap", "fsdp2", "ours"]
    assert all(found["bits"] == {"equal": 28, "of": 28} for found in rows)
    assert len({tuple(found["losses"]) for found in rows}) == 1
    assert str(tmp_path) not in report.read_text()
    assert list(tmp_path.iterdir()) == [report], "it leaves something behind"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modes", "plain,deepspeed_lean"], "not installed: deepspeed; pip install deepspeed"),
        ([], "not installed: accelerate, deepspeed; pip install accelerate deepspeed"),
        ([], "leave it out: --modes plain,swap,fsdp2,ours"),
        (["--modes", "plain,our"], "--modes has our; allowed: plain"),
        (["--modes", "plain", "--steps", "0"], "at least one step"),
        (["--modes", "plain", "--limit", "much"], "is not a size"),
    ],
)
def test_mistakes(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        rivals.main(arguments)
    assert message in " ".join(capsys.readouterr().err.split())


def test_wrong_bits_and_an_end_are_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rivals.is_right(row("ours", 1.0, 1))
    assert not rivals.is_right(row("ours", 1.0, 1, equal=1))
    assert not rivals.is_right(row("ours", 1.0, 1) | {"fate": "killed in step 1"})
    monkeypatch.setattr(rivals, "measure", lambda *_: [row("ours:limited", 1.0, 1, equal=1)])
    assert rivals.main(["--tiny", "--modes", "ours"]) == 1
