"""Features of Lightning, one by one: with activations and optimizer states on SSD the bits of the plain strategy."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.strategies import Strategy

from lightning_ssd.errors import BudgetError
from tests.parity.lightning_pairs import MARKS, Settings, all_on_ssd, both, everything
from tests.support.helpers import assert_identical
from tests.support.trainers import (
    BAREBONES,
    BATCH_SIZE,
    NUM_BATCHES,
    Block,
    ManualNet,
    Net,
    fit,
    make_trainer,
)

pytestmark = [*MARKS, pytest.mark.usefixtures("what_is_away")]


# -- what the Trainer is told -----------------------------------------------------------------------------------------

TRAINER_SETTINGS: dict[str, Settings] = {
    "accumulation-scheduler": lambda d: {
        "callbacks": [GradientAccumulationScheduler({0: 1, 1: 4})],
        "max_epochs": 2,
    },
    "clipping-by-value": lambda d: {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
    "64-true": lambda d: {"precision": "64-true"},
    "16-true": lambda d: {"precision": "16-true"},
    "16-mixed": lambda d: {"precision": "16-mixed"},
    "overfit-batches": lambda d: {"overfit_batches": 2, "max_epochs": 2, "limit_train_batches": None},
    "fast-dev-run": lambda d: {"fast_dev_run": 3, "limit_train_batches": None, "limit_val_batches": None},
    "detect-anomaly": lambda d: {"detect_anomaly": True, "limit_train_batches": 2},
    "deterministic": lambda d: {"deterministic": True, "benchmark": False},
    "sanity-check-and-validation-within-an-epoch": lambda d: {"num_sanity_val_steps": 2, "val_check_interval": 2},
    "simple-profiler": lambda d: {"profiler": SimpleProfiler(d, "profile")},
    "advanced-profiler": lambda d: {"profiler": AdvancedProfiler(d, "profile"), "limit_train_batches": 2},
    "pytorch-profiler": lambda d: {
        "profiler": PyTorchProfiler(d, "profile", export_to_chrome=False),
        "limit_train_batches": 2,
    },
    "early-stopping": lambda d: {
        "callbacks": [EarlyStopping("val/loss", patience=1, min_delta=1e9)],
        "max_epochs": 9,
    },
    "averaging": lambda d: {
        "callbacks": [StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1)],
        "max_epochs": 3,
    },
}


@pytest.mark.parametrize("name", TRAINER_SETTINGS)
@pytest.mark.filterwarnings("ignore:You requested to overfit but enabled train dataloader shuffling")
@pytest.mark.filterwarnings("ignore:You passed `Trainer.accelerator='cpu', precision='16-mixed'")
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
@pytest.mark.filterwarnings("ignore:Swapping scheduler")
@pytest.mark.filterwarnings("ignore:The PyTorch Profiler default schedule")
def test_trainer_settings(name: str, tmp_path: Path) -> None:
    both(Net, tmp_path, TRAINER_SETTINGS[name])


@pytest.mark.filterwarnings("ignore:.*no-op when using barebones")
@pytest.mark.filterwarnings("ignore:You are trying to `self.log.*barebones")
@pytest.mark.filterwarnings("ignore:.*no-op if `Trainer.barebones=True.`")
def test_barebones(tmp_path: Path) -> None:
    both(Net, tmp_path, lambda d: BAREBONES)


# -- callbacks that change the model or the optimizer -----------------------------------------------------------------


class WithBackbone(Net):
    """For the finetuning callback, which wants a module of this name, and optimizers without it."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.backbone(x))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def test_backbone_finetuning(tmp_path: Path) -> None:
    def settings(directory: Path) -> dict[str, Any]:
        return {"callbacks": [BackboneFinetuning(1, lambda epoch: 1.5, verbose=False)], "max_epochs": 3}

    _, (trainer, _) = both(WithBackbone, tmp_path, settings)
    assert len(trainer.optimizers[0].param_groups) == 2


@pytest.mark.parametrize("lottery", [False, True])
@pytest.mark.parametrize("permanent", [False, True])
def test_pruning(lottery: bool, permanent: bool, tmp_path: Path) -> None:
    """While it trains, a pruned weight is the product of a parameter and a mask, made anew in each forward."""

    class Prunes(ModelPruning):
        def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
            assert isinstance(pl_module, Net)
            self._parameters_to_prune = [(block.up, "weight") for block in pl_module.blocks]  # type: ignore[misc]
            super().setup(trainer, pl_module, stage)

    def settings(directory: Path) -> dict[str, Any]:
        pruning = Prunes(
            "l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=lottery, make_pruning_permanent=permanent
        )
        return {"callbacks": [pruning], "max_epochs": 2}

    _, (_, module) = both(Net, tmp_path, settings)
    weight = module.blocks[0].up.weight
    assert (weight == 0).float().mean() > 0.3 - 1e-3


class WithRate(Net):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-3

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
def test_learning_rate_finder(tmp_path: Path) -> None:
    def settings(directory: Path) -> dict[str, Any]:
        finder = LearningRateFinder(num_training_steps=16, early_stop_threshold=None)
        return {"callbacks": [finder], "limit_val_batches": 0, "limit_train_batches": 1.0, "max_epochs": 3}

    (_, plain), (_, ours) = both(WithRate, tmp_path, settings)
    assert ours.lr == plain.lr != 1e-3


