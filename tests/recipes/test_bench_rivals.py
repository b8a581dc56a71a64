"""The comparison with rivals: what of it runs without their packages, and what it says where these are missing."""

from __future__ import annotations

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


def test_wrong_bits_and_an_end_are_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rivals.is_right(row("ours", 1.0, 1))
    assert not rivals.is_right(row("ours", 1.0, 1, equal=1))
    assert not rivals.is_right(row("ours", 1.0, 1) | {"fate": "killed in step 1"})
    monkeypatch.setattr(rivals, "measure", lambda *_: [row("ours:limited", 1.0, 1, equal=1)])
    assert rivals.main(["--tiny", "--modes", "ours"]) == 1
