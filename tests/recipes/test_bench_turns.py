"""The benchmark of turns on a shared drive, in tiny form."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from recipes.benchmarks import drive_turns
from tests.support.patience import PATIENCE_S

FORKING = """
import pickle, sys
from torch import multiprocessing
from recipes.benchmarks import drive_turns

def fork(*work, **options):
    pickle.dumps(work)  # as for a spawned one
    return multiprocessing.start_processes(*work, **options, start_method="fork")

multiprocessing.spawn = fork
sys.exit(drive_turns.main(sys.argv[1:]))
"""
"""Each spawned process would import for longer than it works."""


def test_two_processes_on_one_drive(spill_dir: Path, forks: list[str]) -> None:
    json_file, spill = spill_dir / "turns.json", spill_dir / "spill"
    tiny = ["--parameters", "4", "--steps", "2", "--warmup", "1"]
    command = [*forks, "-c", FORKING, *tiny, "--dir", str(spill), "--json", str(json_file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    content = json.loads(json_file.read_text())
    assert [set(turn) for turn in content["seconds"]] == [set(drive_turns.MODES)] * 2
    assert content["equal"]
    assert content["moved_bytes"] > 8 << 20, "states of 32 MiB, of which 16 stay in memory"
    assert content["trial"] in drive_turns.MODES
    assert "| in turns |" in done.stdout
    assert "weights of both: equal" in done.stdout
    assert str(spill_dir) not in done.stdout.partition("\n\n")[0], "no paths in what is published"
    assert list(spill.iterdir()) == []


@pytest.mark.parametrize("option", ["--processes=1", "--parameters=0", "--steps=0", "--warmup=0"])
def test_what_cannot_be_measured_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        drive_turns.main([option])
    assert "or more" in capsys.readouterr().err
