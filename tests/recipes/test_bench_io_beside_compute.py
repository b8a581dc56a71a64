"""The arithmetic of ``recipes.benchmarks.io_beside_compute``, and a run of a tenth of a second."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes.benchmarks import io_beside_compute
from recipes.benchmarks.io_beside_compute import Sample, main, summarise


def test_what_is_lost_is_of_the_same_round() -> None:
    samples = [
        Sample(threads=2, kind=kind, per_s=pace * speed, gib_per_s=rate, core_s=2.0)
        for pace in (10.0, 20.0)  # the machine becomes twice as fast
        for kind, speed, rate in (("alone", 1.0, 0.0), ("read", 0.9, 0.5))
    ]
    alone, read = summarise(samples)
    assert (alone["speed"], alone["lost_s_per_gib"]) == (1.0, None)
    assert read["speed"] == pytest.approx(0.9)
    assert read["lost_s_per_gib"] == pytest.approx(0.2)


def test_a_short_run_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_beside_compute, "REQUEST_BYTES", 2 << 20)
    monkeypatch.setattr(io_beside_compute, "FILE_BYTES", 8 << 20)
    drive = tmp_path / "drive"
    drive.mkdir()
    command = ["--dir", str(drive), "--rounds", "1", "--seconds", "0.2", "--json", str(tmp_path / "out.json")]
    assert main(command) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["medians"]
    assert {row["kind"] for row in rows} == {"alone", "read", "write"}
    assert all((row["gib_per_s"] > 0) is (row["kind"] != "alone") for row in rows)
    assert not list(drive.iterdir())
