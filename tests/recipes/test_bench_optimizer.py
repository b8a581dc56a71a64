"""The benchmark of optimizer states: its arguments, sizes and jobs, and its real entry point at a toy size."""

from __future__ import annotations

import argparse
import json
import mmap
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra.utils import instantiate

from lightning_ssd.common.tensors import Region
from lightning_ssd.storage.posix import PosixBackend
from recipes.benchmarks import optimizer as bench_optimizer
from recipes.benchmarks.harness.drive import DriveMeter, DriveRates
from recipes.benchmarks.optimizer import limits_of, make_jobs, odd_sizes, parse_arguments, run_part, split
from recipes.benchmarks.workers import optimizer as optimizer_worker
from recipes.benchmarks.workers.optimizer import AnonymousPeak, PathBuckets, states_digest
from recipes.benchmarks.workers.optimizer_job import (
    MODES,
    OPTIMIZERS,
    SIZES,
    Needs,
    OptimizerJob,
    Sizes,
    cache_share,
    parse_modes,
)
from recipes.schema import SCHEMA
from tests.support.patience import PATIENCE_S

MIB = 1 << 20
TINY = SIZES["tiny"]
RATES = DriveRates(write_per_s=100.0, read_per_s=200.0, write_alone_per_s=400.0, read_alone_per_s=500.0)


def job(mode: str, **values: Any) -> OptimizerJob:
    filled: dict[str, Any] = {"sizes": TINY, "optimizer": "adamw", "directories": ("one",), "threads": 1}
    return OptimizerJob(mode=mode, **filled | values)


# -- arguments -------------------------------------------------------------------------------------------------------


def test_arguments_choose_sizes() -> None:
    args = parse_arguments(["--dir", "a", "--dir", "b", "--optimizer", "nadam"])
    assert bench_optimizer.choose_sizes(args) == SIZES["350m"]
    assert args.dir == [Path("a"), Path("b")]
    assert (args.modes, args.part, args.limit_bytes) == (list(MODES), "all", 1 << 30)
    args = parse_arguments(["--size", "1b", "--hidden", "960", "--layers", "3", "--vocabulary", "11"])
    assert bench_optimizer.choose_sizes(args) == Sizes(hidden=960, layers=3, vocabulary=11)


def test_the_profile_of_a_card_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    args = parse_arguments(["--profile", "gpu"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        bench_optimizer.choose_sizes(args)
    tiny = bench_optimizer.choose_sizes(parse_arguments(["--profile", "gpu", "--tiny"]))
    assert (tiny.hidden, tiny.dtype, tiny.device) == (TINY.hidden, "bfloat16", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    sizes = bench_optimizer.choose_sizes(args)
    assert (sizes.dtype, sizes.device) == ("bfloat16", "cuda")
    assert 0.95e9 <= sizes.num_parameters <= 3.1e9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modes", "torch,sdd"], "sdd; allowed: torch, ssd, cache=50%"),
        (["--modes", "cache=0%"], "cache=0%; allowed"),
        (["--modes", "cache=101%"], "cache=101%; allowed"),
        (["--modes", "ssd,ssd"], "a mode twice"),
        (["--modes", ","], "nothing; allowed"),
        (["--optimizer", "lion"], "invalid choice: 'lion'"),
        (["--path-rate", "fast"], "throttle"),
        (["--warmup", "0"], "--steps and --warmup begin at 1"),
    ],
)
def test_wrong_arguments_are_told(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(arguments)
    assert message in capsys.readouterr().err


def test_modes_name_their_share() -> None:
    assert parse_modes("torch, cache=25%") == ["torch", "cache=25%"]
    assert [cache_share(mode) for mode in ("torch", "ssd", "cache=25%", "cache=100%")] == [0, 0, 0.25, 1]


# -- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "wanted"), [("350m", 350e6), ("1b", 1e9), ("3b", 3e9)])
def test_a_size_has_about_its_name(size: str, wanted: float) -> None:
    assert SIZES[size].num_parameters == pytest.approx(wanted, rel=0.05)


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


def test_the_model_has_the_counted_parameters() -> None:
    sizes = Sizes(hidden=6, layers=2, vocabulary=7)
    model = sizes.model()
    assert [tuple(parameter.shape) for parameter in model.parameters()] == list(sizes.shapes())
    assert sizes.num_parameters == sum(p.numel() for p in model.parameters()) == 7 * 6 + 2 * (12 * 36 + 13 * 6) + 12
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), sizes.model().parameters(), strict=True))
    assert {odd_sizes(TINY, hidden).hidden for hidden in bench_optimizer.ODD_HIDDEN} == {320, 960}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bytes_of_states_are_those_of_the_optimizer(name: str) -> None:
    kind = OPTIMIZERS[name]
    parameter = torch.nn.Parameter(torch.zeros(64))
    optimizer = kind.cls([parameter], **kind.settings)
    parameter.grad = torch.ones(64)
    optimizer.step()
    states = [v for v in optimizer.state[parameter].values() if isinstance(v, torch.Tensor) and v.numel() == 64]
    assert len(states) == kind.num_states


# -- jobs ------------------------------------------------------------------------------------------------------------


def test_a_job_survives_the_pipe() -> None:
    sent = job("cache=25%", directories=("a", "b"), path_rates=(3.0, 1.0))
    assert OptimizerJob.from_json(sent.to_json()) == sent
    assert sent.cache_bytes == round(0.25 * sent.state_bytes) == round(0.25 * 8 * TINY.num_parameters)


