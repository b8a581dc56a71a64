"""What takes a strategy of ours: one Trainer or Fabric."""

import importlib
import inspect
import re
from pathlib import Path

import lightning.fabric
import lightning.pytorch
import pytest
from lightning.fabric import Fabric
from lightning.fabric.connector import _Connector
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

from lightning_ssd import SSDOffloadFabricStrategy, SSDOffloadFSDPStrategy, SSDOffloadStrategy
from lightning_ssd.errors import ConfigError
from tests.support.trainers import LIGHTNING_NOISE

pytestmark = [pytest.mark.filterwarnings(noise) for noise in LIGHTNING_NOISE]
TRAINER = (lightning.pytorch.Trainer, {"logger": False, "enable_checkpointing": False})
FABRIC = (Fabric, {})


@pytest.mark.parametrize(
    ("taker", "make", "accelerator"),
    [
        (TRAINER, SSDOffloadStrategy, "auto"),
        (TRAINER, SSDOffloadFSDPStrategy, "cpu"),
        (FABRIC, SSDOffloadFabricStrategy, "cpu"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_second_trainer_is_refused(taker, make, accelerator):
    build, more = taker
    arguments = {"strategy": make(), "accelerator": accelerator, "devices": 1, **more}
    first = build(**arguments)
    with pytest.raises(ConfigError, match=rf"{make.__name__} belongs to a {build.__name__} already.*a new object"):
        build(**arguments)
    assert isinstance(first.strategy.accelerator, lightning.fabric.accelerators.Accelerator)
    build(**{**arguments, "strategy": make()})
    build(**{**arguments, "strategy": make.strategy_name})


@pytest.mark.parametrize("make", [SSDOffloadStrategy, SSDOffloadFSDPStrategy])
def test_an_accelerator_of_the_user_reaches_the_trainer(make):
    accelerator = CPUAccelerator()
    build, more = TRAINER
    trainer = build(strategy=make(accelerator=accelerator), devices=1, **more)
    assert trainer.accelerator is trainer.strategy.accelerator is accelerator


@pytest.mark.parametrize(("connector", "package"), [(_AcceleratorConnector, "pytorch"), (_Connector, "fabric")])
def test_only_the_connectors_read_the_private_name(connector, package):
    assert "if self._strategy_flag._accelerator:" in inspect.getsource(connector._check_config_and_set_final_flags)
    assert "self.strategy.accelerator = self.accelerator" in inspect.getsource(connector._lazy_init_strategy)
    root = Path(importlib.import_module(f"lightning.{package}").__file__).parent
    read = {path.name for path in root.rglob("*.py") if re.search(r"strategy\w*\._accelerator\b", path.read_text())}
    assert read == {Path(inspect.getfile(connector)).name}
