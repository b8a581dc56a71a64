"""The comparison with DeepSpeed: what of it runs without DeepSpeed, and what it says of wrong bits."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from recipes.benchmarks import deepspeed


def row(mode: str, loss: float, weights: str | None) -> dict[str, Any]:
    seconds = dict.fromkeys(("forward_s", "backward_s", "update_s", "settled_s", "step_s"), 2.0)
    return {"mode": mode, **seconds, "peak_bytes": 1 << 30, "losses": [loss], "weights": [weights]}


SMALL_SUBGROUPS = """
from lightning_ssd.planning import update_memory
from lightning_ssd.optimizer.step import subgroups
update_memory._MIN_SUBGROUP_BYTES, subgroups.GRANULE = 64 << 10, 1024
"""
"""Or all states of a toy would stay in memory, and nothing could come back wrong."""
FLIPPED_BITS = """
from lightning_ssd.storage.posix import PosixBackend
read = PosixBackend.read
def flipped(self, arena, region, offset):
    read(self, arena, region, offset)
    region.view()[0] ^= 0x40
PosixBackend.read = flipped
"""


@pytest.mark.exhaustive
def test_ours_and_torch_at_a_toy_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], forked_workers: list[str]
) -> None:
    forked_workers.append(SMALL_SUBGROUPS)
    report = tmp_path / "report.json"
    arguments = [
        "--tiny",
        "--modes",
        "torch,ours,ours_cached",
        "--steps",
        "1",
        "--dir",
        str(tmp_path),
        "--json",
        str(report),
    ]
    assert deepspeed.main(arguments) == 0
    assert capsys.readouterr().out.count("weights equal to torch's, bit for bit") == 2
    (table,) = json.loads(report.read_text())["tables"]
    assert [found["mode"] for found in table["rows"]] == ["torch", "ours", "ours_cached"]
    assert len(table["rows"][0]["losses"]) == 2, "the warm-up is compared too"
    assert str(tmp_path) not in report.read_text()


@pytest.mark.exhaustive
def test_a_toy_whose_states_come_back_with_other_bits_is_not_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], forked_workers: list[str]
) -> None:
    forked_workers += [SMALL_SUBGROUPS, FLIPPED_BITS]
    arguments = ["--tiny", "--modes", "torch,ours,ours_cached", "--steps", "1", "--dir", str(tmp_path)]
    assert deepspeed.main(arguments) == 1
    assert capsys.readouterr().out.count("weights NOT EQUAL to torch's, bit for bit") == 2


def test_wrong_bits_are_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row("torch", 1.0, "a"), row("ours", 1.0, "b"), row("deepspeed", 1.25, None)]
    monkeypatch.setattr(deepspeed, "measure", lambda *_: rows)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert deepspeed.main(["--tiny"]) == 1
    out = capsys.readouterr().out
    assert "NOT EQUAL" in out
    assert "1.00 times as fast as DeepSpeed's" in out
    assert "largest difference of a loss of DeepSpeed's: 2.50e-01" in out
