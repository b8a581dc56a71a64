"""The benchmark's real entry point, at a size that takes a second."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from recipes.benchmarks import io


def run(tmp_path: Path, *extra: str) -> dict[str, object]:
    directory, result = tmp_path / "drive", tmp_path / "result.json"
    arguments = ["--dir", str(directory), "--size", "60MiB", "--rounds", "1", "--json", str(result), *extra]
    assert io.main(arguments) == 0
    assert os.listdir(directory) == []
    content: dict[str, object] = json.loads(result.read_text())
    return content


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_against_fio(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = run(tmp_path)
    rows = content["medians"]
    assert isinstance(rows, list)
    assert [row["direction"] for row in rows] == ["write", "write", "read", "read"]
    assert {row["contender"][:3] for row in rows} == {"our", "fio"}
    assert all(row["gib_per_s"] > 0 and row["rate_ratio"] > 0 for row in rows)
    shown = capsys.readouterr().out
    assert "core-s per GiB" in shown
    assert "Read back and compared, all equal: 2 tensors each." in shown
    assert str(tmp_path) not in shown


def test_without_fio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io.shutil, "which", lambda name: None)
    rows = run(tmp_path)["medians"]
    assert isinstance(rows, list)
    assert "plain os.pwritev" in {row["contender"] for row in rows}


def test_limits_what_it_writes(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"would write 16\.0 GiB; lower --size or --rounds"):
        io.main(["--dir", str(tmp_path / "drive"), "--size", "1GiB", "--rounds", "7", "--max-written", "15GiB"])
    assert not (tmp_path / "drive").exists()


def test_notices_wrong_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io.Owner, "is_right", lambda self: False)
    with pytest.raises(SystemExit, match="2 of 2 tensors came back with other bytes"):
        run(tmp_path)
    assert os.listdir(tmp_path / "drive") == []
