"""Whole Lightning trainings with optimizer states on SSD: bit for bit what they are without us, and counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, LearningRateMonitor, ModelCheckpoint, WeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import Strategy
from torch.optim import Optimizer

from lightning_ssd import OffloadMonitor
from lightning_ssd.errors import ConfigError
from tests.parity.states_on_ssd import MARKS, assert_moved, everything, offloaded, states_on_ssd
from tests.support.helpers import assert_identical
from tests.support.leftovers import assert_nothing_left
from tests.support.trainers import LBFGSNet, ManualNet, Net, fit, make_trainer

pytestmark = MARKS

Make = Callable[[], Net]


def assert_same(make: Make, directory: Path, settings: Callable[[], dict[str, Any]] = dict) -> list[dict[str, Any]]:
    """Losses, weights and states of a plain training, and of ours with activations in memory and on SSD.

    Returns:
        The settings of the three trainings, with their callbacks.
    """
    used = [settings() for _ in range(3)]
    expected = everything(*fit(make, "auto", directory / "plain", **used[0]))
    assert len(expected["losses"]) > 1
    for activations, more in zip(("keep", "offload"), used[1:], strict=True):
        strategy = states_on_ssd(directory, activations)
        trainer, module = fit(make, strategy, directory / activations, **more)
        assert_identical(everything(trainer, module), expected)
        assert_moved(trainer)
        assert (strategy.stats.bytes_written > 0) == (activations == "offload")
    return used


# -- ways to train -----------------------------------------------------------------------------------------------------


class Scheduled(Net):
    """A learning rate that changes."""

    def __init__(self, interval: str) -> None:
        super().__init__()
        self.interval = interval

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
        decay = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, decay], [3])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


class OnPlateau(Net):
    """A scheduler that looks at a metric."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        config = {"scheduler": scheduler, "monitor": "train/loss", "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": config}


class Fused(Net):
    """Whose optimizer unscales gradients itself."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        pytest.param(Net, {"accumulate_grad_batches": 2, "max_epochs": 2}, id="accumulation"),
        pytest.param(Net, {"gradient_clip_val": 0.01}, id="clip-norm"),
        pytest.param(Net, {"gradient_clip_val": 1e-4, "gradient_clip_algorithm": "value"}, id="clip-value"),
        pytest.param(Net, {"precision": "bf16-mixed"}, id="bf16-mixed"),
        pytest.param(Net, {"precision": "bf16-true"}, id="bf16-true"),
        pytest.param(lambda: Scheduled("epoch"), {"max_epochs": 5, "limit_train_batches": 2}, id="scheduler-per-epoch"),
        pytest.param(OnPlateau, {}, id="scheduler-on-plateau"),
        pytest.param(Fused, {}, id="fused"),
        pytest.param(ManualNet, {}, id="manual-two-optimizers"),
        pytest.param(lambda: ManualNet(through_lightning=False), {}, id="manual-own-backward"),
    ],
)
def test_bits_of_plain_training(make: Make, settings: dict[str, Any], spill_dir: Path) -> None:
    assert_same(make, spill_dir, lambda: settings)


@pytest.mark.parametrize("make", [lambda: Scheduled("step"), Net, ManualNet], ids=["scheduler", "none", "two"])
def test_the_learning_rate_monitor_sees_what_it_would_see_without_us(make: Make, spill_dir: Path) -> None:
    def settings() -> dict[str, Any]:
        monitor = LearningRateMonitor("step", log_momentum=True)
        return {"callbacks": [monitor], "logger": CSVLogger(spill_dir), "log_every_n_steps": 1}

    plain, *ours = [used["callbacks"][0] for used in assert_same(make, spill_dir, settings)]
    assert plain.lrs
    for monitor in ours:
        assert monitor.lrs == plain.lrs
        assert monitor.last_momentum_values == plain.last_momentum_values


def test_averaged_weights(spill_dir: Path) -> None:
    assert_same(Net, spill_dir, lambda: {"callbacks": [WeightAveraging()], "max_epochs": 2})


class Overflows(Net):
    """One step has gradients that are no numbers."""

    def on_after_backward(self) -> None:
        if len(self.losses) == 3:
            self.head.weight.grad.fill_(torch.inf)  # type: ignore[union-attr]


class FusedOverflows(Overflows, Fused):
    """The scaler tells its optimizer, instead of leaving the step out."""


@pytest.mark.parametrize("make", [Overflows, FusedOverflows])
def test_a_scaler_scales_and_skips(make: Make, spill_dir: Path) -> None:
    plugins = []

    def settings() -> dict[str, Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        plugins.append(MixedPrecision("16-mixed", "cpu", scaler))
        return {"plugins": [plugins[-1]], "max_epochs": 2}

    assert_same(make, spill_dir, settings)
    scales = [plugin.scaler.get_scale() for plugin in plugins]
    assert scales == [scales[0]] * 3
    assert scales[0] == 2.0**9, "no step was skipped, or more than one"


class Unfreezes(BaseFinetuning):
    """The first block joins after the first epoch, as a group of its own."""

    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, Net)
        self.freeze(pl_module.blocks[0])

    def finetune_function(self, pl_module: L.LightningModule, epoch: int, optimizer: Optimizer) -> None:
        assert isinstance(pl_module, Net)
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.blocks[0], optimizer, lr=1e-3)


class Finetuned(Net):
    """Trains what is not frozen when the optimizer is made."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def test_frozen_parameters_join_later(spill_dir: Path) -> None:
    assert_same(Finetuned, spill_dir, lambda: {"callbacks": [Unfreezes()], "max_epochs": 3})


