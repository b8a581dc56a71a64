"""The picture of memory over a step, at a toy size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes.benchmarks import memory_over_step


@pytest.mark.exhaustive
def test_a_toy_run_draws_both_modes(
    spill_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is in the extra 'recipes'")
    monkeypatch.setattr(memory_over_step, "_EVERY_S", 0.0001)
    told = [memory_over_step.train(mode, spill_dir, tiny=True) for mode in ("keep", "offload")]
    assert told[0]["loss"] == told[1]["loss"]
    assert all(found["samples"] and found["marks"] == sorted(found["marks"]) for found in told)
    output = spill_dir / "pictures" / "memory.png"
    assert memory_over_step.main(["--tiny", "--dir", str(spill_dir), "--output", str(output)]) == 0
    assert output.read_bytes().startswith(b"\x89PNG")
    content = json.loads(output.with_suffix(".json").read_text())
    assert set(content["modes"]) == {"keep", "offload"}
    assert {"command", "date", "commit"} <= set(content["environment"])
    assert capsys.readouterr().out.count("MiB above rest") == 2
