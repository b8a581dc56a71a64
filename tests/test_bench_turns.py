"""The benchmark of turns on a shared drive, in tiny form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes import bench_turns


def test_two_processes_on_one_drive(spill_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    json_file, spill = spill_dir / "turns.json", spill_dir / "spill"
    tiny = ["--parameters", "8", "--steps", "2", "--warmup", "1"]
    assert bench_turns.main([*tiny, "--dir", str(spill), "--json", str(json_file)]) == 0
    content = json.loads(json_file.read_text())
    assert [set(turn) for turn in content["seconds"]] == [set(bench_turns.MODES)] * 2
    assert content["equal"]
    assert content["moved_bytes"] > 8 << 20, "states of 64 MiB, of which 16 stay in memory"
    assert content["trial"] in bench_turns.MODES
    printed = capfd.readouterr().out
    assert "| in turns |" in printed
    assert "weights of both: equal" in printed
    assert str(spill_dir) not in printed.partition("\n\n")[0], "no paths in what is published"
    assert list(spill.iterdir()) == []


@pytest.mark.parametrize("option", ["--processes=1", "--parameters=0", "--steps=0", "--warmup=0"])
def test_what_cannot_be_measured_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_turns.main([option])
    assert "or more" in capsys.readouterr().err
