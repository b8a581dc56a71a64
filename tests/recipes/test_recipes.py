"""Meters of the recipes, and every recipe's real entry point in tiny form."""

import dataclasses
import json
import os
import re
from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch

from recipes import demo, fabric_loop, plain_loop
from recipes.meter import StepMeter
from recipes.runner import run
from recipes.schema import SCHEMA, ConfigMistake
from recipes.summary import RunSummary
from tests.support import processes
from tests.support.wandb_runs import inspected

ROOT = SCHEMA.config_dir.parent
MIB = 1 << 20
TINY = ["experiment=smoke", "trainer.max_steps=2"]
Train = Callable[..., RunSummary]


# -- meter and summary -----------------------------------------------------------------------------------------------


def test_the_meter_finds_the_peak_of_later_steps():
    meter = StepMeter(num_warmup=1)
    for nbytes in (256 * MIB, 32 * MIB, 96 * MIB):
        meter.start_step()
        block = torch.ones(nbytes, dtype=torch.uint8)
        del block
        meter.end_step()
    assert len(meter.step_s) == 3
    assert meter.median_step_s == sum(meter.step_s[1:]) / 2
    assert 90 * MIB < meter.peak_above_rest_bytes < 160 * MIB


def summary(**changes):
    plain = RunSummary(
        model="gpt",
        offload="ssd",
        losses=[3.0, 2.5],
        step_s=1.5,
        peak_above_rest_bytes=100 * MIB,
        weights_digest="0123456789abcdef",
        counted=True,
        settled_peak_bytes=20 * MIB,
        saved_peak_bytes=80 * MIB,
        written_bytes_per_step=70 * MIB,
        read_bytes_per_step=60 * MIB,
        stall_s_per_step=0.25,
        backend="posix O_DIRECT",
    )
    return dataclasses.replace(plain, **changes)


@pytest.mark.parametrize("mode", ["auto", "ssd"])
@pytest.mark.parametrize("changes", [{"weights_digest": "other"}, {"losses": [3.0, 2.4]}])
def test_the_demo_shouts_when_anything_differs(mode, changes):
    runs = {name: summary(offload=name, typical_peak_above_rest_bytes=100 * MIB) for name in ("none", "auto", "ssd")}
    assert "bit for bit" in demo.verdict(runs)
    assert "DIFFER" in demo.verdict({**runs, mode: summary(offload=mode, **changes)})


# -- entry points --------------------------------------------------------------------------------------------------


@pytest.fixture
def train(spill_dir):
    """Train as a job of ``recipes.train`` does, in this process."""

    def train_once(*overrides, name="run"):
        words = [*TINY, *overrides, f"output_dir={spill_dir / name}"]
        config, choices = SCHEMA.compose(words)
        return run(config, model=choices["model"], offload=choices["offload"])

    return train_once


@pytest.mark.parametrize("model", ["gpt", "bert", "t5", "llama"])
def test_training_is_exact_in_every_mode(model, train, spill_dir):
    plain = train(f"model={model}", "offload=none", "logger=none")
    assert len(plain.losses) == 2
    assert plain.step_s > 0
    modes = ["ssd", "keep", "auto"] if model == "gpt" else ["ssd"]
    for mode in modes:
        other = train(f"model={model}", f"offload={mode}", name=mode)
        assert other.losses == plain.losses
        assert other.weights_digest == plain.weights_digest
        assert other.counted
        assert other.saved_peak_bytes > 0
        if mode != "auto":  # which moves as much as this machine has time for
            assert (other.written_bytes_per_step > 0) == (mode == "ssd")
    rows = (spill_dir / "ssd" / "csv" / "metrics.csv").read_text().splitlines()
    assert "train/loss" in rows[0]
    assert "memory/activations_resident_peak_gib" in rows[0]


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["model=bert_base", "data.vocab_size=40000"], "data.vocab_size=40000 is more .* up to 30522"),
        (["model=gpt2_small", "data.sequence_length=2048"], "data.sequence_length=2048 is more .* up to 1024"),
        (["model=llama_7b", "data.sequence_length=8192"], "data.sequence_length=8192 is more .* up to 4096"),
    ],
)
def test_data_that_the_model_cannot_take_is_refused(overrides, match, train):
    with pytest.raises(ConfigMistake, match=match):
        train(*overrides)


def test_a_wandb_run_has_a_name_and_the_whole_configuration(train, spill_dir):
    train("offload=ssd", "logger=wandb", "logger.wandb.offline=true", "logger.wandb.group=mine", "seed=5")
    records = inspected(spill_dir / "run")
    (begin,) = [record["run"] for record in records if "run" in record and "display_name" in record["run"]][:1]
    assert begin["display_name"] == "gpt-ssd-seed5"
    assert begin["run_group"] == "mine"
    assert begin["job_type"] == "ssd"
    settings = {key: value for record in records for key, value in record.get("config", {}).get("update", {}).items()}
    assert settings["conf"]["offload"]["activations"] == "offload"
    assert settings["conf"]["data"]["sequence_length"] == 64
    assert settings["lightning_ssd"]["policy"]["activations"] == "offload"


