"""Features of Lightning, one by one: with activations and optimizer states on SSD the bits of the plain strategy.

Each with activations and states, or with weights and gradients as well, some with activations alone; all combinations
are exhaustive.
"""

from contextlib import nullcontext
from functools import partial
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
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.strategies import Strategy

import tests.parity.lightning_nets as nets
from lightning_ssd.activations import write_group
from lightning_ssd.errors import BudgetError
from tests.parity.lightning_pairs import ALL_AWAY, MARKS, all_on_ssd, assert_moved, both
from tests.support.helpers import assert_identical
from tests.support.trainers import (
    BAREBONES,
    BATCH_SIZE,
    NUM_BATCHES,
    LBFGSNet,
    ManualNet,
    Net,
    everything,
    fit,
    make_trainer,
    result,
)

pytestmark = [*MARKS, pytest.mark.usefixtures("what_is_away")]


def with_(**settings):
    return lambda directory: settings


# -- what the Trainer is told, and what it trains --------------------------------------------------------------------

FEATURES = {
    "accumulation": (Net, with_(accumulate_grad_batches=2, max_epochs=2)),
    "accumulation-scheduler": (
        Net,
        lambda d: {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 4})], "max_epochs": 2},
    ),
    "clipping-by-norm": (Net, with_(gradient_clip_val=0.01)),
    "clipping-by-value": (Net, with_(gradient_clip_val=1e-3, gradient_clip_algorithm="value")),
    **{name: (Net, with_(precision=name)) for name in ("64-true", "16-true", "16-mixed", "bf16-true", "bf16-mixed")},
    "overfit-batches": (Net, with_(overfit_batches=2, max_epochs=2, limit_train_batches=None)),
    "fast-dev-run": (Net, with_(fast_dev_run=3, limit_train_batches=None, limit_val_batches=None)),
    "detect-anomaly": (Net, with_(detect_anomaly=True, limit_train_batches=2)),
    "deterministic": (Net, with_(deterministic=True, benchmark=False)),
    "barebones": (Net, lambda d: BAREBONES),
    "sanity-check-and-validation-within-an-epoch": (Net, with_(num_sanity_val_steps=2, val_check_interval=2)),
    "simple-profiler": (Net, lambda d: {"profiler": SimpleProfiler(d, "profile")}),
    "advanced-profiler": (Net, lambda d: {"profiler": AdvancedProfiler(d, "profile"), "limit_train_batches": 2}),
    "pytorch-profiler": (
        Net,
        lambda d: {"profiler": PyTorchProfiler(d, "profile", export_to_chrome=False), "limit_train_batches": 2},
    ),
    "early-stopping": (
        Net,
        lambda d: {"callbacks": [EarlyStopping("val/loss", patience=1, min_delta=1e9)], "max_epochs": 9},
    ),
    "stochastic-averaging": (
        Net,
        lambda d: {"callbacks": [StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1)], "max_epochs": 3},
    ),
    "averaging": (Net, lambda d: {"callbacks": [WeightAveraging()], "max_epochs": 2}),
    "scheduler-per-epoch": (nets.Scheduled, with_(max_epochs=5, limit_train_batches=2)),
    "scheduler-on-plateau": (nets.OnPlateau, with_()),
    "fused-optimizer": (nets.Fused, with_()),
    "checkpointed-blocks": (partial(Net, checkpointed=True), with_()),
    "manual-optimization": (ManualNet, with_()),
    "manual-optimization-and-backward": (partial(ManualNet, through_lightning=False), with_()),
    "toggled-optimizers": (nets.Adversarial, with_(limit_val_batches=0)),
    "closures": (nets.ClosesOver, with_()),
    "sparse-gradients": (nets.WordsInTurns, with_()),
    "layers-made-in-configure-model": (nets.MadeLate, with_()),
    "data-dependent-control-flow": (nets.Branching, with_()),
    "variable-shapes": (nets.Ragged, with_()),
    "sequence-packing": (nets.Packed, with_()),
    "low-rank-adapters": (nets.Adapted, with_()),
    "several-loaders": (nets.TwoLoaders, with_()),
}


def _rows():
    for number, name in enumerate(FEATURES):
        for turn, away in enumerate(("states", "everything", "activations")):
            yield pytest.param(name, away, marks=() if number % 3 == turn else pytest.mark.exhaustive)


@pytest.mark.parametrize(("name", "what_is_away"), list(_rows()), indirect=["what_is_away"])
@pytest.mark.filterwarnings("ignore:You requested to overfit but enabled train dataloader shuffling")
@pytest.mark.filterwarnings("ignore:You passed `Trainer.accelerator='cpu', precision='16-mixed'")
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
@pytest.mark.filterwarnings("ignore:Swapping scheduler")
@pytest.mark.filterwarnings("ignore:The PyTorch Profiler default schedule")
def test_features(name, tmp_path, monkeypatch):
    # Manual optimization begins its backward within the forward's context: these nets save less than leaves together.
    monkeypatch.setattr(write_group, "_MIN_BYTES", 64 << 10)
    both(FEATURES[name][0], tmp_path, FEATURES[name][1])


# -- ways of making modules -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_a_module_made_under_init_module(precision, tmp_path):
    seen = []
    for strategy in ("auto", all_on_ssd(tmp_path)):
        trainer = make_trainer(strategy, tmp_path, precision=precision, limit_val_batches=0)
        L.seed_everything(7, verbose=False)
        with trainer.init_module():
            module = Net()
        trainer.fit(module)
        seen.append(everything(trainer, module))
    assert_identical(seen[1], seen[0])
    assert_moved(trainer)


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(how):
    module = Net()
    if how == "module":
        module.log = lambda *args, **kwargs: None  # Lightning's own trouble in a graph
        return torch.compile(module, backend="aot_eager")
    for block in module.blocks:
        block.compile(backend="aot_eager")
    return module


