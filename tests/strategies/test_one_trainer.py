"""What takes a strategy of ours: one Trainer or Fabric, and those of ``lightning`` alone."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
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
from lightning_ssd.strategies.one_trainer import after_import
from tests.support.patience import PATIENCE_S
from tests.support.trainers import LIGHTNING_NOISE

pytestmark = [pytest.mark.filterwarnings(noise) for noise in LIGHTNING_NOISE]
TRAINER = (lightning.pytorch.Trainer, {"logger": False, "enable_checkpointing": False})
FABRIC = (Fabric, {})


@pytest.mark.parametrize("accelerator", ["auto", "cpu"])
@pytest.mark.parametrize(
    ("taker", "make"),
    [(TRAINER, SSDOffloadStrategy), (TRAINER, SSDOffloadFSDPStrategy), (FABRIC, SSDOffloadFabricStrategy)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_second_trainer_is_refused(taker, make, accelerator) -> None:
    build, more = taker
    arguments = {"strategy": make(), "accelerator": accelerator, "devices": 1, **more}
    first = build(**arguments)
    with pytest.raises(ConfigError, match=rf"{make.__name__} belongs to a {build.__name__} already.*a new object"):
        build(**arguments)
    assert isinstance(first.strategy.accelerator, lightning.fabric.accelerators.Accelerator)
    build(**{**arguments, "strategy": make()})
    build(**{**arguments, "strategy": make.strategy_name})


@pytest.mark.parametrize("make", [SSDOffloadStrategy, SSDOffloadFSDPStrategy])
def test_an_accelerator_of_the_user_reaches_the_trainer(make) -> None:
    accelerator = CPUAccelerator()
    build, more = TRAINER
    trainer = build(strategy=make(accelerator=accelerator), devices=1, **more)
    assert trainer.accelerator is trainer.strategy.accelerator is accelerator


@pytest.mark.parametrize(("connector", "package"), [(_AcceleratorConnector, "pytorch"), (_Connector, "fabric")])
def test_only_the_connectors_read_the_private_name(connector, package) -> None:
    assert "if self._strategy_flag._accelerator:" in inspect.getsource(connector._check_config_and_set_final_flags)
    assert "self.strategy.accelerator = self.accelerator" in inspect.getsource(connector._lazy_init_strategy)
    root = Path(importlib.import_module(f"lightning.{package}").__file__).parent
    read = {path.name for path in root.rglob("*.py") if re.search(r"strategy\w*\._accelerator\b", path.read_text())}
    assert read == {Path(inspect.getfile(connector)).name}


TRAINER_OF_ANOTHER = """
import {first}
import {second}
import lightning_ssd
for strategy in ("ssd_offload", lightning_ssd.{name}()):
    try:
        {package}.{taker}(strategy=strategy, accelerator="cpu", devices=1)
    except lightning_ssd.errors.ConfigError as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("package", "taker", "name", "line"),
    [
        ("pytorch_lightning", "Trainer", "SSDOffloadStrategy", "import lightning as L"),
        ("pytorch_lightning", "Trainer", "SSDOffloadFSDPStrategy", "import lightning as L"),
        ("lightning_fabric", "Fabric", "SSDOffloadFabricStrategy", "from lightning.fabric import Fabric"),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_other_packages_are_refused_with_the_cause(is_first: bool, package: str, taker: str, name: str, line: str):
    """In a process of its own, because what counts is which of the two is imported first."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    first, second = (package, "lightning_ssd") if is_first else ("lightning_ssd", package)
    code = TRAINER_OF_ANOTHER.format(first=first, second=second, package=package, taker=taker, name=name)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    said = [text for text in done.stdout.splitlines() if text.startswith("this ")]
    assert len(said) == 2, done.stderr
    for text in said:
        assert text.startswith(f"this {taker} comes from {package}, whose classes are not those of lightning")
        assert f"Write `{line}` in place of imports from {package}" in text


def test_a_module_is_met_once_when_it_is_imported(tmp_path, monkeypatch) -> None:
    (tmp_path / "met_later.py").write_text("VALUE = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before, met = list(sys.meta_path), []
    after_import("met_later", lambda module: met.append(module.VALUE))
    assert met == []
    module = importlib.import_module("met_later")
    assert met == [3]
    assert sys.meta_path == before
    after_import("met_later", lambda found: met.append(found is module))
    assert met == [3, True]
    monkeypatch.delitem(sys.modules, "met_later")
