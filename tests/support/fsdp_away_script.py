"""Trains sharded models on two CPU processes with what they consist of in files, and with Lightning's strategy.

    python -m tests.support.fsdp_away_script <directory> <scenario> ...

Each scenario compares bits: losses, gradients before clipping, weights and optimizer states.
"""

import os
import sys
from functools import partial
from typing import Any, ClassVar

import lightning as L
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_ssd import SSDOffloadFSDPStrategy
from lightning_ssd.common.dtensor import local_of
from lightning_ssd.parameters.files.mapped_storage import is_mapped
from tests.support.fsdp_script import NUM_STEPS, Sharded, TwoDimensional, ours, plain, resumed
from tests.support.helpers import assert_identical
from tests.support.process_memory import frozen_changed_at, shown_bytes
from tests.support.processes import run_scenarios
from tests.support.trainers import WIDTH, Block, everything, fit, make_trainer

RANK = int(os.environ.get("LOCAL_RANK", "0"))
FROZEN = {"parameters": "offload", "optimizer_states": "keep"}
STATES = {"parameters": "offload", "optimizer_states": "offload"}
EVERYTHING = {**STATES, "gradients": "offload"}
BLOCK_BYTES = 2 * 2 * WIDTH * WIDTH * 4 // 2
"""Of one block's weights, in each process."""


class Adapted(nn.Module):
    """A frozen block with two small trained matrices beside it, and a bias that is trained in the frozen part."""

    def __init__(self, width):
        super().__init__()
        self.block = Block(width).requires_grad_(False)
        self.block.up.bias.requires_grad_(True)
        self.down, self.up = nn.Linear(width, 32, bias=False), nn.Linear(32, width, bias=False)

    def forward(self, x):
        return self.block(x) + self.up(self.down(x))


class Away(Sharded):
    """FSDP2 with one group for each block; remembers gradients, and which of them were in files."""

    do_gradients_wait = True
    uses_checkpoint = False
    make_block = Block

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(type(self).make_block(WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)  # unlike that of a batch, it takes what is cast for it
        self.checkpointed = self.uses_checkpoint
        self.gradients = []
        self.num_in_files = 0

    def on_before_optimizer_step(self, optimizer):
        found = {name: None if p.grad is None else local_of(p.grad) for name, p in self.named_parameters()}
        self.num_in_files += sum(g is not None and is_mapped(g.untyped_storage()) for g in found.values())
        self.gradients.append({name: None if g is None else g.clone() for name, g in found.items()})


class Tuned(Away):
    make_block = Adapted


class Half(Away):
    sharding: ClassVar[dict[str, Any]] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    }


def variant(base, **attributes):
    return type(f"{base.__name__} {attributes}", (base,), attributes)


class Uneven(Away):
    """Odd sizes: zeros lie behind the last process' shards. One weight is too small to be cut at all."""

    def __init__(self):
        super().__init__()
        self.odd, self.back, self.one = nn.Linear(WIDTH, 129), nn.Linear(129, WIDTH), nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x):
        return super().forward(x + self.back(self.odd(x)) + self.one(x))


class Tied(Away):
    """One parameter under two names, in one group."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x):
        return super().forward(self.second(self.first(x)))


class Meta(Away):
    """Has no memory before it is sharded, and leaves it as it gets some."""

    def __init__(self):
        with torch.device("meta"):
            super().__init__()

    def configure_model(self):
        if not isinstance(self, FSDPModule):
            L.seed_everything(11, verbose=False)
        super().configure_model()

    def configure_optimizers(self):
        weights = [local_of(block.up.weight).untyped_storage() for block in self.blocks]
        assert all(map(is_mapped, weights)) is isinstance(self.trainer.strategy, SSDOffloadFSDPStrategy)
        return super().configure_optimizers()


class Built(Tuned):
    """Is made when Lightning asks for it: whole weights leave as they are made, shards when all are there."""

    def __init__(self):
        super().__init__()
        del self.blocks

    def configure_model(self):
        if not hasattr(self, "blocks"):
            self.blocks = nn.ModuleList(Adapted(WIDTH) for _ in range(4))
        super().configure_model()
        self.cut_in_files = [is_mapped(local_of(block.block.up.weight).untyped_storage()) for block in self.blocks]


class TrainedAndBuilt(Built):
    def configure_model(self):
        super().configure_model()
        self.requires_grad_(True)


class Both(TwoDimensional):
    """Tensor parallelism under FSDP2. What is remembered of gradients is a matter of FSDP2 alone."""

    gradients = ()
    num_in_files = 0
    do_gradients_wait = False


class Hybrid(Away):
    """Copies of shards: the mesh's first dimension has the same ones, the second one cuts."""

    def configure_model(self):
        if not isinstance(self, FSDPModule):
            for module in (*self.blocks, self):
                fully_shard(module, mesh=self.device_mesh, reshard_after_forward=self.reshard)


