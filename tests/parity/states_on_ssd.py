"""A Lightning training with optimizer states on SSD, and what it has in common with a plain one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lightning_ssd import HardwareProfile, OffloadPolicy
from lightning_ssd.optimizer.offloaded_optimizer import OffloadedOptimizer
from lightning_ssd.strategies.ssd_offload import SSDOffloadStrategy
from tests.support.trainers import LIGHTNING_NOISE, Net, result

MARKS = [
    *(pytest.mark.filterwarnings(noise) for noise in LIGHTNING_NOISE),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:You have set log_momentum=True, but some optimizers do not"),
    pytest.mark.usefixtures("many_subgroups"),
]


def states_on_ssd(directory: Path, activations: str = "keep", **hardware: Any) -> SSDOffloadStrategy:
    policy = OffloadPolicy(
        activations=activations,  # type: ignore[arg-type]
        optimizer_states="offload",
        per_parameter_optimizers="Breaks",
        min_tensor_bytes=4096,
    )
    return SSDOffloadStrategy(policy=policy, hardware=HardwareProfile(paths=[directory], **hardware))


def everything(trainer: L.Trainer, module: Net) -> dict[str, Any]:
    """What two equal trainings have in common."""
    return result(module) | {"optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers]}


def offloaded(trainer: L.Trainer) -> list[OffloadedOptimizer]:
    found = [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, OffloadedOptimizer)]
    assert len(found) == len(trainer.optimizers) > 0
    return found


def assert_moved(trainer: L.Trainer) -> None:
    stats = offloaded(trainer)[0].stats
    assert stats.num_steps > 1
    assert stats.written_bytes > stats.state_bytes > 0
    assert stats.read_bytes > 0
    assert 0 < stats.resident_peak_bytes < stats.state_bytes
