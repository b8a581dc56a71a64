"""Trains on two CPU processes, with Lightning's DDP strategy and with ours, and compares the bits.

python -m tests.support.ddp_script <directory> <scenario> ...
"""

import os
import sys
from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from lightning_ssd import OffloadCallback
from lightning_ssd.errors import BudgetError, ConfigError
from lightning_ssd.monitor import OffloadMonitor
from lightning_ssd.strategies.ssd_offload import SSDOffloadStrategy
from tests.support.helpers import assert_identical
from tests.support.loggers import RecordingLogger
from tests.support.processes import run_scenarios
from tests.support.trainers import WIDTH, Block, ManualNet, Net, everything, fit, offload_strategy, result


def check_rows(trainer):
    """What is logged is of both processes: one of them has the larger peak, and what they write is added up."""
    (logger,) = trainer.loggers
    rows = [row for _, row in logger.rows_of_ours()]
    assert bool(rows) is trainer.is_global_zero
    for row in rows:
        assert row["memory.worst_rank"] in (0.0, 1.0)
        assert row["io.stall_ratio"] >= 0
    if rows:
        written = sum(row["io.write_gib"] for row in rows) * 2**30
        assert written == pytest.approx(rows[-1]["wear.written_tb"] * 1e12), "one is merged otherwise than the other"


class HalfUnused(Net):
    """Its second batch leaves the last block without gradients."""

    used = slice(-1)

    def forward(self, x):
        blocks = self.blocks if self.trainer.global_step % 2 == 0 else self.blocks[self.used]
        for block in blocks:
            x = block(x)
        return self.head(self.norm(x))


class StaticManual(ManualNet):
    """A static graph: every step uses every parameter once."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        optimizer.zero_grad()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Gathers(Net):
    """Every collective of a strategy, with what it must give."""

    def on_train_start(self):
        strategy, rank = self.trainer.strategy, self.global_rank
        strategy.barrier()
        assert strategy.broadcast(f"from {rank}", src=1) == "from 1"
        assert self.all_gather(torch.tensor(float(rank))).tolist() == [0.0, 1.0]
        assert strategy.reduce(torch.tensor(float(rank)), reduce_op="sum").item() == 1.0
        assert strategy.reduce("not a tensor") == "not a tensor"
        assert strategy.reduce_boolean_decision(rank == 0, all=False)
        assert not strategy.reduce_boolean_decision(rank == 0, all=True)


def counting_hook(state, bucket):
    """The usual all-reduce, counted."""
    state.append(bucket.index())
    return default_hooks.allreduce_hook(None, bucket)


def counted():
    """A hook whose calls can be seen."""
    return {"ddp_comm_state": [], "ddp_comm_hook": counting_hook, "bucket_cap_mb": 0.05}


LIKE_DDP = {
    "plain": (Net, dict, {"max_epochs": 2}),
    "accumulate": (Net, dict, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    "collectives": (Gathers, lambda: {"gradient_as_bucket_view": True}, {"max_steps": 1}),
    "unused": (HalfUnused, lambda: {"find_unused_parameters": True}, {}),
    "manual": (ManualNet, lambda: {"find_unused_parameters": True}, {}),
    "static-manual": (StaticManual, lambda: {"static_graph": True}, {}),
    "comm-hook": (Net, counted, {}),
}


def compare(name, directory, *, start_method="popen"):
    """Train twice; the second time is ours."""
    make, options, settings = LIKE_DDP[name]
    settings = {"devices": 2, **settings}
    if name == "comm-hook":  # Lightning's own strategy ignores it on a CPU
        reference = offload_strategy(directory, activations="keep", **options())
    else:
        # Forked processes need not import everything again; the results are those of spawned ones.
        reference = DDPStrategy(start_method="popen" if start_method == "popen" else "fork", **options())
    _, expected = fit(make, reference, directory, **settings)
    ours = offload_strategy(directory / name, start_method=start_method, **options())
    monitor = OffloadMonitor()
    logged = {"logger": RecordingLogger(), "log_every_n_steps": 1}
    trainer, module = fit(make, ours, directory, callbacks=[monitor], **{**settings, **logged})
    assert_identical(result(module), result(expected))
    L.seed_everything(7, verbose=False)
    assert not torch.equal(module.head.weight, make().head.weight), (
        "nothing was trained, or the weights did not come back"
    )
    if start_method == "popen":
        assert trainer.world_size == 2
        assert ours.stats.bytes_saved > 0
        assert not ours.offloader.is_open
        assert "(process 1 of 2)" in monitor.summary
        check_rows(trainer)
        trainer.validate(module, verbose=False)
    if name == "comm-hook":
        assert len(ours._hook[0]) > 3, "the hook was not called for every batch"


def forgotten(directory):
    """Parameters without gradients, and nobody said so: our message must name our strategy."""
    with pytest.raises(RuntimeError, match=r"strategy=SSDOffloadStrategy\(find_unused_parameters=True\)"):
        fit(HalfUnused, offload_strategy(directory), directory, devices=2)


BUDGET = 400_000


budgeted = partial(offload_strategy, min_tensor_bytes=0)


def rank_before_launch():
    return int(os.environ.get("LOCAL_RANK", "0"))


class Agrees(Net):
    """Remembers what its process plans with at the end."""

    def on_train_end(self):
        scheduler = self.trainer.strategy.offloader._parts.scheduler
        rates = scheduler.machine.ssd
        mine = [rates.write_bytes_per_s, rates.read_bytes_per_s, float(scheduler._limits.of(scheduler._kind.others))]
        self.mine, self.all = mine, self.all_gather(torch.tensor(mine, dtype=torch.float64)).tolist()


def agreed(directory):
    """Each process has a budget of its own; the smaller one holds in both, as do the lower rates."""
    _, expected = fit(Agrees.__base__, DDPStrategy(start_method="popen"), directory, devices=2, max_epochs=2)
    ours = budgeted(directory / "agreed", activation_budget=BUDGET + 50_000 * rank_before_launch())
    _, module = fit(Agrees, ours, directory, devices=2, max_epochs=2)
    assert_identical(result(module), result(expected))
    assert module.all == [module.mine] * 2, module.all
    assert module.mine[2] == BUDGET
    assert ours.stats.saved_peak_bytes > BUDGET


def impossible(directory):
    """A budget that only the second process cannot keep is refused in both."""
    strategy = budgeted(directory / "impossible", activation_budget=20_000 if rank_before_launch() else BUDGET)
    with pytest.raises(BudgetError, match="smallest that works"):
        fit(Net, strategy, directory, devices=2)


def worn(directory):
    """A wear budget that only the states of the second process exceed is refused in both, by strategy and callback."""
    wear = {"optimizer_states": "offload", "wear_budget": "1KB" if rank_before_launch() else "1000TB"}
    ours, callback = (offload_strategy(directory, kind, **wear) for kind in (SSDOffloadStrategy, OffloadCallback))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_ssd.wear.meter._MIN_SECONDS", 0.0)
        for strategy, callbacks in ((ours, []), (DDPStrategy(process_group_backend="gloo"), [callback])):
            with pytest.raises(BudgetError, match=r"optimizer states .* need"):
                fit(Net, strategy, directory, callbacks=callbacks, devices=2, max_epochs=6)


def states(directory):
    """Optimizer states on SSD, in both processes: the same bits, also after a resume from what the first one saved."""
    plain, expected = fit(Net, DDPStrategy(start_method="popen"), directory, devices=2, max_epochs=2)
    make_ours = partial(offload_strategy, directory, optimizer_states="offload")
    path = directory / "first.ckpt"
    for epochs in (1, 2):
        trainer, module = fit(Net, make_ours(), directory, devices=2, max_epochs=epochs)
        if epochs == 1:
            trainer.save_checkpoint(path)
    assert_identical(everything(trainer, module), everything(plain, expected))
    moved = trainer.optimizers[0].stats
    assert moved.written_bytes > moved.state_bytes > 0
    assert moved.read_bytes > 0
    resumed = {}
    for strategy in (DDPStrategy(start_method="popen"), make_ours()):
        resumed[type(strategy)] = everything(*fit(Net, strategy, directory, ckpt_path=path, devices=2, max_epochs=2))
    assert_identical(resumed[SSDOffloadStrategy], resumed[DDPStrategy])


class FrozenBlocks(Net):
    """Only what comes behind the blocks is trained, and one weight in the middle. Ranks begin with other weights."""

    def __init__(self):
        super().__init__()
        self._make_blocks()

    def _make_blocks(self):
        torch.manual_seed(100 + int(os.environ.get("LOCAL_RANK", "0")))
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3)).requires_grad_(False)
        self.blocks[1].up.weight.requires_grad_(True)
        torch.manual_seed(1)


class BuiltBlocks(FrozenBlocks):
    """They are made when Lightning asks for them, and so wait before rank zero's values come."""

    def _make_blocks(self):
        del self.blocks

    def configure_model(self):
        if not hasattr(self, "blocks"):
            super()._make_blocks()


