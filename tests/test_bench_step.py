"""The step benchmark: its arithmetic, and its real entry point at a toy size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes import bench_hooks, bench_step
from recipes.bench_modes import Account
from recipes.bench_table import Sample, show, summarise
from tests.parity.models import Perceptrons, floats


def sample(mode: str, step: int, seconds: float, **values: Any) -> Sample:
    filled = {
        **dict.fromkeys(("step_s", "forward_s", "backward_s", "optimizer_s", "user_s", "system_s"), seconds),
        "page_faults": 1,
        "host_peak_bytes": 3 << 20,
        "device_peak_bytes": None,
        **{name: f"{name} of step {step}" for name in ("loss", "gradients", "weights")},
        "rest": {"host_bytes": 1 << 20, "device_bytes": None},
    }
    return Sample(mode, 0, step, step > 0, filled | values)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert bench_step.main(arguments) == 0
    return capsys.readouterr().out


def test_ratios_are_paired_and_warm_up_is_left_out() -> None:
    """A machine that is ten times slower in one turn changes no ratio."""
    keep = [sample("keep", 0, 99.0), sample("keep", 1, 1.0), sample("keep", 2, 10.0), sample("keep", 3, 2.0)]
    ours = [sample("ssd", 0, 1.0), sample("ssd", 1, 1.1), sample("ssd", 2, 11.0), sample("ssd", 3, 2.2)]
    first, second = summarise([*keep, *ours])
    assert first["step_ratio"] == 1
    assert second["step_ratio"] == pytest.approx(1.1)
    assert second["num_steps"] == 3
    assert second["peak_above_rest_bytes"] == 2 << 20
    assert second["equal"] is True


def test_one_wrong_gradient_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    keep = [sample("keep", step, 1.0) for step in range(3)]
    ours = [sample("ssd", step, 1.0) for step in range(2)] + [sample("ssd", 2, 1.0, gradients="others")]
    rows = summarise([*keep, *ours])
    assert [row["equal"] for row in rows] == [True, False]
    show(rows)
    assert "DIFFERENT" in capsys.readouterr().out


def test_what_autograd_saves_is_accounted_once_per_storage() -> None:
    x = torch.rand(100).requires_grad_()
    model = Perceptrons(num_blocks=1)
    account = Account(model)
    with account.hooks():
        y = x * 1
        loss = (y.sin() + y.cos() + y[:3].exp().sum()).sum()
    assert account.held_bytes == 100 * 4 + 3 * 4
    del loss, y
    assert account.held_bytes == 0
    with account.hooks():
        loss = model(floats(0, 5, 40)).square().mean()
    assert 0 < account.held_bytes < 5 * 40 * 4 * 12
    loss.backward()
    assert account.held_bytes == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["--modes", "keep,ssdd"], "--modes has ssdd; allowed: keep, ssd"), (["--modes", ""], "--modes has nothing")],
)
def test_wrong_modes_name_the_right_ones(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_step.main(arguments)
    assert text in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_profile_of_a_card_says_that_there_is_none() -> None:
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        bench_step.main(["--profile", "h200"])


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["cpu", "h200"])
def test_a_toy_run_of_the_real_thing(profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    modes = "keep,ssd" if profile == "h200" else "keep,ssd,recompute+mmap,naive"
    arguments = ["--tiny", "--profile", profile, "--modes", modes, "--rounds", "1", "--steps", "2", "--width", "128"]
    file = tmp_path / "result.json"
    out = run(capsys, *arguments, "--sequence", "128", "--dir", str(tmp_path / "spill"), "--json", str(file))
    content = json.loads(file.read_text())
    rows = {row["mode"]: row for row in content["summary"]}
    assert list(rows) == modes.split(",")
    assert all(row["equal"] for row in rows.values())
    assert rows["keep"]["resident_ratio"] == 1
    assert rows["ssd"]["failures"] == 0
    assert len(content["samples"]) == len(rows) * 4
    assert content["environment"]["shape"]["autocast"] == (profile == "h200")
    assert str(tmp_path) not in json.dumps(content["environment"])
    assert "| ssd |" in out
    assert list((tmp_path / "spill").iterdir()) == []


def test_cost_of_hooks(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers themselves depend on what else the machine does; the target is judged in the result file."""
    monkeypatch.setattr(bench_hooks, "ROUNDS", 5)
    monkeypatch.setattr(bench_hooks, "CHAIN", 100)
    threads = torch.get_num_threads()
    out = run(capsys, "--hooks", "--dir", str(tmp_path), "--json", str(tmp_path / "hooks.json"))
    torch.set_num_threads(threads)
    rows = json.loads((tmp_path / "hooks.json").read_text())["summary"]
    assert [row["saved tensor"] for row in rows] == ["small result of an operation", "parameter", "view of a parameter"]
    assert all(0 < row["ours_us"] < 100 for row in rows)
    assert "identity hooks" in out
