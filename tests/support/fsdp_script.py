"""Trains sharded models on two CPU processes, with Lightning's strategy and with ours, and compares the bits.

python -m tests.support.fsdp_script <directory> <scenario> ...
"""

import os
import sys
import time
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_ssd import SSDOffloadFSDPStrategy
from lightning_ssd.common.dtensor import as_piece
from lightning_ssd.errors import ConfigError
from lightning_ssd.monitor import OffloadMonitor
from tests.support.helpers import MIDDLE, assert_identical, open_offloader
from tests.support.patience import PATIENCE_S
from tests.support.processes import run_scenarios
from tests.support.trainers import BATCH_SIZE, Block, Net, Unlogged, everything, fit, offload_strategy, step_after_fit

HARDWARE = {"allow_unsuitable_paths": True}
RANK = int(os.environ.get("LOCAL_RANK", "0"))
TIMEOUT = timedelta(seconds=PATIENCE_S)  # of a collective that one process enters and the other does not
NUM_STEPS = 3  # of an epoch, with half of the batches in each process


class Sharded(Net):
    """FSDP2: each block is a group of its own, and the root has the rest. One shard of the head has no element."""

    reshard = True
    sharding: ClassVar[dict[str, Any]] = {}

    def configure_model(self):
        options = {"mesh": self.device_mesh["data_parallel"], "reshard_after_forward": self.reshard, **self.sharding}
        for module in () if isinstance(self, FSDPModule) else (*self.blocks, self):
            fully_shard(module, **options)


class Unsharded(Sharded):
    """Parameters stay gathered from forward to backward."""

    reshard = False


class Wide(Sharded):
    """Shards so large that their states move in slices."""

    def __init__(self):
        super().__init__(width=384)


class Detached(Sharded):
    """Autograd saves a view of a gathered parameter that does not look like one, before anybody has seen it."""

    gathered = ()

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.forward = partial(frozen_down, block)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        if isinstance(self, FSDPModule):
            groups = [block._get_fsdp_state()._fsdp_param_group for block in self.blocks]
            buffers = [b for group in groups for p in group.fsdp_params for b in p.all_gather_outputs]
            self.gathered = tuple(buffer.untyped_storage().nbytes() for buffer in buffers)
        return self.head(self.norm(x))


def frozen_down(block, x):
    return x + torch.nn.functional.linear(block.up(block.norm(x)), block.down.weight.detach())


class TensorParallel(Net):
    """Each block's two linear layers share their work, with what is between them spread over both processes."""

    def configure_model(self):
        if isinstance(self.blocks[0].up.weight, DTensor):
            return
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in self.blocks:
            parallelize_module(block, self.device_mesh["tensor_parallel"], plan)


class TwoDimensional(TensorParallel):
    """The same under FSDP2, whose parameters are then DTensors while they are gathered."""

    def configure_model(self):
        super().configure_model()
        if not isinstance(self, FSDPModule):
            for block in (*self.blocks, self):
                fully_shard(block, mesh=self.device_mesh["data_parallel"])


class Normed(torch.optim.Optimizer):
    """Scales each update by the norm of the whole gradient, for which processes have to meet."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.mul_(0.9).add_(parameter.grad / (parameter.grad.norm() + 1e-6))
                parameter.add_(momentum, alpha=-group["lr"])
        return loss


def plain(sizes=(2, 1), *, distributed=True):
    return ModelParallelStrategy(*sizes, save_distributed_checkpoint=distributed, timeout=TIMEOUT)


def ours(directory, sizes=(2, 1), *, distributed=True, **policy):
    settings = {"activations": "offload", "optimizer_states": "offload"}
    if policy.get("optimizer_states") != "keep":
        settings["per_parameter_optimizers"] = "Normed"
    return offload_strategy(
        directory / "ssd",
        SSDOffloadFSDPStrategy,
        **(settings | policy),
        data_parallel_size=sizes[0],
        tensor_parallel_size=sizes[1],
        save_distributed_checkpoint=distributed,
        timeout=TIMEOUT,
    )


def parts(values):
    """What this process has of each tensor."""
    return {key: value.to_local() if isinstance(value, DTensor) else value for key, value in values.items()}


def compare(make, directory, optimizer=None, sizes=(2, 1), **settings):
    """Train with Lightning's strategy and with ours: the same losses, weights and states, and bytes took our way."""

    def build():
        module = make()
        if optimizer is not None:
            module.configure_optimizers = lambda: optimizer(module.parameters())
        return module

    expected = everything(*fit(build, plain(sizes), directory, devices=2, **settings))
    strategy = ours(directory, sizes)
    trainer, module = fit(build, strategy, directory, devices=2, **settings)
    assert_identical(everything(trainer, module), expected)
    moved = trainer.optimizers[0].stats
    assert moved.num_subgroups > 4
    assert moved.written_bytes > moved.state_bytes > 0
    assert moved.read_bytes > 0
    assert strategy.stats.bytes_read + strategy.stats.bytes_forwarded > 0
    assert strategy.stats.failures == 0
    assert not strategy.offloader.is_open
    return strategy


def adamw(**options):
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, **options)