class UnusedBlocks(FrozenBlocks, HalfUnused):
    """The trained weight has no part in every second loss."""

    used = slice(None, None, 2)


BLOCKS_BYTES = (3 * 2 - 1) * 2 * WIDTH * WIDTH * 4
"""Frozen weights of three blocks."""


def weights(directory):
    """Each process has the frozen weights on a drive of its own; rank zero's values reach both."""
    for make, states in ((FrozenBlocks, "keep"), (BuiltBlocks, "offload"), (UnusedBlocks, "offload")):
        options = {"start_method": "popen", "find_unused_parameters": make is UnusedBlocks}
        ours = offload_strategy(directory, parameters="offload", optimizer_states=states, **options)
        found = []
        for strategy in (DDPStrategy(**options), ours):
            _, module = fit(make, strategy, directory, devices=2)
            found.append(result(module))
        assert_identical(found[1], found[0])
        assert ours.stats.weights_bytes == BLOCKS_BYTES, (make, ours.stats)
        # Rank zero's weights are in both, and what is trained has gone its way in both.
        for name, value in module.state_dict().items():
            first, second = module.all_gather(value)
            assert torch.equal(first, second), name
    # What DistributedDataParallel holds is refused in both processes before anything has moved.
    ours = offload_strategy(directory, parameters="offload", optimizer_states="offload")
    with pytest.raises(ConfigError, match=r"with 2 processes got OffloadPolicy.parameters='offload' and no frozen"):
        fit(Net, ours, directory, devices=2)
    assert ours.offloader is None


SCENARIOS = {
    **{name: partial(compare, name) for name in LIKE_DDP},
    **{f"{name} plain": partial(compare, "plain", start_method=name) for name in ("fork", "spawn")},
    **{scenario.__name__: scenario for scenario in (weights, forgotten, agreed, impossible, worn, states)},
}
run = partial(run_scenarios, SCENARIOS)

if __name__ == "__main__":
    run(sys.argv[1:])
