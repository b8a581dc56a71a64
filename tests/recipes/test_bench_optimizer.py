"""The benchmark of optimizer states: its sizes, its verdict on bits, and its real entry point at a toy size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate

from recipes.benchmarks import optimizer as bench_optimizer
from recipes.benchmarks.harness.optimizer_tables import broken, show, summarise
from recipes.benchmarks.harness.tables import Sample
from recipes.benchmarks.workers.optimizer import states_digest
from recipes.schema import SCHEMA

# -- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "wanted"), [("350m", 350e6), ("1b", 1e9)])
def test_an_experiment_trains_about_the_size_of_its_name(size: str, wanted: float, tmp_path: Path) -> None:
    config, _ = SCHEMA.compose([f"experiment=optimizer_{size}", f"output_dir={tmp_path}"])
    SCHEMA.check_config(config)
    model = instantiate(config.model, _convert_="all")
    with torch.device("meta"):
        model.configure_model()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert num_parameters == pytest.approx(wanted, rel=0.05)
    assert f"{num_parameters:,} parameters" in (SCHEMA.config_dir / f"experiment/optimizer_{size}.yaml").read_text()
    assert (config.offload.activations, config.offload.optimizer_states) == ("keep", "offload")
    assert config.offload._target_ == "lightning_ssd.OffloadPolicy"


def test_only_empty_directories_of_its_own_are_removed(tmp_path: Path) -> None:
    ours, filled, users, never = paths = [tmp_path / name for name in ("ours", "filled", "users", "never")]
    users.mkdir()
    with bench_optimizer.removed_again(paths):
        ours.mkdir()
        filled.mkdir()
        (filled / "file").touch()
    assert not ours.exists()
    assert (filled / "file").exists()
    assert users.exists()
    assert not never.exists()


def test_a_wrong_state_changes_the_digest() -> None:
    def saved(**changed: Any) -> dict[str, Any]:
        return {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.zeros(5)} | changed}, "param_groups": []}

    right = states_digest(saved())
    assert states_digest(saved()) == right
    wrong = torch.zeros(5)
    wrong[4] = -0.0
    changes = ({"exp_avg": wrong}, {"exp_avg": torch.zeros(5, 1)}, {"step": 3.0}, {"other": torch.zeros(5)})
    assert right not in {states_digest(saved(**change)) for change in changes}


MIB = 1 << 20


def sample(mode: str, step: int, seconds: float, **values: Any) -> Sample:
    filled: dict[str, Any] = {
        "step_s": seconds,
        "settled_s": seconds,
        "host_peak_bytes": 9 * MIB,
        "device_peak_bytes": None,
    }
    filled |= {"peak_above_base_bytes": 2 * MIB, "weights": f"weights of step {step}"}
    if mode != "torch":
        filled |= {"written_bytes": 8, "read_bytes": 8, "kept_bytes": 0, "state_bytes": 8, "subgroup_bytes": 1}
        filled |= {"resident_peak_bytes": step, "limit_s": seconds / 1.1, "turned_limit_s": seconds / 0.5}
    return Sample(mode, 0, step, step > 0, filled | values, step == 0)


def run_of(mode: str, *seconds: float, **last: Any) -> list[Sample]:
    found = [sample(mode, step, time_s) for step, time_s in enumerate((99.0, *seconds))]
    found[-1].values.update(last)
    return found


def test_ratios_are_paired_and_warm_up_is_left_out() -> None:
    """A machine that is ten times slower in one turn changes no ratio."""
    runs = [run_of("torch", 1, 10, 2), run_of("two_paths", 3, 30, 6), run_of("one_path", 4.5, 45, 9)]
    plain, two, one = summarise([found for run in runs for found in run])
    assert (plain["step_ratio"], two["step_ratio"], one["step_ratio"]) == (1, 3, 4.5)
    assert two["two_paths_gain"] == 1.5
    assert (two["num_steps"], two["num_compared"]) == (3, 4)
    assert two["limit_ratio"] == pytest.approx(1.1)
    assert two["turned_limit_ratio"] == pytest.approx(0.5)
    assert two["resident_share"] == 3 / 8
    assert plain["resident_share"] is plain["limit_ratio"] is None


@pytest.mark.parametrize(
    ("changed", "equal", "states_equal"),
    [
        ({"states": "s"}, True, True),
        ({"states": "t"}, True, False),
        ({"states": "s", "weights": "others"}, False, True),
        ({}, True, None),
    ],
)
def test_one_wrong_bit_is_reported(
    changed: dict[str, Any], equal: bool, states_equal: bool | None, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = summarise([*run_of("torch", 1, 1, states="s"), *run_of("ssd", 1, 1, **changed)])
    assert (rows[1]["equal"], rows[1]["states_equal"]) == (equal, states_equal)
    show(rows)
    assert ("DIFFERENT" in capsys.readouterr().out) == (not equal or states_equal is False)


def test_without_pytorchs_run_nothing_is_called_equal() -> None:
    (row,) = summarise(run_of("ssd", 1, 1))
    assert row["equal"] is None
    assert summarise([*run_of("torch", 1), *run_of("ssd", 1, 1)])[1]["equal"] is None


def test_what_failed_or_has_other_bits_breaks_the_benchmark() -> None:
    def row(mode: str, *, equal: bool | None = True, states_equal: bool | None = True) -> dict[str, Any]:
        return {"mode": mode, "equal": equal, "states_equal": states_equal}

    assert broken({"main": [row("torch"), row("ssd"), row("two_paths", states_equal=None)]}, {}) == []
    assert broken({"main": [row("ssd", equal=None)]}, {}) == [], "nothing was compared"
    for wrong in (row("ssd", equal=False), row("ssd", equal=None), row("ssd", states_equal=False)):
        assert broken({"odd 320": [row("torch"), wrong]}, {}) == ["odd 320: ssd has other bits than torch"]
    assert broken({}, {"main": ["ssd"]}) == ["main: ssd failed"]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("part", ["main", "odd"])
def test_a_toy_run_of_the_real_thing(
    part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its speeds mean nothing; bits hold at any size."""
    monkeypatch.setattr(bench_optimizer, "ODD_HIDDEN", (320,))
    file, spill = tmp_path / "result.json", tmp_path / "spill"
    arguments = ["--tiny", "--part", part, "--steps", "2", "--threads", "1", "--dir", str(spill), "--json", str(file)]
    code = bench_optimizer.main(arguments)
    content = json.loads(file.read_text())
    assert content["refused"] == {}
    assert code == 0
    assert list(content["parts"]) == (["main"] if part == "main" else ["odd 320"])
    for rows in content["parts"].values():
        assert {(found["equal"], found["states_equal"]) for found in rows} == {(True, True)}
        assert {found["num_compared"] for found in rows} == {4 if part == "main" else 5}
        by_mode = {found["mode"]: found for found in rows}
        assert by_mode["ssd"]["written_bytes"] > by_mode["cache=50%"]["written_bytes"]
        assert by_mode["ssd"]["settled_s"] >= by_mode["ssd"]["step_s"]
        assert by_mode["ssd"]["limit_ratio"] > 0
    assert part == "odd" or by_mode["two_paths"]["two_paths_gain"] > 0
    assert list(spill.iterdir()) == []
    out = capsys.readouterr().out
    assert str(tmp_path) not in out


@pytest.mark.exhaustive
@pytest.mark.usefixtures("forked_workers")
def test_copies_of_weights_have_the_bits_of_copies_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The profile of a CUDA card, at a toy size on the CPU."""
    arguments = ["--tiny", "--profile", "gpu", "--part", "main", "--modes", "torch,ssd", "--steps", "1"]
    assert bench_optimizer.main([*arguments, "--threads", "1", "--dir", str(tmp_path)]) == 0
    assert "| equal |" in capsys.readouterr().out
