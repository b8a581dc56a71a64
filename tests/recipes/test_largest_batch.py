"""The search for the largest batch: its arithmetic, the limit that holds, and a toy run of the real thing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.benchmarks import largest_batch
from recipes.benchmarks.harness.cgroups import GroupUnavailableError, control_group
from recipes.benchmarks.harness.process import ChildDiedError
from recipes.benchmarks.harness.shapes import TINY_PLANNED
from recipes.benchmarks.largest_batch import Bench, largest

GIB = 1 << 30


@given(best=st.integers(0, 5000), limit=st.integers(1, 4096))
def test_the_largest_is_found(best: int, limit: int) -> None:
    tried: list[int] = []

    def fits(number: int) -> bool:
        tried.append(number)
        return number <= best

    assert largest(fits, limit=limit) == min(best, limit)
    assert len(tried) == len(set(tried)), "a number was tried twice"
    assert len(tried) <= 2 * max(best, 1).bit_length() + 1
    assert max(tried) <= max(2 * best, 1), "far too much was tried"
    assert max(tried) <= limit


class FakeChild:
    """Needs 100 MiB per sample; with a budget in force it dies of more."""

    limit_bytes: int | None = None
    modes: list[str] = []  # noqa: RUF012

    def __init__(self, job: Any, *, procs: Path | None = None, quiet: bool = False) -> None:
        self._job = job
        self.modes.append(job.mode)
        self.num_steps = 0

    def answer(self) -> dict[str, Any]:
        return {}

    def ask(self, command: str) -> dict[str, Any]:
        per_sample = (100 << 20) if self._job.mode == "keep" else (25 << 20)
        peak = self._job.shape.batch * per_sample
        if self.limit_bytes is not None and peak > self.limit_bytes:
            raise ChildDiedError(self._job.mode, -9)
        self.num_steps += 1
        return {"device_peak_bytes": None, "host_peak_bytes": peak, "step_s": 0.5 * self._job.shape.batch}

    def close(self) -> None:
        pass


@pytest.mark.parametrize("enforcement", ["group", "measured"])
def test_either_way_of_holding_the_budget_gives_the_same(
    enforcement: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(largest_batch, "Child", FakeChild)
    monkeypatch.setattr(FakeChild, "limit_bytes", GIB if enforcement == "group" else None)

    @contextmanager
    def no_group(budget_bytes: int | None) -> Iterator[Path | None]:
        assert budget_bytes == (GIB if enforcement == "group" else None)
        yield None

    monkeypatch.setattr(largest_batch, "_memory_group", no_group)
    bench = Bench(TINY_PLANNED, tmp_path, budget_bytes=GIB, enforcement=enforcement, threads=1)
    assert [bench.search(mode) for mode in ("keep", "ssd")] == [10, 40]
    rows = largest_batch.summarise(bench, ["keep", "ssd"])
    assert [row["batch_ratio"] for row in rows] == [1.0, 4.0]
    assert [row["samples_per_s"] for row in rows] == [2.0, 2.0]
    whys = {trial.why for trial in bench.trials if not trial.fits}
    assert whys == ({"killed"} if enforcement == "group" else {"above the budget"})
    largest_batch.show(rows)
    assert "| ssd | 40 | 4.00 | 0.98 |" in capsys.readouterr().out


def test_a_mode_that_fits_nothing_has_no_ratio(tmp_path: Path) -> None:
    bench = Bench(TINY_PLANNED, tmp_path, budget_bytes=1, enforcement="measured", threads=1)
    (row,) = largest_batch.summarise(bench, ["keep"])
    assert (row["largest_batch"], row["batch_ratio"], row["peak_bytes"]) == (0, None, None)


def test_a_memory_group_kills_who_takes_more() -> None:
    """And lets live who takes less, in the same group."""
    limit = 64 << 20
    try:
        with control_group(
            "memory",
            v1={"memory.limit_in_bytes": str(limit)},
            v2={"memory.max": str(limit), "memory.swap.max": "0"},
        ) as group:
            codes = []
            for nbytes in (16 << 20, 256 << 20):
                command = [sys.executable, "-c", f"bytearray({nbytes})"]
                enter = ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group.procs), *command]
                codes.append(subprocess.run(enter, check=False).returncode)
            directory = group.directory
    except GroupUnavailableError as error:
        pytest.skip(f"no memory control group here: {error}")
    assert codes[0] == 0
    assert codes[1] == -9
    assert not directory.exists()


def test_without_a_group_a_budget_that_might_kill_the_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def refused(budget_bytes: int | None) -> Iterator[Path | None]:
        raise GroupUnavailableError("control groups need root here")
        yield None

    monkeypatch.setattr(largest_batch, "_memory_group", refused)
    monkeypatch.setattr(largest_batch, "host_available_bytes", lambda: 10 * GIB)
    assert largest_batch.choose_enforcement("cpu", 4 * GIB) == ("measured", "control groups need root here")
    with pytest.raises(SystemExit, match=r"need root here.*10\.0 GiB are free; allowed: at most 5\.0 GiB"):
        largest_batch.choose_enforcement("cpu", 6 * GIB)
    assert largest_batch.choose_enforcement("cuda", 60 * GIB) == ("allocator", "")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--budget", "much"], "'much' is not a size"),
        (["--modes", "keep,nothing"], "nothing; allowed: keep"),
        (["--modes", "keep,budget=40%"], "modes without a budget of their own"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        largest_batch.parse_arguments(arguments)
    assert text in capsys.readouterr().err


@pytest.mark.slow
def test_a_toy_run_of_the_real_thing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keep meets its limit, offloading does not within the largest batch that is tried.

    Each trial imports for longer than it trains, so there are as few as can show that, and many layers.
    """
    file = tmp_path / "result.json"
    arguments = ["--tiny", "--sequence", "1024", "--layers", "20", "--budget", "920MiB", "--max-batch", "2"]
    paths = ["--dir", str(tmp_path / "spill"), "--json", str(file)]
    assert largest_batch.main([*arguments, "--modes", "keep,ssd", "--threads", "1", *paths]) == 0
    content = json.loads(file.read_text())
    batches = {row["mode"]: row["largest_batch"] for row in content["summary"]}
    assert batches == {"keep": 1, "ssd": 2}
    assert content["environment"]["enforced_by"].startswith(("a memory control group", "nothing holds the budget"))
    assert any(not trial["fits"] for trial in content["trials"])
    assert str(tmp_path) not in json.dumps(content["environment"])
    assert "| ssd | 2 |" in capsys.readouterr().out
    assert list((tmp_path / "spill").iterdir()) == []