def test_a_resumed_finetuning_has_its_groups_and_states(spill_dir: Path) -> None:
    """The callback puts groups into ``param_groups`` after the wrapping and before the states are loaded."""

    def settings(name: str, epochs: int) -> dict[str, Any]:
        saving = ModelCheckpoint(spill_dir / name, save_last=True)
        return {"callbacks": [Unfreezes(), saving], "enable_checkpointing": True, "max_epochs": epochs}

    fit(Finetuned, states_on_ssd(spill_dir), spill_dir, **settings("ours", 2))
    results = []
    for strategy in ("auto", states_on_ssd(spill_dir)):
        L.seed_everything(7, verbose=False)
        module = Finetuned()
        trainer = make_trainer(strategy, spill_dir, **settings("more", 3))
        trainer.fit(module, ckpt_path=spill_dir / "ours" / "last.ckpt", weights_only=False)
        results.append(everything(trainer, module))
    expected, got = results
    assert len(expected["optimizers"][0]["param_groups"]) == 2
    assert len(expected["optimizers"][0]["state"]) == 22
    assert_identical(got, expected)


# -- the life of the files ---------------------------------------------------------------------------------------------


def test_fit_twice(spill_dir: Path) -> None:
    def twice(strategy: Strategy | str) -> tuple[L.Trainer, Net]:
        trainer, module = fit(Net, strategy, spill_dir)
        first = trainer.optimizers
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module)
        assert trainer.optimizers[0] is not first[0]
        return trainer, module

    expected = everything(*twice("auto"))
    trainer, module = twice(states_on_ssd(spill_dir))
    assert_identical(everything(trainer, module), expected)
    assert_moved(trainer)
    assert_nothing_left(spill_dir)


def test_validate_and_test_after_fit(spill_dir: Path) -> None:
    seen = []
    for strategy in ("auto", states_on_ssd(spill_dir)):
        trainer, module = fit(Net, strategy, spill_dir)
        module.losses.clear()
        trainer.validate(module, verbose=False)
        trainer.test(module, verbose=False)
        seen.append((module.losses, trainer.predict(module)))
        if strategy != "auto":
            assert_nothing_left(spill_dir)
            assert len(offloaded(trainer)[0].state_dict()["state"]) > 20
    assert_identical(seen[1], seen[0])