def test_one_path_is_the_faster_of_two() -> None:
    args = argparse.Namespace(optimizer="sgd", threads=3, master_weights=False)
    jobs = {made.mode: made for made in make_jobs(MODES, TINY, [Path("d")], 300.0, args)}
    assert jobs["two_paths"].directories == ("d/fast", "d/slow")
    assert jobs["two_paths"].path_rates == (300.0, 100.0)
    assert jobs["one_path"].directories == ("d/fast",)
    assert jobs["one_path"].path_rates == (300.0,)
    assert (jobs["ssd"].directories, jobs["ssd"].path_rates) == (("d",), ())
    jobs = {made.mode: made for made in make_jobs(MODES, TINY, [Path("d"), Path("e")], 300.0, args)}
    assert jobs["two_paths"].directories == ("d", "e")
    assert jobs["two_paths"].path_rates == jobs["one_path"].path_rates == ()


def test_processes_that_do_not_fit_run_in_groups() -> None:
    jobs = [job(mode, sizes=SIZES["1b"]) for mode in MODES]
    plain, ssd, cached, *_ = (made.needs for made in jobs)
    assert plain.host > cached.host > ssd.host > 8 * SIZES["1b"].num_parameters
    everything = Needs(*(sum(made.needs[at] for made in jobs) for at in range(3)))
    assert [[made.mode for made in group] for group in split(jobs, everything)] == [list(MODES)]
    for free in (everything._replace(host=everything.host - 1), everything._replace(disk=everything.disk - 1)):
        assert len(split(jobs, free)) == 2
    alone = split(jobs, Needs(0, 0, 0))
    assert [[made.mode for made in group] for group in alone] == [*([mode] for mode in MODES[:3]), list(MODES[3:])]


def test_the_limit_is_that_of_the_paths() -> None:
    moved = {"written_bytes": 1000, "read_bytes": 1000}
    limits = limits_of(job("ssd"), moved, RATES)
    assert limits["limit_s"] == 10
    assert limits["turned_limit_s"] == 4.5
    throttled = limits_of(job("two_paths", directories=("a", "b"), path_rates=(75.0, 25.0)), moved, RATES)
    assert throttled["limit_s"] == 10
    assert throttled["turned_limit_s"] == 20
    assert limits_of(job("two_paths", directories=("a", "b")), moved, RATES) == {}
    assert limits_of(job("torch"), {}, RATES) == {}
    assert limits_of(job("ssd"), moved, None) == {}


def test_the_drive_is_measured(tmp_path: Path) -> None:
    meter = DriveMeter(tmp_path, 8 * MIB)
    try:
        assert min(asdict(meter.measure()).values()) > 0
    finally:
        meter.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("forked_workers")
def test_a_mode_that_fails_is_left_out(tmp_path: Path) -> None:
    """A file where its directory should be."""
    (tmp_path / "file").touch()
    args = parse_arguments(["--tiny"])
    broken = job("ssd", directories=(str(tmp_path / "file"),))
    meter: Any = SimpleNamespace()
    assert run_part([broken], meter, tmp_path, args) == ([], ["ssd"])


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


# -- in the worker ---------------------------------------------------------------------------------------------------


def test_a_peak_that_is_over_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that others free meanwhile would count against it, so that the numbers are given."""
    levels = [100]
    monkeypatch.setattr(optimizer_worker, "anonymous_bytes", lambda: levels[0])
    with AnonymousPeak() as peak:
        levels[0] = 170
        until_s = time.monotonic() + PATIENCE_S
        while peak.extra_bytes < 70 and time.monotonic() < until_s:
            time.sleep(0.001)
        levels[0] = 90
    assert peak.extra_bytes == 70


def test_anonymous_memory_is_read() -> None:
    before = optimizer_worker.anonymous_bytes()
    # Not malloc's: a hole of its heap may be resident already.
    with mmap.mmap(-1, 256 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        block.write(b"1" * (256 * MIB))
        assert optimizer_worker.anonymous_bytes() - before > 128 * MIB


def test_a_wrong_state_changes_the_digest() -> None:
    def saved(**changed: Any) -> dict[str, Any]:
        return {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.zeros(5)} | changed}, "param_groups": []}

    right = states_digest(saved())
    assert states_digest(saved()) == right
    wrong = torch.zeros(5)
    wrong[4] = -0.0
    changes = ({"exp_avg": wrong}, {"exp_avg": torch.zeros(5, 1)}, {"step": 3.0}, {"other": torch.zeros(5)})
    assert right not in {states_digest(saved(**change)) for change in changes}


def test_each_path_has_its_own_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []

    class Recorder:
        def __init__(self, inner: Any, rate: float) -> None:
            self._rate = rate

        def write(self, *_: Any) -> None:
            used.append(("write", self._rate))

        def read(self, *_: Any) -> None:
            used.append(("read", self._rate))

    monkeypatch.setattr(optimizer_worker, "BucketBackend", Recorder)
    folders = [tmp_path / "fast", tmp_path / "slow"]
    for folder in folders:
        (folder / "below").mkdir(parents=True)
    inner = PosixBackend(folders)
    backend = PathBuckets(inner, dict(zip(folders, (300.0, 100.0), strict=True)))
    arenas = [backend.open_arena(folder) for folder in (folders[1] / "below", folders[0])]
    try:
        backend.write(arenas[0], Region(0, 4096), 0)
        backend.read(arenas[1], Region(0, 4096), 0)
    finally:
        for arena in arenas:
            arena.close()
        inner.close()
    assert used == [("write", 100.0), ("read", 300.0)]


# -- the real thing --------------------------------------------------------------------------------------------------


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


@pytest.mark.exhaustive
@pytest.mark.usefixtures("forked_workers")
def test_plain_pytorch_runs_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--tiny", "--part", "main", "--modes", "torch", "--steps", "1", "--warmup", "1", "--threads", "1"]
    assert bench_optimizer.main([*arguments, "--dir", str(tmp_path)]) == 0
    assert "| torch |" in capsys.readouterr().out