def training(directory):
    """FSDP2, resharded after forward or not, clipped by norm and accumulated."""
    for make in (Sharded, Unsharded):
        compare(make, directory, gradient_clip_val=0.1, accumulate_grad_batches=2, max_epochs=2)


def optimizers(directory):
    """Every implementation of AdamW that takes DTensors, slices of shards, and an optimizer that communicates."""
    for options in ({"foreach": True}, {"fused": True}):  # a loop over the parameters is what training() has
        compare(Sharded, directory, adamw(**options))
    compare(Sharded, directory, lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1))
    compare(Sharded, directory, Normed)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "lightning_ssd.optimizer.step.partition.as_piece",
            lambda flat, whole: seen.append(1) or as_piece(flat, whole),
        )
        compare(Wide, directory, max_steps=2)
    assert seen, "no shard was cut into slices"


def saved_bytes(make, directory):
    """What autograd saves in an epoch of one process when nothing is sharded."""
    module = make()
    with open_offloader(directory, MIDDLE) as offloader:
        offloader.register_module(module)
        for _ in range(NUM_STEPS):
            with offloader.saved_tensors():
                loss = module(torch.randn(BATCH_SIZE, module.width)).sum()
            loss.backward()
            offloader.end_backward()
        return offloader.stats.bytes_saved


def activations(directory):
    """Exactly what is saved without sharding goes to SSD: nothing that was gathered, also not in the first forward."""
    for make in (Sharded, Unsharded):
        strategy, monitor = ours(directory), OffloadMonitor()
        trainer, module = fit(make, strategy, directory, devices=2, callbacks=[monitor])
        assert "(process 1 of 2)" in monitor.summary
        trainer.validate(module, verbose=False)
        assert strategy.stats.bytes_saved == saved_bytes(Net, directory / "unsharded"), strategy.stats
        assert strategy.stats.num_kept_parameters > 0
    expected = everything(*fit(Detached, plain(), directory, devices=2))
    strategy = ours(directory)
    trainer, module = fit(Detached, strategy, directory, devices=2)
    assert_identical(everything(trainer, module), expected)
    assert strategy.stats.bytes_saved == saved_bytes(Detached, directory / "unsharded"), strategy.stats
    assert len(module.gathered) == 18
    assert not any(module.gathered), "what was gathered for a block is still there after its forward"


class ShardedAndUnlogged(Unlogged, Sharded):
    pass


def after_fit(directory):
    """A loop that is called again after ``teardown`` takes a step without us, as with Lightning's strategy."""
    found = []
    for strategy in (plain(), ours(directory, optimizer_states="keep")):
        trainer, module = fit(ShardedAndUnlogged, strategy, directory, devices=2)
        num_losses = len(module.losses)
        step_after_fit(trainer)
        assert len(module.losses) == num_losses + 1
        found.append(everything(trainer, module))
    assert_identical(found[1], found[0])
    assert not strategy.offloader.is_open


def tensor_parallel(directory):
    """DTensors among the activations move like others, alone and under FSDP2."""
    for make in (TensorParallel, TwoDimensional):
        strategy = compare(make, directory, sizes=(1, 2))
        # What stays besides parameters are norms' statistics and the like: all that is large has left.
        assert strategy.stats.bytes_saved > 3_000_000, strategy.stats


def planned(directory):
    """Plans, recomputed blocks, and a budget that only the second process has: both keep to it."""
    _, expected = fit(Sharded, plain(), directory, devices=2, max_epochs=2)
    budget = 500_000 - 100_000 * RANK
    for policy in (
        {"activations": "recompute_offload"},
        {"activations": "auto", "min_tensor_bytes": 0, "activation_budget": budget, "recompute_modules": "blocks"},
    ):
        strategy = ours(directory, **policy)
        _, module = fit(Planned, strategy, directory, devices=2, max_epochs=2)
        assert_identical(module.losses, expected.losses)
        assert_identical(parts(module.state_dict()), parts(expected.state_dict()))
    assert module.limits == [400_000, 400_000]


class Planned(Sharded):
    """Remembers the budgets that both processes plan with at the end."""

    def on_train_end(self):
        scheduler = self.trainer.strategy.offloader._parts.scheduler
        if scheduler is not None:
            self.limits = self.all_gather(
                torch.tensor(scheduler._limits.of(scheduler._kind.others), dtype=torch.int64)
            ).tolist()


class Uneven(Sharded):
    """Its processes take turns in being slow, so that each would plan otherwise."""

    def training_step(self, batch, batch_idx):
        if (self.global_step // 3 + RANK) % 2:
            time.sleep(0.01)
        return super().training_step(batch, batch_idx)

    def on_train_end(self):
        offloader = getattr(self.trainer.strategy, "offloader", None)
        if offloader is not None:
            self.num_plans = offloader.plan_report.num_plans
            self.peak_bytes = offloader.stats.resident_peak_bytes


def uneven(directory):
    """Each process plans when it likes: no collective waits for ever, no bit and no budget is lost."""
    budget = 200_000
    for recompute in ("", "blocks"):
        policy = {"activations": "auto", "min_tensor_bytes": 0, "activation_budget": budget}
        _, expected = fit(Uneven, plain(), directory, devices=2, max_epochs=8)
        strategy = ours(directory, recompute_modules=recompute or (), **policy)
        _, module = fit(Uneven, strategy, directory, devices=2, max_epochs=8)
        assert_identical(module.losses, expected.losses)
        assert_identical(parts(module.state_dict()), parts(expected.state_dict()))
        assert module.num_plans > 0
        assert module.peak_bytes <= budget


class Saves(L.Callback):
    """Saves while everything is still open."""

    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.path)


