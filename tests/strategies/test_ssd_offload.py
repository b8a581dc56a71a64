"""``Trainer(strategy="ssd_offload")``: the bits of plain training, on one device, from checkpoints and compiled."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import RandomSampler

from lightning_ssd import OffloadPolicy
from lightning_ssd.errors import ConfigError
from lightning_ssd.strategies.ssd_offload import SSDOffloadStrategy
from tests.support.helpers import assert_identical
from tests.support.leftovers import assert_nothing_left
from tests.support.patience import PATIENCE_S
from tests.support.trainers import (
    LIGHTNING_NOISE,
    ManualNet,
    Net,
    fit,
    make_trainer,
    offload_strategy,
    result,
)

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.filterwarnings(noise) for noise in LIGHTNING_NOISE]


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
    assert max(storage.nbytes for storage in trace.storages) >= 1 << 20
    assert stats.saved_peak_bytes > 1 << 20
    assert [path for path in spill_dir.rglob("*") if not path.is_dir()] == []


def test_plans_are_followed_and_a_budget_is_kept(tmp_path):
    """Six batches, three epochs; the last steps follow a plan."""
    _, expected = fit(Net, "auto", tmp_path, max_epochs=3)
    budget = 400_000
    strategy = offload_strategy(tmp_path, min_tensor_bytes=0, activation_budget=budget)
    _, module = fit(Net, strategy, tmp_path, max_epochs=3)
    assert_identical(result(module), result(expected))
    stats, report = strategy.stats, strategy.offloader.plan_report
    assert stats.saved_peak_bytes > budget >= stats.resident_peak_bytes
    assert report.num_plans >= 1
    assert_nothing_left(tmp_path)


@pytest.mark.filterwarnings("ignore:.*returned `None`")
def test_a_step_that_returns_none_is_skipped(tmp_path):
    class Skips(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx % 2 else loss

    _, expected = fit(Skips, "auto", tmp_path)
    for activations in ("auto", "offload"):
        strategy = offload_strategy(tmp_path, activations=activations)
        _, module = fit(Skips, strategy, tmp_path)
        assert_identical(result(module), result(expected))
    assert strategy.stats.bytes_read + strategy.stats.bytes_forwarded > 0


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
    assert seen["where"].endswith(str(tmp_path))
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


# -- compiled modules -------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # of whole modules, and of what PyTorch does while it compiles them
def test_a_step_within_a_compiled_training_step_is_refused(tmp_path):
    strategy = offload_strategy(tmp_path, optimizer_states="offload")
    with pytest.raises(ConfigError, match=r"AdamW runs under torch\.compile.*block\.compile\(\)"):
        fit(lambda: torch.compile(ManualNet(), backend="eager"), strategy, tmp_path, max_steps=1)
