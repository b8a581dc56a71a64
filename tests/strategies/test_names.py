"""Policies by name, for Trainers and Fabrics."""

from functools import partial

import pytest
from hydra.utils import instantiate
from lightning.fabric import Fabric
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

import lightning_ssd
from lightning_ssd import HardwareProfile, OffloadPolicy
from lightning_ssd.errors import ConfigError
from lightning_ssd.strategies.names import POLICIES, register_strategy
from recipes.schema import SCHEMA
from tests.support.helpers import assert_identical
from tests.support.trainers import LIGHTNING_NOISE, Net, fit, result

pytestmark = [pytest.mark.filterwarnings(noise) for noise in LIGHTNING_NOISE]
NAMES = {
    "ssd_offload": OffloadPolicy(),
    "ssd_offload_states": OffloadPolicy(optimizer_states="offload"),
    "ssd_offload_everything": OffloadPolicy(
        activations="offload", parameters="offload", gradients="offload", optimizer_states="offload"
    ),
    "ssd_recompute_offload": OffloadPolicy(activations="recompute_offload"),
}


@pytest.fixture
def my_name():
    """A name that no other test knows."""
    yield "my_ssd"
    for registry in (StrategyRegistry, STRATEGY_REGISTRY):
        registry.pop("my_ssd", None)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_means_a_policy(name):
    trainer = Trainer(strategy=name, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    assert type(trainer.strategy) is lightning_ssd.SSDOffloadStrategy
    assert trainer.strategy.policy == NAMES[name]
    fabric = Fabric(strategy=name, accelerator="cpu", devices=1)
    assert isinstance(fabric.strategy, lightning_ssd.SSDOffloadFabricStrategy)
    assert fabric.strategy.policy == NAMES[name]


@pytest.mark.parametrize("name", ["ssd_offload_everything", "ssd_recompute_offload"])
def test_a_name_trains_as_without_us(name, tmp_path):
    wide = partial(Net, width=512)  # weights of at least min_tensor_bytes
    trainings = [fit(wide, strategy, tmp_path, limit_val_batches=0) for strategy in ("auto", name)]
    for value in (lambda trainer, module: result(module), lambda trainer, module: trainer.optimizers[0].state_dict()):
        assert_identical(value(*trainings[1]), value(*trainings[0]))


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "offload"])
def test_policies_are_those_of_the_hydra_options(name, tmp_path):
    config, _ = SCHEMA.compose([f"offload={name}", f"output_dir={tmp_path}"])
    assert instantiate(config["offload"], _convert_="all") == POLICIES[name]


def test_a_name_of_the_users_own(my_name, tmp_path):
    policy = OffloadPolicy(activations="offload", min_tensor_bytes=4096)
    hardware = HardwareProfile(paths=[tmp_path / "spill"], allow_unsuitable_paths=True)
    lightning_ssd.register_strategy(my_name.upper(), policy=policy, hardware=hardware)
    kwargs = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    trainers = [Trainer(strategy=my_name, **kwargs) for _ in range(2)]
    assert len({id(trainer.strategy) for trainer in trainers}) == 2
    assert [(one.strategy.policy, one.strategy.hardware) for one in trainers] == [(policy, hardware)] * 2
    assert Fabric(strategy=my_name, accelerator="cpu", devices=1).strategy.policy == policy
    _, expected = fit(Net, "auto", tmp_path)
    trainer, module = fit(Net, my_name, tmp_path)
    assert_identical(result(module), result(expected))
    assert trainer.strategy.stats.bytes_written > 0


def test_wrong_arguments_are_refused(my_name):
    with pytest.raises(ConfigError, match=r'name=3 is a int\. Pass .* type str, for example "my_ssd"'):
        register_strategy(3)
    with pytest.raises(ConfigError, match=r"policy='offload' is a str\. Pass .* type OffloadPolicy"):
        register_strategy(my_name, policy="offload")
    assert my_name not in StrategyRegistry


def test_a_name_of_another_strategy_is_not_taken():
    with pytest.raises(ConfigError, match=r"'ddp' belongs to lightning\.pytorch\.strategies\.ddp\.DDPStrategy already"):
        register_strategy("ddp")
    assert StrategyRegistry["ddp"]["strategy"] is DDPStrategy
