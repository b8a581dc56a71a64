"""Trainers of ``pytorch_lightning`` and Fabrics of ``lightning_fabric``: what they take of ours."""

import pickle
from pathlib import Path

import lightning
import lightning_fabric
import pytest
import pytorch_lightning

import lightning_ssd
from lightning_ssd import HardwareProfile, OffloadMonitor, OffloadPolicy
from lightning_ssd import pytorch_lightning as second
from lightning_ssd.errors import ConfigError
from tests.support.helpers import assert_identical
from tests.support.processes import run_python
from tests.support.second_package import over_pytorch_lightning
from tests.support.trainers import LIGHTNING_NOISE

pytestmark = [pytest.mark.filterwarnings(noise) for noise in LIGHTNING_NOISE]
TRAINERS = over_pytorch_lightning("tests.support.trainers")
QUIET = {"logger": False, "enable_checkpointing": False}
TAKERS = {
    "SSDOffloadStrategy": (pytorch_lightning.Trainer, QUIET),
    "SSDOffloadFSDPStrategy": (pytorch_lightning.Trainer, QUIET),
    "SSDOffloadFabricStrategy": (lightning_fabric.Fabric, {}),
}


def taken(name, strategy):
    build, more = TAKERS[name]
    return build(strategy=strategy, accelerator="cpu", devices=1, **more).strategy


@pytest.mark.parametrize("name", TAKERS)
def test_names_and_objects_get_the_class_of_the_package(name):
    first, other = getattr(lightning_ssd, name), getattr(second, name)
    for strategy in (first.strategy_name, first(), other()):
        made = taken(name, strategy)
        assert isinstance(made, other)
        assert isinstance(made, first), "what users ask, whichever package trains"
        roots = {base.__module__.partition(".")[0] for base in type(made).__mro__}
        assert "lightning" not in roots
        assert roots & {"pytorch_lightning", "lightning_fabric"}
        theirs = {type(value).__module__.partition(".")[0] for value in vars(made).values()}
        assert "lightning" not in theirs, vars(made)


def test_objects_of_the_second_package_get_the_class_of_the_first():
    trainer = lightning.Trainer(strategy=second.SSDOffloadStrategy(), accelerator="cpu", devices=1, **QUIET)
    assert type(trainer.strategy) is lightning_ssd.SSDOffloadStrategy


def test_what_the_user_has_said_is_kept():
    policy, hardware = OffloadPolicy(activations="offload"), HardwareProfile(paths=["here"])
    strategy = lightning_ssd.SSDOffloadStrategy(
        policy=policy, hardware=hardware, log_metrics=False, find_unused_parameters=True, bucket_cap_mb=3.0
    )
    strategy.mark = 7
    made = taken("SSDOffloadStrategy", strategy)
    assert made is strategy
    assert (made.policy, made.hardware, made._monitor, made.mark) == (policy, hardware, None, 7)
    assert made._ddp_arguments["find_unused_parameters"] is True
    assert made._ddp_arguments["bucket_cap_mb"] == 3.0
    again = pickle.loads(pickle.dumps(made))
    assert type(again) is second.SSDOffloadStrategy
    assert again.policy == policy


def test_a_spawned_process_gets_the_class_of_the_package(tmp_path):
    (tmp_path / "strategy").write_bytes(pickle.dumps(taken("SSDOffloadStrategy", lightning_ssd.SSDOffloadStrategy())))
    code = """
import pickle, sys, lightning_ssd
assert not {"pytorch_lightning", "lightning_ssd.pytorch_lightning"} & set(sys.modules), "who does not use it loads it"
print(type(pickle.load(open(sys.argv[1], 'rb'))).__mro__)
"""
    told = run_python(code, str(tmp_path / "strategy"))
    assert "'pytorch_lightning.strategies.parallel.ParallelStrategy'" in told
    assert "'lightning.pytorch" not in told


@pytest.mark.parametrize("name", TAKERS)
def test_a_derived_class_is_refused_with_the_base_to_take(name):
    derived = type("Mine", (getattr(lightning_ssd, name),), {"__module__": __name__})
    package = TAKERS[name][0].__module__.partition(".")[0]
    line = rf"Write `from lightning_ssd\.pytorch_lightning import {name}` and derive Mine from that"
    with pytest.raises(ConfigError, match=rf"comes from {package}, and Mine derives from .* {line}"):
        taken(name, derived())
    mine = type("Mine", (getattr(second, name),), {"__module__": __name__})()
    assert taken(name, mine) is mine


IN_EITHER_ORDER = """
    import {first}
    import {second}
    import lightning_fabric, lightning_ssd, pytorch_lightning
    names = ("ssd_offload", "ssd_offload_states", "ssd_offload_everything", "ssd_recompute_offload", "ssd_offload_fsdp")
    lightning_ssd.register_strategy("mine", policy=lightning_ssd.OffloadPolicy(activations="offload"))
    for name in (*names, "mine"):
        trainer = pytorch_lightning.Trainer(strategy=name, accelerator="cpu", devices=1, logger=False)
        print(type(trainer.strategy).__name__, trainer.strategy.policy.activations)
    for name in (*names[:-1], "mine"):
        fabric = lightning_fabric.Fabric(strategy=name, accelerator="cpu", devices=1)
        print(type(fabric.strategy).__name__, fabric.strategy.policy.activations)
    monitor = lightning_ssd.OffloadMonitor()
    assert isinstance(monitor, pytorch_lightning.Callback)
    pytorch_lightning.Trainer(callbacks=[monitor], accelerator="cpu", devices=1, logger=False)
"""


@pytest.mark.parametrize(
    ("first", "other"),
    [
        pytest.param("lightning_ssd", "pytorch_lightning", marks=pytest.mark.exhaustive),
        ("lightning_fabric", "lightning_ssd"),
        pytest.param("lightning_ssd", "lightning_fabric", marks=pytest.mark.exhaustive),
        pytest.param("pytorch_lightning", "lightning_ssd", marks=pytest.mark.exhaustive),
    ],
)
def test_the_order_of_imports_does_not_matter(first, other):
    told = run_python(IN_EITHER_ORDER.format(first=first, second=other))
    activations = ["auto", "auto", "offload", "recompute_offload", "auto", "offload"]
    trainers = ["SSDOffloadStrategy"] * 4 + ["SSDOffloadFSDPStrategy", "SSDOffloadStrategy"]
    expected = [f"{name} {policy}" for name, policy in zip(trainers, activations, strict=True)]
    expected += [f"SSDOffloadFabricStrategy {policy}" for policy in (*activations[:4], "offload")]
    assert told.splitlines() == expected


def test_the_monitor_logs_as_ever(tmp_path):
    monitor, strategy = OffloadMonitor(prog_bar=False), TRAINERS.offload_strategy(tmp_path, activations="offload")
    logger = pytorch_lightning.loggers.CSVLogger(tmp_path)
    _, expected = TRAINERS.fit(TRAINERS.Net, "auto", tmp_path)
    _, module = TRAINERS.fit(TRAINERS.Net, strategy, tmp_path, callbacks=[monitor], logger=logger, log_every_n_steps=1)
    assert_identical(TRAINERS.result(module), TRAINERS.result(expected))
    assert "saved activations" in monitor.summary
    assert "io/write_gib" in (Path(logger.log_dir) / "metrics.csv").read_text()
