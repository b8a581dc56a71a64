"""Gradients that wait away from a device, under Lightning and Fabric, on a device whose races are faults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_ssd import HardwareProfile, OffloadPolicy
from lightning_ssd.strategies.fabric import SSDOffloadFabricStrategy
from tests.strategies.test_weights_away_from_a_device import POLICY, Built, strategy
from tests.support.fabric_runs import assert_nothing_left
from tests.support.helpers import assert_identical
from tests.support.pretended_training import everything_there
from tests.support.trainers import LIGHTNING_NOISE, WIDTH, Block, fit, one_thread, result

pytestmark = [pytest.mark.filterwarnings(noise) for noise in LIGHTNING_NOISE]

TRAINERS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "accumulated, clipped by norm": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.01},
    "clipped by value": {"gradient_clip_val": 1e-4, "gradient_clip_algorithm": "value"},
    "accumulated, clipped by value": {
        "accumulate_grad_batches": 3,
        "gradient_clip_val": 1e-4,
        "gradient_clip_algorithm": "value",
    },
    "mixed": {"precision": "bf16-mixed", "gradient_clip_val": 0.01},
}


@pytest.fixture(autouse=True)
def _on_a_device(small_subgroups: None) -> Iterator[None]:
    with one_thread(), everything_there():
        yield


class Manual(Built):
    """Accumulates, clips, changes and keeps gradients by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.norms: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        self.manual_backward(self.loss(batch) * 0.5)
        if batch_idx % 2:
            return
        weight = self.blocks[0].up.weight
        weight.grad = weight.grad * 2
        self.blocks[1].down.weight.grad.add_(1e-3)
        self.norms.append(nn.utils.get_total_norm([p.grad for p in self.parameters()]))
        by_norm = batch_idx % 4 == 0
        self.clip_gradients(
            optimizer,
            gradient_clip_val=0.01 if by_norm else 1e-4,
            gradient_clip_algorithm="norm" if by_norm else "value",
        )
        optimizer.step()
        optimizer.zero_grad(set_to_none=by_norm)


@pytest.mark.parametrize("parameters", ["keep", "offload"])
@pytest.mark.parametrize("name", TRAINERS)
def test_training_is_lightning_s_own(name: str, parameters: Any, tmp_path: Path) -> None:
    _, expected = fit(Built, "auto", tmp_path, **TRAINERS[name])
    ours = strategy(tmp_path, activations="keep", gradients="offload", parameters=parameters)
    _, module = fit(Built, ours, tmp_path, **TRAINERS[name])
    assert_identical(result(module), result(expected))
    assert ours.stats.bytes_written > 0
    assert_nothing_left(tmp_path)


def test_manual_optimization(tmp_path: Path) -> None:
    _, expected = fit(Manual, "auto", tmp_path, max_epochs=2)
    ours = strategy(tmp_path, activations="offload", gradients="offload")
    _, module = fit(Manual, ours, tmp_path, max_epochs=2)
    assert_identical(result(module), result(expected))
    assert_identical(module.norms, expected.norms)
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("clip", [{"max_norm": 0.01}, {"clip_val": 1e-4}], ids=["norm", "value"])
def test_fabric(clip: dict[str, float], tmp_path: Path) -> None:
    results = []
    for is_ours in (False, True):
        own: Any = "auto"
        if is_ours:
            hardware = HardwareProfile(paths=[tmp_path], allow_unsuitable_paths=True, host_memory=0)
            own = SSDOffloadFabricStrategy(policy=OffloadPolicy(**POLICY, gradients="offload"), hardware=hardware)
        fabric = Fabric(accelerator="cpu", devices=1, strategy=own)
        torch.manual_seed(0)
        with fabric.init_module():
            blocks = nn.Sequential(*(Block(WIDTH) for _ in range(4)))
        model, optimizer = fabric.setup(blocks, torch.optim.AdamW(blocks.parameters(), lr=1e-3))
        found = []
        for step in range(6):
            loss = model(torch.randn(4, WIDTH)).square().mean()
            fabric.backward(loss)
            found.append(loss.detach())
            if step % 2:
                found.append(fabric.clip_gradients(model, optimizer, **clip))
                found.extend(p.grad.clone() for p in blocks.parameters())
                optimizer.step()
                optimizer.zero_grad()
        found.extend(p.detach().clone() for p in blocks.parameters())
        results.append([one for one in found if one is not None])
        if is_ours:
            assert fabric.strategy.stats.bytes_written > 0
            fabric.strategy.teardown()
    assert_identical(results[1], results[0])
