"""Trained weights that wait away from a device, under Lightning and Fabric, on a device whose races are faults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_ssd import HardwareProfile, OffloadPolicy, SSDOffloadStrategy
from lightning_ssd.parameters.device_weights import DeviceWeights
from lightning_ssd.strategies.fabric import SSDOffloadFabricStrategy
from tests.support.fabric_runs import assert_nothing_left
from tests.support.helpers import assert_identical
from tests.support.pretended_training import everything_there
from tests.support.trainers import LIGHTNING_NOISE, WIDTH, Block, Net, fit, make_trainer, one_thread, result

pytestmark = [pytest.mark.filterwarnings(noise) for noise in LIGHTNING_NOISE]

POLICY = {"parameters": "offload", "optimizer_states": "offload", "min_tensor_bytes": 4096}
BLOCK_BYTES = 2 * 2 * WIDTH * WIDTH * 4


@pytest.fixture(autouse=True)
def _on_a_device(small_subgroups: None) -> Iterator[None]:
    with one_thread(), everything_there():
        yield


class Built(Net):
    """Its blocks are made when Lightning asks for it."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks

    def configure_model(self) -> None:
        if not hasattr(self, "blocks"):
            self.blocks = nn.ModuleList(Block(self.width) for _ in range(3))


def strategy(directory: Path, **options: Any) -> SSDOffloadStrategy:
    return SSDOffloadStrategy(
        policy=OffloadPolicy(**POLICY | options),
        hardware=HardwareProfile(paths=[directory], allow_unsuitable_paths=True, host_memory=0),
    )


@pytest.mark.parametrize("activations", ["auto", "offload", "keep"])
@pytest.mark.parametrize(
    "more", [{}, {"precision": "bf16-mixed"}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.01}]
)
def test_training_is_lightning_s_own(activations: str, more: dict[str, Any], tmp_path: Path) -> None:
    _, expected = fit(Built, "auto", tmp_path, **more)
    ours = strategy(tmp_path, activations=activations)
    _, module = fit(Built, ours, tmp_path, **more)
    assert_identical(result(module), result(expected))
    assert ours.stats.weights_bytes >= 3 * BLOCK_BYTES
    assert_nothing_left(tmp_path)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")  # on purpose without its callback
def test_checkpoints_are_lightning_s_own_and_resume(tmp_path: Path) -> None:
    def saved(name: str, own: Any) -> Path:
        saving = ModelCheckpoint(tmp_path / name, save_last=True)
        fit(Built, own, tmp_path, callbacks=[saving], enable_checkpointing=True)
        return tmp_path / name / "last.ckpt"

    plain, ours = saved("plain", "auto"), saved("ours", strategy(tmp_path))
    loaded = [torch.load(path, weights_only=False) for path in (plain, ours)]
    assert_identical(loaded[1]["state_dict"], loaded[0]["state_dict"])
    assert_identical(loaded[1]["optimizer_states"], loaded[0]["optimizer_states"])
    resumed = []
    for path, own in ((plain, "auto"), (ours, strategy(tmp_path)), (plain, strategy(tmp_path)), (ours, "auto")):
        L.seed_everything(8, verbose=False)
        module = Built()
        make_trainer(own, tmp_path, max_epochs=2).fit(module, ckpt_path=path)
        resumed.append(result(module))
    for other in resumed[1:]:
        assert_identical(other, resumed[0])


def test_fit_twice_then_test(tmp_path: Path) -> None:
    found = []
    for is_ours in (False, True):
        _, module = fit(Built, strategy(tmp_path) if is_ours else "auto", tmp_path)
        make_trainer(strategy(tmp_path) if is_ours else "auto", tmp_path).fit(module)
        make_trainer(strategy(tmp_path) if is_ours else "auto", tmp_path).test(module, verbose=False)
        found.append(result(module))
    assert_identical(found[1], found[0])


def test_fabric(tmp_path: Path) -> None:
    results = []
    for is_ours in (False, True):
        own: Any = "auto"
        if is_ours:
            hardware = HardwareProfile(paths=[tmp_path], allow_unsuitable_paths=True, host_memory=0)
            own = SSDOffloadFabricStrategy(policy=OffloadPolicy(**POLICY), hardware=hardware)
        fabric = Fabric(accelerator="cpu", devices=1, strategy=own)
        torch.manual_seed(0)
        with fabric.init_module():
            blocks = nn.Sequential(*(Block(WIDTH) for _ in range(4)))
        model, optimizer = fabric.setup(blocks, torch.optim.AdamW(blocks.parameters(), lr=1e-3))
        found = []
        for _ in range(4):
            loss = model(torch.randn(4, WIDTH)).square().mean()
            fabric.backward(loss)
            found.append(fabric.clip_gradients(model, optimizer, max_norm=0.01))
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        if is_ours:
            assert isinstance(fabric.strategy.offloader._parts.parameters.weights, DeviceWeights)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer}
        fabric.save(tmp_path / f"{is_ours}.ckpt", state)
        found.append(torch.load(tmp_path / f"{is_ours}.ckpt", weights_only=False))
        results.append(found)
        if is_ours:
            fabric.strategy.teardown()
    assert_identical(results[1], results[0])
