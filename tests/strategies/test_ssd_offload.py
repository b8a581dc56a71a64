"""``Trainer(strategy="ssd_offload")``: the bits of plain training, on one device, from checkpoints and compiled."""

import inspect
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import lightning as L
import lightning.pytorch.callbacks as callbacks
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import RandomSampler

from lightning_ssd import HardwareProfile, OffloadPolicy
from lightning_ssd.errors import ConfigError
from lightning_ssd.strategies.ssd_offload import SSDOffloadStrategy
from tests.support.helpers import assert_identical
from tests.support.leftovers import assert_nothing_left
from tests.support.patience import PATIENCE_S
from tests.support.trainers import (
    BAREBONES,
    LIGHTNING_NOISE,
    LBFGSNet,
    ManualNet,
    Net,
    assert_same_training,
    fit,
    make_trainer,
    offload_strategy,
    one_thread,
    result,
)

ROOT = Path(__file__).resolve().parents[2]
NO_MARGIN: dict[str, Any] = {"margin": 0.0} if "margin" in inspect.signature(BatchSizeFinder).parameters else {}
"""Lightning up to 2.5 has none."""
pytestmark = [pytest.mark.filterwarnings(noise) for noise in LIGHTNING_NOISE]


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


# -- the same results -------------------------------------------------------------------------------------------------


class WideNet(Net):
    """Activations of 1 MiB: large enough for the default policy."""

    def __init__(self):
        super().__init__(width=1024, batch_size=256)


def test_by_name_with_all_defaults(spill_dir):
    _, expected = fit(WideNet, "auto", spill_dir)
    everything_moves = SSDOffloadStrategy(policy=OffloadPolicy(activations="offload"))
    _, module = fit(WideNet, everything_moves, spill_dir)
    assert_identical(result(module), result(expected))
    assert everything_moves.stats.bytes_written > 0
    trainer, module = fit(WideNet, "SSD_Offload", spill_dir)
    assert type(trainer.strategy) is SSDOffloadStrategy
    assert_identical(result(module), result(expected))
    stats, trace = trainer.strategy.stats, trainer.strategy.offloader.trace
    assert stats.bytes_kept < stats.bytes_saved, "the first step moves"
    assert trace is not None
    assert max(storage.nbytes for storage in trace.storages) >= 1 << 20
    assert stats.saved_peak_bytes > 1 << 20
    assert [path for path in spill_dir.rglob("*") if not path.is_dir()] == []


def test_plans_are_followed_and_a_budget_is_kept(tmp_path):
    """Six batches, three epochs; the last steps follow a plan."""
    _, expected = fit(Net, "auto", tmp_path, max_epochs=3)
    budget = 400_000
    strategy = SSDOffloadStrategy(
        policy=OffloadPolicy(min_tensor_bytes=0, activation_budget=budget),
        hardware=HardwareProfile(paths=tmp_path, allow_unsuitable_paths=True),
    )
    _, module = fit(Net, strategy, tmp_path, max_epochs=3)
    assert_identical(result(module), result(expected))
    stats, report = strategy.stats, strategy.offloader.plan_report
    assert stats.saved_peak_bytes > budget >= stats.resident_peak_bytes
    assert report is not None
    assert report.num_plans >= 1
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        pytest.param(Net, {"max_epochs": 2}, id="two-epochs-with-validation"),
        pytest.param(Net, {"accumulate_grad_batches": 4}, id="accumulation"),
        pytest.param(Net, {"gradient_clip_val": 0.01}, id="clipping"),
        pytest.param(Net, {"precision": "bf16-mixed"}, id="bf16-mixed"),
        pytest.param(Net, {"precision": "bf16-true"}, id="bf16-true"),
        pytest.param(Net, {"precision": "64-true"}, id="64-true"),
        pytest.param(Net, {"overfit_batches": 2, "max_epochs": 2}, id="overfit-batches"),
        pytest.param(Net, {"detect_anomaly": True, "max_steps": 2}, id="detect-anomaly"),
        pytest.param(Net, BAREBONES, id="barebones"),
        pytest.param(lambda: Net(checkpointed=True), {}, id="checkpointed-blocks"),
        pytest.param(ManualNet, {}, id="manual-two-optimizers"),
        pytest.param(lambda: ManualNet(through_lightning=False), {}, id="manual-own-backward"),
        pytest.param(LBFGSNet, {"max_steps": 2}, id="lbfgs"),
    ],
)
@pytest.mark.filterwarnings("ignore:You requested to overfit but enabled train dataloader shuffling")
@pytest.mark.filterwarnings("ignore:.*no-op when using barebones")
@pytest.mark.filterwarnings("ignore:You are trying to `self.log.*barebones")
@pytest.mark.filterwarnings("ignore:.*no-op if `Trainer.barebones=True.`")
def test_bitwise_equal_to_plain_training(tmp_path, make, settings):
    assert_same_training(make, tmp_path, **settings)