@pytest.mark.parametrize("how", ["module", "blocks"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled(how, tmp_path):
    def settings(directory):
        return {"limit_train_batches": 3, "limit_val_batches": 0}

    told = r"Net is compiled as a whole.*for block in model\.blocks: block\.compile"
    with pytest.warns(UserWarning, match=told) if how == "module" else nullcontext():
        both(partial(compiled, how), tmp_path, settings)


# -- callbacks that change the model or the optimizer ----------------------------------------------------------------


@ALL_AWAY
def test_backbone_finetuning(tmp_path):
    def settings(directory):
        return {"callbacks": [BackboneFinetuning(1, lambda epoch: 1.5, verbose=False)], "max_epochs": 3}

    _, (trainer, _) = both(nets.WithBackbone, tmp_path, settings)
    assert len(trainer.optimizers[0].param_groups) == 2


@ALL_AWAY
@pytest.mark.parametrize(("lottery", "permanent"), [(False, True), (True, False)])
def test_pruning(lottery, permanent, tmp_path):
    """While it trains, a pruned weight is the product of a parameter and a mask, made anew in each forward."""

    class Prunes(ModelPruning):
        def setup(self, trainer, pl_module, stage):
            self._parameters_to_prune = [(block.up, "weight") for block in pl_module.blocks]
            super().setup(trainer, pl_module, stage)

    def settings(directory):
        pruning = Prunes(
            "l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=lottery, make_pruning_permanent=permanent
        )
        return {"callbacks": [pruning], "max_epochs": 2}

    _, (_, module) = both(Net, tmp_path, settings)
    weight = module.blocks[0].up.weight
    assert (weight == 0).float().mean() > 0.3 - 1e-3


@ALL_AWAY
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
def test_learning_rate_finder(tmp_path):
    def settings(directory):
        finder = LearningRateFinder(num_training_steps=16, early_stop_threshold=None)
        return {"callbacks": [finder], "limit_val_batches": 0, "limit_train_batches": 1.0, "max_epochs": 3}

    (_, plain), (_, ours) = both(nets.WithRate, tmp_path, settings)
    assert ours.lr == plain.lr != 1e-3


@pytest.mark.parametrize("make", [nets.Overflows, nets.FusedOverflows])
def test_a_scaler_scales_and_skips(make, tmp_path):
    plugins = []

    def settings(directory):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        plugins.append(MixedPrecision("16-mixed", "cpu", scaler))
        return {"plugins": plugins[-1:], "max_epochs": 2}

    both(make, tmp_path, settings)
    scales = [plugin.scaler.get_scale() for plugin in plugins]
    assert scales == [2.0**9] * 2, "no step was skipped, or more than one"


# -- optimizers ------------------------------------------------------------------------------------------------------


def test_lbfgs_with_activations_on_ssd(tmp_path):
    (_, plain), _ = both(LBFGSNet, tmp_path, with_(max_steps=2, limit_val_batches=0), states=False)
    assert len(plain.losses) > 4


def test_an_optimizer_that_is_wrapped_already(tmp_path):
    _, (trainer, _) = both(nets.Wrapped, tmp_path)
    assert type(trainer.optimizers[0].inner) is torch.optim.AdamW
    both(nets.Wrapped, tmp_path / "kept", states=False)


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
@pytest.mark.parametrize("make", [nets.NoOptimizer, nets.Words])
def test_an_optimizer_without_states(make, tmp_path):
    both(make, tmp_path, states=False)


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_no_optimizer_where_states_are_to_leave(tmp_path):
    _, ours = fit(nets.NoOptimizer, all_on_ssd(tmp_path), tmp_path)
    _, plain = fit(nets.NoOptimizer, "auto", tmp_path)
    assert_identical(result(ours), result(plain))


# -- the batch-size finder -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_a_budget_bounds_the_batch_size(mode, tmp_path):
    """A batch for which no plan keeps the budget is too large to the finder, as one that does not fit into memory."""
    finder = BatchSizeFinder(mode, steps_per_trial=2, init_val=16, margin=0.0, max_val=4096)
    budget = partial(all_on_ssd, tmp_path, activations="auto", activation_budget=300_000)
    _, module = fit(Net, budget(), tmp_path, callbacks=[finder], limit_val_batches=0)
    assert 16 <= module.batch_size < 384, "the budget did not bound it"
    assert finder.optimal_batch_size == module.batch_size
    large, strategy = partial(Net, batch_size=NUM_BATCHES * BATCH_SIZE), budget()
    with pytest.raises(BudgetError, match="activation_budget"):  # and without the finder it is an error
        fit(large, strategy, tmp_path, limit_val_batches=0, max_epochs=99)


# -- what others wrap ------------------------------------------------------------------------------------------------


def test_backward_stays_lightnings_own(tmp_path):
    """Who puts something in the place of ``Strategy.backward`` that calls ours is not called by ours again."""
    strategy = all_on_ssd(tmp_path)
    with mock.patch.object(Strategy, "backward", wraps=strategy.backward) as seen:
        _, module = fit(ManualNet, strategy, tmp_path, limit_val_batches=0)
    assert seen.call_count == len(module.losses) == 2 * NUM_BATCHES
    assert strategy._session.num_borders == 2 * NUM_BATCHES


def test_an_exception_reaches_lightnings_own_strategy(tmp_path):
    with mock.patch.object(Strategy, "on_exception") as seen, pytest.raises(ZeroDivisionError) as raised:
        fit(nets.Failing, all_on_ssd(tmp_path), tmp_path)
    seen.assert_called_once_with(raised.value)