def found_of(trainer, module):
    return {**everything(trainer, module), "gradients": module.gradients}


def compare(make, directory, policy, sizes=(2, 1), prepare=dict, **settings):
    """Train with Lightning's strategy and with ours. ``prepare``: more settings, made for each training."""
    settings = {"devices": sizes[0] * sizes[1], **settings}
    expected = found_of(*fit(make, plain(sizes), directory, **settings, **prepare()))
    assert expected["losses"]
    strategy = ours(directory, sizes, **policy)
    trainer, module = fit(make, strategy, directory, **settings, **prepare())
    assert_identical(found_of(trainer, module), expected)
    stats = strategy.stats
    assert 0 < stats.weights_resident_peak_bytes < stats.weights_bytes, (make, stats)
    assert stats.failures == 0
    assert not strategy.offloader.is_open
    assert (module.num_in_files > 0) is (policy.get("gradients") == "offload" and make.do_gradients_wait), make
    return strategy, module


def frozen(directory):
    """Adapters are trained. What FSDP2 gathers of frozen weights is read from files, and no step writes them."""
    for make, activations in ((variant(Tuned, sharding=Half.sharding), "offload"), (Built, "keep")):
        compare_frozen(make, directory, activations)


def compare_frozen(make, directory, activations):
    strategy, module = compare(make, directory, {**FROZEN, "activations": activations})
    assert strategy.stats.weights_bytes == 4 * BLOCK_BYTES
    assert strategy.stats.weights_resident_peak_bytes <= 2 * BLOCK_BYTES
    assert make is not Built or module.cut_in_files == [True] * 4


CLIPPED = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2, "max_epochs": 2}


def trained(directory):
    """All of it is trained, and all of it waits."""
    compare(Half, directory, EVERYTHING, **CLIPPED)
    compare(TrainedAndBuilt, directory, EVERYTHING)
    compare(Tuned, directory, EVERYTHING, gradient_clip_val=0.05, gradient_clip_algorithm="value")
    compare(Away, directory, {**EVERYTHING, "activations": "recompute_offload"})


def variants(directory):
    """More models and policies of both kinds."""
    for make, activations in ((Tuned, "keep"), (Tuned, "offload"), (variant(Tuned, reshard=False), "offload")):
        compare_frozen(make, directory, activations)
    compare(Tuned, directory, STATES, **CLIPPED)
    for make in (Away, variant(Away, reshard=False), variant(Away, uses_checkpoint=True)):
        compare(make, directory, EVERYTHING, **CLIPPED)
    compare(Away, directory, STATES)
    compare(Away, directory, EVERYTHING, precision="bf16-true")


def shapes(directory):
    """Memory that FSDP2 pads, shares between names, or gets late."""
    on_host = variant(Away, sharding={"offload_policy": CPUOffloadPolicy(pin_memory=False)})
    for make in (Uneven, Tied, on_host, Meta):
        compare(make, directory, EVERYTHING, gradient_clip_val=0.1)
    compare(Both, directory, STATES, sizes=(1, 2))


class Counts(L.Callback):
    """What of files is in memory, and which steps change files of frozen weights, from the second step on."""

    def __init__(self, directory):
        self.directory, self.shown = directory, 0
        self.changed_at = []
        self.written_by = []

    def on_train_start(self, trainer, pl_module):
        for block in pl_module.blocks:
            block.register_forward_hook(lambda *_: self.look())
            block.register_full_backward_hook(lambda *_: self.look())

    def look(self):
        self.shown = max(self.shown, shown_bytes(self.directory))

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx >= 1:
            self.changed_at = frozen_changed_at(trainer.strategy.offloader)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.look()
        if batch_idx >= 1 and frozen_changed_at(trainer.strategy.offloader) != self.changed_at:
            self.written_by.append(batch_idx)