# -- the batch-size finder ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_a_budget_bounds_the_batch_size(mode: str, tmp_path: Path) -> None:
    """A batch for which no plan keeps the budget is too large to the finder, as one that does not fit into memory."""
    finder = BatchSizeFinder(mode, steps_per_trial=2, init_val=16, margin=0.0, max_val=4096)  # type: ignore[arg-type]
    budget = partial(all_on_ssd, tmp_path, activations="auto", activation_budget=300_000)
    _, module = fit(Net, budget(), tmp_path, callbacks=[finder], limit_val_batches=0)
    assert 16 <= module.batch_size < 384, "the budget did not bound it"
    assert finder.optimal_batch_size == module.batch_size
    large, strategy = partial(Net, batch_size=NUM_BATCHES * BATCH_SIZE), budget()
    with pytest.raises(BudgetError, match="activation_budget"):  # and without the finder it is an error
        fit(large, strategy, tmp_path, limit_val_batches=0, max_epochs=99)


# -- checkpoints and several runs --------------------------------------------------------------------------------------


class Failing(Net):
    """Until it is mended, in the fourth step."""

    is_mended = False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 3 and not self.is_mended:
            raise ZeroDivisionError("on purpose")


@pytest.mark.filterwarnings(r"ignore:`.fit\(ckpt_path=None\)` was called without a model")
@pytest.mark.filterwarnings(r"ignore:.fit\(ckpt_path=.last.\) is set, but there is no last checkpoint")
def test_a_checkpoint_on_exception_is_the_plain_one_and_training_goes_on_within_the_epoch(tmp_path: Path) -> None:
    results = {}
    for name in ("plain", "ours"):
        directory = tmp_path / name

        def strategy(name: str = name, directory: Path = directory) -> Strategy | str:
            return "auto" if name == "plain" else all_on_ssd(directory)

        callback = OnExceptionCheckpoint(directory, "failed")
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            fit(Failing, strategy(), directory, callbacks=[callback], enable_checkpointing=True)
        saved = torch.load(directory / "failed.ckpt", weights_only=False)
        L.seed_everything(8, verbose=False)
        module = Failing()
        module.is_mended = True
        trainer = make_trainer(strategy(), directory, max_epochs=2)
        trainer.fit(module, ckpt_path=directory / "failed.ckpt")
        assert trainer.global_step == 2 * NUM_BATCHES
        results[name] = {key: saved[key] for key in ("state_dict", "optimizer_states", "loops", "global_step")}
        results[name] |= everything(trainer, module)
    assert results["plain"]["global_step"] == 3
    assert len(results["plain"]["losses"]) > NUM_BATCHES
    assert_identical(results["ours"], results["plain"])


def test_resuming_within_an_epoch(tmp_path: Path) -> None:
    """From a checkpoint of the third of six steps, on whichever strategy, whoever wrote it."""

    def strategy(name: str) -> Strategy | str:
        return "auto" if name == "plain" else all_on_ssd(tmp_path)

    results = []
    for writer in ("plain", "ours"):
        saving = ModelCheckpoint(tmp_path / writer, every_n_train_steps=3, save_top_k=-1, filename="{step}")
        fit(Net, strategy(writer), tmp_path, callbacks=[saving], enable_checkpointing=True)
        for reader in ("plain", "ours"):
            L.seed_everything(8, verbose=False)
            module = Net()
            trainer = make_trainer(strategy(reader), tmp_path)
            trainer.fit(module, ckpt_path=tmp_path / writer / "step=3.ckpt")
            results.append(everything(trainer, module))
    expected, *others = results
    assert len(expected["losses"]) >= 3
    for other in others:
        assert_identical(other, expected)


def test_fit_validate_fit_again_test_and_predict(tmp_path: Path) -> None:
    seen = {}
    for name, strategy in (("plain", "auto"), ("ours", all_on_ssd(tmp_path))):
        trainer, module = fit(Net, strategy, tmp_path / name)
        outputs: list[Any] = [trainer.validate(module, verbose=False)]
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module)
        outputs += [trainer.test(module, verbose=False), trainer.predict(module)]
        seen[name] = everything(trainer, module) | {"outputs": outputs}
    assert_identical(seen["ours"], seen["plain"])


# -- what others wrap --------------------------------------------------------------------------------------------------


def test_backward_stays_lightnings_own(tmp_path: Path) -> None:
    """Who puts something in the place of ``Strategy.backward`` that calls ours is not called by ours again."""
    strategy = all_on_ssd(tmp_path)
    with mock.patch.object(Strategy, "backward", wraps=strategy.backward) as seen:
        _, module = fit(ManualNet, strategy, tmp_path, limit_val_batches=0)
    assert seen.call_count == len(module.losses) == 2 * NUM_BATCHES
    assert strategy._session is not None
    assert strategy._session.num_borders == 2 * NUM_BATCHES


def test_an_exception_reaches_lightnings_own_strategy(tmp_path: Path) -> None:
    with mock.patch.object(Strategy, "on_exception") as seen, pytest.raises(ZeroDivisionError) as raised:
        fit(Failing, all_on_ssd(tmp_path), tmp_path)
    seen.assert_called_once_with(raised.value)
