"""The step benchmark: its arithmetic, and its real entry point at a toy size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ssd import HardwareProfile
from lightning_ssd.common.tensors import Region
from recipes.benchmarks import hooks
from recipes.benchmarks import step as bench_step
from recipes.benchmarks.harness.modes import Account
from recipes.benchmarks.harness.tables import Sample, show, summarise
from recipes.benchmarks.workers import step as worker
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


def test_a_keep_that_does_not_repeat_itself_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Then no other row's bits can be judged."""
    keep = [sample("keep", step, 1.0) for step in range(3)]
    ours = [sample("ssd", step, 1.0, gradients="others") for step in range(3)]
    equal = [sample("keep_again", step, 1.0) for step in range(3)]
    rows = summarise([*keep, *equal, *ours])
    assert [row["equal"] for row in rows] == [True, True, False]
    show(rows)
    assert "does not repeat" not in capsys.readouterr().out
    rows = summarise([*keep, *(sample("keep_again", step, 1.0, weights="others") for step in range(3)), *ours])
    assert [row["equal"] for row in rows] == [True, False, False]
    show(rows)
    assert "keep_again DIFFERS: plain PyTorch does not repeat its own bits here" in capsys.readouterr().out


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


def plan(**values: float) -> dict[str, float]:
    names = ("step_s", "stall_s", "peak_bytes", "written_bytes")
    return {f"{kind}_{name}": 0.0 for kind in ("predicted", "measured") for name in names} | {"num_plans": 1} | values


def budgeted(step: int, resident: int, *, warmup: bool = False, **values: Any) -> Sample:
    filled = sample("budget=100", step, 1.0, resident_peak_bytes=resident, budget_bytes=100, **values)
    return Sample(filled.mode, 0, step, not warmup, filled.values, warmup)


def test_steps_over_the_budget_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the warm-up apart, since the profiled step keeps everything on purpose."""
    samples = [budgeted(0, 500, warmup=True), budgeted(1, 100), budgeted(2, 101), budgeted(3, 99)]
    (row,) = summarise(samples)
    assert (row["num_over_budget"], row["num_checked_steps"], row["num_over_budget_warmup"]) == (1, 3, 1)
    assert row["resident_bytes"] == 101
    show([row])
    assert "| 1 of 3 |" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("profile", ["cpu", pytest.param("gpu", marks=pytest.mark.exhaustive)])
def test_a_toy_run_of_the_real_thing(profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    modes = "keep,keep_again,ssd" if profile == "gpu" else "keep,ssd,recompute,naive"
    arguments = ["--tiny", "--profile", profile, "--modes", modes, "--rounds", "1", "--steps", "2"]
    # As large as what is moved at all.
    sizes = ["--width", "128", "--sequence", "128", "--batch", "8"]
    file = tmp_path / "result.json"
    for _ in range(3):  # a drive that is busy with others may write nothing before backward wants it back
        out = run(capsys, *arguments, *sizes, "--dir", str(tmp_path / "spill"), "--json", str(file))
        content = json.loads(file.read_text())
        rows = {row["mode"]: row for row in content["summary"]}
        if rows["ssd"]["bytes_read"] > 0:
            break
    assert list(rows) == modes.split(",")
    assert all(row["equal"] for row in rows.values())
    assert rows["keep"]["resident_ratio"] == 1
    assert rows["ssd"]["failures"] == 0
    assert rows["ssd"]["bytes_read"] > 0, "wrong bits could not have come back"
    assert len(content["samples"]) == len(rows) * 4
    assert content["environment"]["shape"]["autocast"] == (profile == "gpu")
    assert str(tmp_path) not in json.dumps(content["environment"])
    assert "| ssd |" in out
    assert list((tmp_path / "spill").iterdir()) == []


@pytest.mark.exhaustive
def test_a_toy_run_under_budgets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, forked_workers: list[str]
) -> None:
    """All modes that plan or recompute, one of them on a throttled drive: bits, budgets, predictions."""
    modes = "keep,auto,budget=60%@200MB/s,recompute_offload"
    sizes = ["--layers", "2", "--width", "128", "--sequence", "128", "--batch", "16"]
    file = tmp_path / "result.json"
    arguments = ["--tiny", *sizes, "--modes", modes, "--rounds", "1", "--steps", "3", "--threads", "1"]
    run(capsys, *arguments, "--dir", str(tmp_path / "spill"), "--json", str(file))
    rows = {row["mode"]: row for row in json.loads(file.read_text())["summary"]}
    assert list(rows) == modes.split(",")
    assert all(row["equal"] for row in rows.values())
    held = rows["keep"]["resident_bytes"]
    budget = rows["budget=60%@200MB/s"]
    assert budget["budget_bytes"] == pytest.approx(0.6 * held, rel=1e-6)
    assert budget["num_over_budget"] == 0
    assert budget["num_checked_steps"] == budget["num_planned_steps"] == 3
    assert budget["plan"]["predicted_peak_bytes"] <= budget["budget_bytes"]
    assert budget["resident_bytes"] <= budget["budget_bytes"]
    assert rows["auto"]["plan"]["num_plans"] >= 1
    assert rows["recompute_offload"]["resident_bytes"] < held
    assert list((tmp_path / "spill").iterdir()) == []


def test_a_moved_tensor_that_comes_back_with_other_bytes_is_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lying(hooks.InstantBackend):
        def read(self, arena: Any, region: Region, offset: int) -> None:
            super().read(arena, region, offset)
            region.view()[0] ^= 0x40

    monkeypatch.setattr(hooks, "CHAIN", 20)
    monkeypatch.setattr(hooks, "InstantBackend", Lying)
    hardware = HardwareProfile(paths=[tmp_path], allow_unsuitable_paths=True)
    with pytest.raises(RuntimeError, match="other gradients than plain PyTorch"):
        hooks.moved_us(hardware, rounds=3)


def test_checksums_tell_bits_and_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a card makes of its tensors, in place of hashes."""
    monkeypatch.setattr(worker, "_SUMMED_WORDS", 1000)
    tensor = torch.randn(5000)
    expected = worker.checksums(tensor)
    assert torch.equal(worker.checksums(tensor.clone()), expected)
    for place in (0, 999, 1000, 4999):
        other = tensor.clone()
        other[place] = other[place].nextafter(torch.tensor(9.0))
        assert not torch.equal(worker.checksums(other), expected)
    swapped = tensor[[1, 0, *range(2, 5000)]]
    assert not torch.equal(worker.checksums(swapped), expected)
    assert not torch.equal(worker.checksums(tensor.roll(1000)), expected)
    assert worker.checksums(torch.zeros(3, dtype=torch.bfloat16)).tolist() == [0]