def hybrid(directory):
    """Two copies of two shards each."""
    for make, policy in ((Hybrid, EVERYTHING), (variant(Hybrid, make_block=Adapted), FROZEN)):
        compare(make, directory, policy, sizes=(2, 2), gradient_clip_val=0.1, accumulate_grad_batches=2)


def three(directory):
    """Shards that no size divides into, one of three of them with padding alone."""
    for make in (Uneven, Tied):
        compare(make, directory, EVERYTHING, sizes=(3, 1), gradient_clip_val=0.1)


def counted(directory):
    """Two units of shards are in memory at a time, and frozen ones are not written by any step."""
    for make, policy in ((Tuned, FROZEN), (Away, EVERYTHING)):
        own = directory / make.__name__  # models of other trainings go on to show their files
        counts = Counts(own / "ssd")
        strategy = ours(own, **{**policy, "activations": "keep"})
        fit(make, strategy, directory, devices=2, callbacks=[counts])
        assert strategy.stats.weights_resident_peak_bytes <= 2 * BLOCK_BYTES, strategy.stats
        assert 0 < counts.shown <= 2 * BLOCK_BYTES * 1.1, (make, counts.shown)
        if policy is FROZEN:
            assert counts.changed_at, "no file of frozen weights was looked at"
            assert not counts.written_by, counts.written_by
        print(f"rank {RANK}: {make.__name__} shown {counts.shown} of {4 * BLOCK_BYTES}", flush=True)


class Edits(L.Callback):
    """What callbacks do to weights between steps: load, average, clamp, look, and hold."""

    def __init__(self):
        self.average = {}
        self.held = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        state = {name: value for name, value in pl_module.state_dict().items() if isinstance(value, DTensor)}
        for name, value in state.items():
            local = local_of(value).float()
            self.average[name] = 0.5 * self.average.get(name, local) + 0.5 * local
        weight = pl_module.blocks[1].down.weight
        if batch_idx == 0:
            pl_module.load_state_dict({name: value * 1.01 for name, value in pl_module.state_dict().items()})
            self.held.append(weight.to_local())
        elif batch_idx == 1:
            with torch.no_grad():
                weight.clamp_(-0.05, 0.05)
                weight.to_local().mul_(0.9)
                self.held[0].add_(0.001)


def edits(directory):
    """Whatever is done to shards past the forward is done to what is trained."""
    found = []

    def callbacks():
        found.append(Edits())
        return {"callbacks": [found[-1]]}

    compare(Away, directory, EVERYTHING, prepare=callbacks, max_epochs=2)
    assert_identical(found[1].average, found[0].average)


def evaluated(directory):
    """Validation between epochs, a second fit, then test and predict, with shards away."""
    found = []
    for own in (plain, partial(ours, directory, **EVERYTHING)):
        _, module = fit(Away, own(), directory, devices=2, max_epochs=2, num_sanity_val_steps=1, limit_val_batches=2)
        make_trainer(own(), directory, devices=2).fit(module)
        trainer = make_trainer(own(), directory, devices=2)
        trainer.validate(module, verbose=False)
        predicted = make_trainer(own(), directory, devices=2).predict(module)
        found.append({"losses": module.losses, "gradients": module.gradients, "predicted": predicted})
        if own is not plain:
            assert trainer.strategy.stats.weights_bytes == 4 * BLOCK_BYTES
    assert_identical(found[1], found[0])


def checkpoints(directory):
    """Sharded and full ones, written and read by either strategy."""

    def look(trainer, module):
        assert (module.num_in_files > 0) is isinstance(trainer.strategy, SSDOffloadFSDPStrategy)
        return found_of(trainer, module)

    for distributed in (True, False):
        (one, *_) = resumed(Away, directory, ("plain", "ours"), look, distributed=distributed, **EVERYTHING)
        assert len(one["losses"]) == 2 * NUM_STEPS  # half of them of validation


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (frozen, trained, variants, shapes, hybrid, three, counted, edits, evaluated, checkpoints)
}

if __name__ == "__main__":
    run_scenarios(SCENARIOS, sys.argv[1:])