@pytest.mark.parametrize(
    "make_callback",
    [
        pytest.param(lambda: StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1), id="swa"),
        pytest.param(
            lambda: callbacks.WeightAveraging(),
            id="ema",
            marks=pytest.mark.skipif(not hasattr(callbacks, "WeightAveraging"), reason="came with Lightning 2.6"),
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
@pytest.mark.filterwarnings("ignore:Swapping scheduler")
def test_weight_averaging(tmp_path, make_callback):
    _, expected = fit(Net, "auto", tmp_path, max_epochs=3, callbacks=[make_callback()])
    trainer, module = fit(Net, offload_strategy(tmp_path), tmp_path, max_epochs=3, callbacks=[make_callback()])
    assert_identical(result(module), result(expected))
    assert trainer.strategy.stats.bytes_saved > 0


def test_a_step_that_returns_none_is_skipped(tmp_path):
    class Skips(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx % 2 else loss

    with pytest.warns(UserWarning, match="returned `None`"):
        assert_same_training(Skips, tmp_path)


# -- one device -------------------------------------------------------------------------------------------------------


def test_one_device_is_one_process_without_a_wrapper(tmp_path):
    seen = {}

    class Looks(Net):
        def training_step(self, batch, batch_idx):
            strategy = self.trainer.strategy
            seen["where"] = strategy.offloader.description
            seen["model"], seen["group"] = strategy.model, torch.distributed.is_initialized()
            seen["open"] = strategy.offloader.is_open
            seen["threads"] = [thread.name for thread in threading.enumerate()]
            return super().training_step(batch, batch_idx)

    trainer, module = fit(Looks, offload_strategy(tmp_path), tmp_path)
    assert seen["model"] is module
    assert not seen["group"]
    assert str(tmp_path / f"lightning_ssd-{os.geteuid()}-rank-0") in seen["where"]
    assert seen["open"]
    assert any(name.startswith("lightning_ssd") for name in seen["threads"])
    assert trainer.strategy.launcher is None
    assert isinstance(trainer.train_dataloader.sampler, RandomSampler)
    assert not isinstance(trainer.strategy, DDPStrategy)
    assert (trainer.world_size, trainer.global_rank, trainer.num_devices) == (1, 0, 1)


def test_torchruns_environment_does_not_make_one_device_a_part_of_something(tmp_path, monkeypatch):
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "GROUP_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    trainer = make_trainer(offload_strategy(tmp_path), tmp_path)
    assert trainer.is_global_zero
    assert trainer.strategy.root_device == torch.device("cpu")


def test_the_batch_size_finder_takes_one_device(tmp_path):
    finder = BatchSizeFinder(max_trials=2, steps_per_trial=1, init_val=8, **NO_MARGIN)
    trainer, module = fit(Net, offload_strategy(tmp_path), tmp_path, callbacks=[finder])
    assert finder.optimal_batch_size == module.batch_size >= 16
    assert trainer.strategy.stats.bytes_saved > 0


INTERACTIVE = """
import warnings
warnings.simplefilter("ignore")
import lightning as L
import lightning_ssd
from lightning_ssd import SSDOffloadStrategy
quiet = dict(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
print("one:", L.Trainer(strategy="ssd_offload", devices=1, **quiet).strategy.launcher)
forked = L.Trainer(strategy=SSDOffloadStrategy(start_method="fork"), devices=2, **quiet).strategy.launcher
print("fork:", forked.is_interactive_compatible)
L.Trainer(strategy="ssd_offload", devices=2, **quiet)
"""


def test_interactive_sessions(tmp_path):
    """What a notebook is to Lightning, without the minutes that a notebook takes."""
    done = subprocess.run(
        [sys.executable, "-i", "-c", INTERACTIVE],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert "one: None" in done.stdout, done.stderr
    assert "fork: True" in done.stdout
    assert "ConfigError: SSDOffloadStrategy got 2 devices in an interactive session" in done.stderr
    assert "SSDOffloadStrategy(start_method='fork')" in done.stderr


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_checkpoints_are_ordinary_ones_in_both_directions(tmp_path):
    def saving(directory):
        return {"callbacks": [ModelCheckpoint(directory, save_last=True)], "enable_checkpointing": True}

    fit(Net, "auto", tmp_path, **saving(tmp_path / "plain"))
    fit(Net, offload_strategy(tmp_path), tmp_path, **saving(tmp_path / "ours"))
    resumed = {}
    for source in ("plain", "ours"):
        for strategy in ("auto", offload_strategy(tmp_path)):
            L.seed_everything(8, verbose=False)
            module = Net()
            make_trainer(strategy, tmp_path, max_epochs=2).fit(module, ckpt_path=tmp_path / source / "last.ckpt")
            resumed[source, strategy] = result(module)
    first, *others = resumed.values()
    for other in others:
        assert_identical(other, first)


# -- compiled modules -------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_lightning_module_is_accepted_with_a_warning(tmp_path):
    def compiled():
        module = Net()
        module.log = lambda *args, **kwargs: None  # logging inside a graph is Lightning's own trouble
        return torch.compile(module, backend="aot_eager")

    with pytest.warns(UserWarning, match=r"Net is compiled as a whole.*for block in model\.blocks: block\.compile"):
        trainer, _ = fit(compiled, offload_strategy(tmp_path), tmp_path, max_steps=2)
    assert trainer.strategy.stats.bytes_saved > 0


def test_a_compiled_trunk_warns(tmp_path):
    class Trunk(Net):
        def __init__(self):
            super().__init__()
            trunk = torch.nn.Sequential(*self.blocks)
            self.blocks = torch.nn.ModuleList([trunk])
            trunk.compile(backend="eager")

    with pytest.warns(UserWarning, match=r"Trunk\.blocks\.0 is compiled as a whole"):
        fit(Trunk, offload_strategy(tmp_path), tmp_path, max_steps=1)


# PyTorch 2.15's own look at the inputs of what it compiles, with or without us.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor is being accessed")
def test_compiled_blocks_do_not_warn_and_are_exact(tmp_path):
    class Regional(Net):
        def __init__(self):
            super().__init__()
            for block in self.blocks:
                block.compile(backend="eager")

    assert_same_training(Regional, tmp_path, max_steps=2)


@pytest.mark.filterwarnings("ignore")  # of whole modules, and of what PyTorch does while it compiles them
def test_a_step_within_a_compiled_training_step_is_refused(tmp_path):
    policy = OffloadPolicy(optimizer_states="offload")
    strategy = SSDOffloadStrategy(policy=policy, hardware=HardwareProfile(paths=tmp_path, allow_unsuitable_paths=True))
    with pytest.raises(ConfigError, match=r"AdamW runs under torch\.compile.*block\.compile\(\)"):
        fit(lambda: torch.compile(ManualNet(), backend="eager"), strategy, tmp_path, max_steps=1)
