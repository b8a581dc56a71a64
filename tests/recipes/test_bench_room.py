"""The benchmark where there is too little room: workers without memory, full drives, no card."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.benchmarks import step
from recipes.benchmarks.harness import rounds as bench_round
from recipes.benchmarks.harness.mode_names import parse_mode
from recipes.benchmarks.harness.process import Child, ChildDiedError, ChildOutOfMemoryError
from recipes.benchmarks.harness.shapes import TINY
from recipes.benchmarks.workers.step import Job


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_worker_that_dies_is_named(tmp_path: Path) -> None:
    """It cannot make its directory, says so itself, and everything is closed."""
    (tmp_path / "file").write_text("")
    job = Job("ssd", TINY, str(tmp_path / "file" / "below"), 1)
    child = Child(job, quiet=True)
    try:
        with pytest.raises(ChildDiedError, match="the process of mode ssd ended with code 1") as caught:
            child.answer()
    finally:
        child.close()
    assert (caught.value.mode, caught.value.code) == ("ssd", 1)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_worker_that_has_not_enough_memory_says_so(tmp_path: Path) -> None:
    """PyTorch's own error, of a batch that no machine has room for."""
    child = Child(Job("keep", replace(TINY, batch=1 << 50), str(tmp_path), 1), quiet=True)
    try:
        child.answer()
        with pytest.raises(ChildOutOfMemoryError, match=r"mode keep is out of memory: .*can't allocate") as caught:
            child.ask("step")
    finally:
        child.close()
    assert caught.value.why == "out of memory"


def hungry(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The rows of a benchmark whose modes ssd (at once) and recompute (later) are out of memory."""
    module = {"module": "tests.support.hungry_worker", "quiet": True}
    for place in (bench_round, step):
        monkeypatch.setattr(place, "Child", partial(Child, **module))
    args = step.parse_arguments(["--tiny", "--warmup", "1", "--steps", "2", "--rounds", "2", *arguments])
    return {row["mode"]: row for row in step.run(args, Path())["summary"]}


@pytest.mark.exhaustive
def test_who_is_out_of_memory_is_told_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = hungry(monkeypatch, capsys, "--modes", "keep,ssd,recompute,naive")
    out, err = capsys.readouterr()
    assert [row.get("failed") for row in rows.values()] == [None, "out of memory", "out of memory", None]
    assert rows["naive"]["equal"]
    assert rows["naive"]["num_steps"] == rows["keep"]["num_steps"] == 4, "both rounds, all timed steps"
    assert list(rows) == ["keep", "ssd", "recompute", "naive"]
    assert "| ssd | out of memory | | | | | | | |\n" in out
    assert "mode ssd is out of memory: CUDA out of memory. Tried to allocate 2.00 GiB.; the others go on" in err
    assert "mode recompute is out of memory: MemoryError; the others go on" in err
    assert "round 1 turn 3: naive" in err
    assert "round 2 turn 1: recompute" not in err, "it would be so again"


def test_modes_that_would_fill_the_drive_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = SimpleNamespace(free=10 << 30)
    monkeypatch.setattr(step.shutil, "disk_usage", lambda path: free)
    modes = ["keep", "ssd", "budget=40%", "recompute", "save_on_cpu", "auto@1GB/s", "naive"]
    held = {mode: parse_mode(mode).disk_bytes(100) for mode in modes}
    assert [held[mode] for mode in modes] == [0, 100, 60, 0, 0, 100, 100]
    step.check_room(modes[:5], 6 << 30, tmp_path)
    with pytest.raises(SystemExit, match=r"has 10.0 GiB free.* ssd 6.0, budget=40% 3.6, naive 6.0; name fewer --modes"):
        step.check_room([*modes[:5], "naive"], 6 << 30, tmp_path)
    step.check_room(modes, None, tmp_path)
