"""Trains on two CPU processes with strategies of Lightning, with and without an ``OffloadCallback``. Compares the bits.

python -m tests.support.callback_script <directory> <scenario> ...
"""

import sys
from functools import partial

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from lightning_ssd import OffloadCallback
from lightning_ssd.optimizer.offloaded_optimizer import OffloadedOptimizer
from tests.support.fsdp_script import Sharded, TensorParallel
from tests.support.helpers import assert_identical
from tests.support.processes import run_scenarios
from tests.support.trainers import ManualNet, Net, everything, fit, offload_strategy

DDP = partial(DDPStrategy, process_group_backend="gloo")
SCENARIOS = {
    "ddp": (DDP, Net, "offload", {"max_epochs": 2}),
    "ddp-auto": (DDP, Net, "keep", {"max_epochs": 2}),
    "ddp-accumulate": (DDP, Net, "offload", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    "ddp-manual": (partial(DDP, find_unused_parameters=True), ManualNet, "offload", {}),
    "fsdp2": (ModelParallelStrategy, Sharded, "offload", {"max_epochs": 2}),
    "tensor-parallel": (
        partial(ModelParallelStrategy, data_parallel_size=1, tensor_parallel_size=2),
        TensorParallel,
        "offload",
        {},
    ),
}

RESUMED = ("ddp", "fsdp2", "tensor-parallel")


def compare(name, directory):
    """Train twice; the second time with the callback, which also resumes from the plain checkpoint and writes one."""
    strategy, make, states, settings = SCENARIOS[name]
    settings = {"devices": 2, "limit_val_batches": 0} | settings
    activations = "auto" if name.endswith("auto") else "offload"
    away = {"activations": activations, "optimizer_states": states}
    callback = offload_strategy(directory / "spill", OffloadCallback, **away)
    plain, expected = fit(make, strategy(), directory, **settings)
    trainer, module = fit(make, strategy(), directory, callbacks=[callback], **settings)
    assert module.losses
    assert_identical(everything(trainer, module), everything(plain, expected))
    assert callback.stats.bytes_saved > 0
    assert (callback.stats.bytes_written > 0) or activations == "auto"
    is_away = [isinstance(optimizer, OffloadedOptimizer) for optimizer in trainer.optimizers]
    assert is_away == [states == "offload"] * len(is_away)
    if states == "offload":
        assert sum(optimizer.stats.written_bytes for optimizer in trainer.optimizers) > 0
    if name in RESUMED:
        _resume(name, directory, callback, settings)


def _resume(name, directory, callback, settings):
    """From checkpoints of one epoch, whoever has written them and whoever reads them."""
    strategy, make, _, _ = SCENARIOS[name]
    found = []
    for writer in ([], [callback]):
        path = directory / f"{name}-{len(writer)}.ckpt"
        saving = ModelCheckpoint(path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
        more = settings | {"max_epochs": 1, "enable_checkpointing": True}
        fit(make, strategy(), directory, **more, callbacks=[saving, *writer])
        first = min(path.glob("step=*"))
        for reader in ([], [callback]):
            more = settings | {"max_epochs": 1, "callbacks": reader, "ckpt_path": first}
            found.append(everything(*fit(make, strategy(), directory, **more)))
    for other in found[1:]:
        assert_identical(other, found[0])


run = partial(run_scenarios, {name: partial(compare, name) for name in SCENARIOS})

if __name__ == "__main__":
    run(sys.argv[1:])