def resumed(make, directory, savers, look=everything, *, distributed, sizes=(2, 1), **policy):
    """What comes of one epoch by each saver's strategy and a second one by either strategy."""
    strategies = {"plain": plain, "ours": partial(ours, directory, **policy)}
    found = []
    for saver in savers:
        path = directory / f"{make.__name__}-{saver}-{distributed}.ckpt"
        strategy = strategies[saver](sizes, distributed=distributed)
        fit(make, strategy, directory, devices=2, max_epochs=1, callbacks=[Saves(path)])
        assert path.is_dir() == distributed
        for load in strategies.values():
            resumed = {"ckpt_path": path, "weights_only": False, "devices": 2, "max_epochs": 2}
            found.append(look(*fit(make, load(sizes, distributed=distributed), directory, **resumed)))
    for one in found[1:]:
        assert_identical(one, found[0])
    return found


def checkpoints(directory):
    """Sharded and full ones, written and read by either strategy: whoever goes on gets the same bits."""
    for make, distributed in ((Sharded, True), (Wide, False)):
        (one, *_) = resumed(make, directory, ("plain", "ours"), distributed=distributed)
        assert {float(state["step"]) for state in one["optimizers"][0]["state"].values()} == {2.0 * NUM_STEPS}
    resumed(TwoDimensional, directory, ("ours",), distributed=False, sizes=(1, 2))


# -- blocks that are recomputed ----------------------------------------------------------------------------------------


class Even(Block):
    """What the first process recomputes."""


class Odd(Block):
    """What the second one does."""


class Alternating(TensorParallel):
    """Without groups of FSDP2 both processes share each layer, and meet in its forward."""

    num_recomputed = 0
    """Calls that a plan of this process recomputes at the end."""

    def __init__(self, groups):
        super().__init__()
        self.groups = groups
        self.blocks = torch.nn.ModuleList(kind(self.width) for kind in (Even, Odd, Even, Odd))

    def configure_model(self):
        if self.groups is None:
            super().configure_model()
        elif not isinstance(self, FSDPModule):
            for group in (*self.groups(self.blocks), self):
                fully_shard(group, mesh=self.device_mesh["data_parallel"])

    def on_train_end(self):
        offloader = getattr(self.trainer.strategy, "offloader", None)
        scheduler = None if offloader is None else offloader._parts.scheduler
        if scheduler is not None:
            self.num_recomputed = sum(map(len, (kind.recompute for kind in scheduler._kinds.values())))


WITHIN = {
    "each block": list,
    "two blocks, of which each process recomputes one": lambda blocks: [list(blocks[:2]), list(blocks[2:])],
}
MEETING = {
    "layers of a block, so that it gathers": lambda blocks: [part for b in blocks for part in (b.up, b.down)],
    "a layer, and the rest of its block": lambda blocks: [part for b in blocks for part in (b.up, b)],
    "tensor parallel": None,
}
OWN = ["Odd" if RANK else "Even"]


def recompute(groups, directory, **policy):
    """Compare with Lightning's strategy; return how many blocks a plan recomputes."""
    sizes, found, num = (1, 2) if groups is None else (2, 1), [], 0
    for strategy in (plain(sizes), ours(directory, sizes, optimizer_states="keep", **policy)):
        trainer, module = fit(partial(Alternating, groups), strategy, directory, devices=2, max_epochs=2)
        found.append(everything(trainer, module))
        num = module.num_recomputed
    assert_identical(found[1], found[0])
    return num


def all_blocks(directory):
    """Where all processes recompute all of them, a block may meet others in its forward."""
    for groups in (WITHIN | MEETING).values():
        recompute(groups, directory, activations="recompute", min_tensor_bytes=1 << 20)


def own_blocks(directory):
    """Where each plans for itself: blocks that meet others are kept, or moved."""
    policy = {"activations": "auto", "min_tensor_bytes": 0, "recompute_modules": OWN}
    for groups in WITHIN.values():
        assert recompute(groups, directory, **policy, activation_budget=760_000, wear_budget=1)
    for groups in MEETING.values():
        assert not recompute(groups, directory, **policy, activation_budget=300_000)


def refused(directory):
    with pytest.raises(ConfigError, match="would recompute different blocks"):
        recompute(list, directory, activations="recompute", recompute_modules=OWN)


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        *(training, optimizers, activations, after_fit, tensor_parallel, planned, uneven, checkpoints),
        *(all_blocks, own_blocks, refused),
    )
}

if __name__ == "__main__":
    run_scenarios(SCENARIOS, sys.argv[1:])