def test_what_couples_parameters_is_refused_before_the_first_step(spill_dir: Path) -> None:
    made: list[Net] = []

    def make() -> Net:
        made.append(LBFGSNet())
        return made[0]

    with pytest.raises(ConfigError, match=r"LBFGS.*optimizer_states='keep'"):
        fit(make, states_on_ssd(spill_dir), spill_dir)
    assert not made[0].losses
    assert_nothing_left(spill_dir)


class Breaks(torch.optim.AdamW):
    """Fails half way through its second step."""

    num_left: int | None = None  # of the class: an attribute of the optimizer counts steps, as in plain training

    def step(self, closure: Any = None) -> Any:
        if Breaks.num_left == 0:
            raise ZeroDivisionError("sabotage")
        Breaks.num_left = None if Breaks.num_left is None else Breaks.num_left - 1
        return super().step(closure)


class Broken(Net):
    def configure_optimizers(self) -> Any:
        return Breaks(self.parameters(), lr=1e-2)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_within_a_step_reaches_the_user_and_leaves_nothing(
    spill_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half the parameters are updated: there is nothing to save, and the error must not be hidden by a second one."""
    trainers: list[L.Trainer] = []

    class Notes(L.Callback):
        def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            trainers.append(trainer)

        def on_train_batch_start(
            self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, index: int
        ) -> None:
            monkeypatch.setattr(Breaks, "num_left", 1 if index else None)  # the first step is rehearsed

    with pytest.raises(ZeroDivisionError, match="sabotage"):
        fit(Broken, states_on_ssd(spill_dir), spill_dir, callbacks=[Notes()])
    assert_nothing_left(spill_dir)
    with pytest.raises(RuntimeError, match="incomplete"):
        trainers[0].save_checkpoint(spill_dir / "broken.ckpt")
    assert not list(spill_dir.glob("*.ckpt"))
    assert not list(spill_dir.glob(".*.ckpt*"))


# -- numbers -----------------------------------------------------------------------------------------------------------


class Rows(CSVLogger):
    """Keeps what the monitor tells."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.ours: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:  # type: ignore[override]
        if "wear/written_tb" in metrics:
            self.ours.append(metrics)
        super().log_metrics(metrics, step)


@pytest.mark.parametrize("activations", ["keep", "offload"])
def test_the_monitor_counts_what_optimizers_write(activations: str, spill_dir: Path) -> None:
    rows = Rows(spill_dir / "logs")
    strategy = states_on_ssd(spill_dir, activations, drive_endurance="600TB")
    monitor = OffloadMonitor()
    settings = {"logger": rows, "log_every_n_steps": 1, "callbacks": [monitor]}
    trainer, _ = fit(ManualNet, strategy, spill_dir, **settings)
    states = [optimizer.stats for optimizer in offloaded(trainer)]
    written = strategy.stats.bytes_written + sum(stats.written_bytes for stats in states)
    read = strategy.stats.bytes_read + sum(stats.read_bytes for stats in states)
    # The last writes and reads may end after the last row.
    told = {key: 2**30 * sum(row[f"io/{key}_gib"] for row in rows.ours) for key in ("write", "read")}
    assert written - 2 * states[0].state_bytes <= told["write"] <= written
    assert read - 2 * states[0].state_bytes <= told["read"] <= read
    assert told["read"] > 2 * states[0].state_bytes
    assert rows.ours[-1]["wear/written_tb"] == pytest.approx(told["write"] / 1e12)
    assert rows.ours[-1]["wear/drive_life_days"] > 0
    assert any("io/read_gib_per_s" in row for row in rows.ours), "no event of an optimizer's tier"
    assert sum(row["io/stall_s"] for row in rows.ours) >= 0.5 * sum(stats.stall_s for stats in states)
    assert "optimizer states: at most " in str(monitor.summary)
    assert told["write"] <= monitor.state_dict()["written_bytes"] <= written
    offloader = strategy.offloader
    assert offloader is not None
    assert offloader.optimizer_stats == tuple(states), "the numbers of the end are gone with the files"