@pytest.mark.parametrize(
    ("key", "netrc", "missing"),
    [
        ("secret", None, False),
        (None, None, True),
        (None, "machine api.wandb.ai login user password secret", False),
        (None, "machine example.org login user password secret", True),
    ],
)
def test_wandb_is_offline_without_a_key(key, netrc, missing, monkeypatch, tmp_path):
    file = tmp_path / "netrc"
    if netrc is not None:
        file.write_text(netrc)
        file.chmod(0o600)
    monkeypatch.setenv("NETRC", str(file))
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", key or "")
    config, _ = SCHEMA.compose(["logger=wandb", f"output_dir={tmp_path}"])
    assert config.logger.wandb.offline is missing


@pytest.mark.parametrize("loop", [plain_loop, fabric_loop], ids=["plain_loop", "fabric_loop"])
def test_a_loop_tells_how_it_is_used(loop, capsys):
    with pytest.raises(SystemExit) as caught:
        loop.main(["model=gpt", "--help"])
    assert caught.value.code == 0
    told = capsys.readouterr().out
    assert f"python -m {loop.__name__} model=gpt offload=ssd" in told
    assert "  offload: auto, budget, everything, fsdp, keep, none, recompute" in told
    for word in ("--fast", "-m", "model"):
        with pytest.raises(SystemExit, match=rf"^{word} is no override; allowed: GROUP=OPTION, KEY=VALUE"):
            loop.main([word])


def run_module(name, *arguments, cwd, begin):
    return processes.run(*begin, "-m", name, *arguments, cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.mark.slow
def test_a_sweep_from_the_command_line(spill_dir, forks):
    sweep = ["-m", "offload=keep,ssd", "model=gpt,t5", *TINY, "logger=none"]
    done = run_module("recipes.train", *sweep, "hydra.sweep.dir=swept", cwd=spill_dir, begin=forks)
    summaries = [RunSummary.read(path) for path in spill_dir.glob("swept/*/summary.json")]
    by_name = {(summary.model, summary.offload): summary for summary in summaries}
    assert len(by_name) == 4
    for model in ("gpt", "t5"):
        assert by_name[model, "keep"].losses == by_name[model, "ssd"].losses
        assert by_name[model, "keep"].weights_digest == by_name[model, "ssd"].weights_digest
    assert sum(line.startswith("model=") for line in done.stdout.splitlines()) == 4


@pytest.mark.exhaustive
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo")
def test_equal_seeds_give_equal_losses_with_and_without_shards(train, spill_dir, forks):
    """Beyond the first epoch too: Lightning would draw another order of the data where there is a process group."""
    more = ["data.num_batches=2", "data.batch_size=2", "trainer.max_steps=5", "logger=none", "callbacks=none"]
    plain = train("offload=none", *more)
    assert len(plain.losses) == 5
    for loop in (plain_loop, fabric_loop):
        own = loop.main([*TINY, "offload=none", *more, f"output_dir={spill_dir / loop.__name__}"])
        assert own.losses == plain.losses, loop.__name__
    where = f"hydra.run.dir={spill_dir / 'fsdp'}"
    run_module("recipes.train", *TINY, "offload=fsdp", *more, where, cwd=spill_dir, begin=forks)
    sharded = RunSummary.read(spill_dir / "fsdp" / "summary.json")
    assert sharded.losses == plain.losses
    assert sharded.weights_digest == plain.weights_digest


@pytest.mark.slow
def test_the_demo_from_the_command_line(spill_dir, forks):
    tiny = (*TINY, "logger=none")
    done = run_module("recipes.demo", "--output-dir", str(spill_dir), *tiny, cwd=spill_dir, begin=forks)
    assert "lightning_ssd: Losses and weights are bit for bit those of plain Lightning." in done.stdout
    assert json.loads((spill_dir / "ssd" / "summary.json").read_text())["written_bytes_per_step"] > 0
    assert (spill_dir / "auto" / "summary.json").is_file()


@pytest.mark.parametrize("name", ["Makefile", "README.md", "CHANGELOG.md"])
def test_documents_name_recipes_that_exist(name):
    modules = set(re.findall(r"-m ((?:recipes|tests)[.\w]*\w)", (ROOT / name).read_text(encoding="utf-8")))
    assert modules
    assert not [module for module in sorted(modules) if find_spec(module) is None]
