"""Trains on two CPU processes of which each recomputes other blocks, and compares the bits with Lightning's strategy.

    python -m tests.support.fsdp_recompute_script <directory> <scenario> ...

Run by test_fsdp_recompute.py. A collective that one process enters and the other does not would wait until the process
group gives up.
"""

from __future__ import annotations

import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_ssd import HardwareProfile, OffloadPolicy, SSDOffloadFSDPStrategy
from lightning_ssd.errors import ConfigError
from tests.support.fsdp_script import HARDWARE, outcome
from tests.support.helpers import assert_identical
from tests.support.patience import PATIENCE_S
from tests.support.trainers import Block, Net, fit

TIMEOUT = timedelta(seconds=PATIENCE_S)


class Even(Block):
    """What the first process recomputes."""


class Odd(Block):
    """What the second one does."""


class Alternating(Net):
    """Not sharded yet."""

    sizes = (2, 1)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(kind(self.width) for kind in (Even, Odd, Even, Odd))

    num_recomputed = 0
    """Calls that a plan of this process recomputes at the end."""

    def shard(self) -> None:
        """What of it, and how."""

    def configure_model(self) -> None:
        if not isinstance(self, FSDPModule) and not isinstance(self.blocks[0].up.weight, DTensor):
            self.shard()

    def spread(self, *modules: Any) -> None:
        """With FSDP2, each a group of its own."""
        for module in modules:
            fully_shard(module, mesh=self.device_mesh["data_parallel"])

    def on_train_end(self) -> None:
        offloader = getattr(self.trainer.strategy, "offloader", None)
        scheduler = None if offloader is None else offloader._parts.scheduler
        if scheduler is not None:
            self.num_recomputed = sum(map(len, (kind.recompute for kind in scheduler._kinds.values())))


class Whole(Alternating):
    """Each block is a group."""

    def shard(self) -> None:
        self.spread(*self.blocks, self)


class Pairs(Alternating):
    """A group has two blocks, of which each process recomputes one."""

    def shard(self) -> None:
        for pair in (self.blocks[:2], self.blocks[2:]):
            self.spread(list(pair))
        self.spread(self)


class Inner(Alternating):
    """Groups lie within blocks: what is recomputed gathers."""

    def shard(self) -> None:
        for block in self.blocks:
            self.spread(block.up, block.down)
        self.spread(self)


class Nested(Alternating):
    """Of a block one layer is a group of its own, and the rest another one."""

    def shard(self) -> None:
        for block in self.blocks:
            self.spread(block.up, block)
        self.spread(self)


class Tensors(Alternating):
    """Both processes share each layer, and meet in its forward."""

    sizes = (1, 2)

    def shard(self) -> None:
        for block in self.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, self.device_mesh["tensor_parallel"], plan)


RANK = int(os.environ.get("LOCAL_RANK", "0"))
"""Not of a module that a server of forks may have imported before."""
OWN = ["Odd" if RANK else "Even"]


def plain(model: type[Alternating], directory: Path) -> dict[str, Any]:
    """What comes of it without us."""
    strategy = ModelParallelStrategy(*model.sizes, timeout=TIMEOUT)
    return outcome(*fit(model, strategy, directory, devices=2, max_epochs=2))


def ours(model: type[Alternating], directory: Path, **policy: Any) -> tuple[dict[str, Any], int]:
    """What comes of it with us, and how many blocks a plan recomputes."""
    strategy = SSDOffloadFSDPStrategy(
        policy=OffloadPolicy(**policy),
        hardware=HardwareProfile(paths=[directory / "ssd"], **HARDWARE),
        data_parallel_size=model.sizes[0],
        tensor_parallel_size=model.sizes[1],
        timeout=TIMEOUT,
    )
    trainer, module = fit(model, strategy, directory, devices=2, max_epochs=2)
    return outcome(trainer, module), module.num_recomputed


def all_blocks(directory: Path) -> None:
    """Where all processes recompute all of them, a block may meet others in its forward."""
    for model in (Whole, Pairs, Inner, Nested, Tensors):
        found, _ = ours(model, directory, activations="recompute")
        assert_identical(found, plain(model, directory))


def own_blocks(directory: Path) -> None:
    """Where each plans for itself: blocks that meet others are kept, or moved."""
    for model in (Whole, Pairs):
        policy = {"min_tensor_bytes": 0, "activation_budget": 760_000, "wear_budget": 1, "recompute_modules": OWN}
        found, num_recomputed = ours(model, directory, **policy)
        assert num_recomputed
        assert_identical(found, plain(model, directory))
    for model in (Inner, Nested, Tensors):
        policy = {"min_tensor_bytes": 0, "activation_budget": 300_000, "recompute_modules": OWN}
        found, num_recomputed = ours(model, directory, **policy)
        assert not num_recomputed
        assert_identical(found, plain(model, directory))


def refused(directory: Path) -> None:
    """Who asks each process for others is told, in all of them."""
    with pytest.raises(ConfigError, match="would recompute different blocks"):
        ours(Whole, directory, activations="recompute", recompute_modules=OWN)


SCENARIOS = {scenario.__name__: scenario for scenario in (all_blocks, own_blocks, refused)}


def main(directory: Path, *names: str) -> None:
    """Run the scenarios in order."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in names:
        SCENARIOS[name](directory)
        print(f"rank {RANK}: {name} ok", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
