"""Features of Lightning, one by one: with activations and optimizer states on SSD the bits of the plain strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ssd import HardwareProfile, OffloadPolicy
from lightning_ssd.errors import BudgetError
from lightning_ssd.optimizer import OffloadedOptimizer
from lightning_ssd.strategy import SSDOffloadStrategy
from tests.helpers import assert_identical
from tests.trainers import (
    BATCH_SIZE,
    LIGHTNING_NOISE,
    NUM_BATCHES,
    WIDTH,
    Block,
    ManualNet,
    Net,
    fit,
    make_trainer,
    one_thread,
    result,
)

pytestmark = [
    *(pytest.mark.filterwarnings(noise) for noise in LIGHTNING_NOISE),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended"),
]

SHORT = {"limit_train_batches": 4, "limit_val_batches": 1}

Make = Callable[[], Net]
Settings = Callable[[Path], dict[str, Any]]


@pytest.fixture(autouse=True)
def small_subgroups(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So that the states of small models do not fit into the memory that stays."""
    monkeypatch.setattr("lightning_ssd.paged_states._MIN_SUBGROUP_BYTES", 192 << 10)
    with one_thread():
        yield


class Drains(L.Callback):
    """Backward begins when everything has left, so that it is the drive that gives the bytes back."""

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: torch.Tensor) -> None:
        assert isinstance(trainer.strategy, SSDOffloadStrategy)
        assert trainer.strategy.offloader is not None
        trainer.strategy.offloader.flush()


def all_on_ssd(directory: Path, *, states: bool = True, **policy: Any) -> SSDOffloadStrategy:
    policy = {"activations": "offload", "min_tensor_bytes": 4096} | policy
    return SSDOffloadStrategy(
        policy=OffloadPolicy(optimizer_states="offload" if states else "keep", **policy),
        hardware=HardwareProfile(paths=[directory / "spill"], allow_unsuitable_paths=True),
    )


def everything(trainer: L.Trainer, module: Net) -> dict[str, Any]:
    """What two equal trainings have in common."""
    optimizers = [optimizer.state_dict() for optimizer in trainer.optimizers]
    for saved in optimizers:
        # Plainly in the order in which parameters first got gradients, ours in that of the parameters.
        saved["state"] = dict(sorted(saved.get("state", {}).items()))
    return result(module) | {"optimizers": optimizers}


def assert_moved(trainer: L.Trainer, *, states: bool = True) -> None:
    """A test in which nothing took our way would show nothing."""
    assert isinstance(trainer.strategy, SSDOffloadStrategy)
    stats = trainer.strategy.stats
    assert stats.bytes_written > 0
    assert stats.bytes_read > 0
    assert stats.failures == 0
    for optimizer in trainer.optimizers:
        assert isinstance(optimizer, OffloadedOptimizer) == states
    if states:
        assert sum(optimizer.stats.written_bytes for optimizer in trainer.optimizers) > 0  # type: ignore[attr-defined]


def both(
    make: Make, directory: Path, settings: Settings = lambda directory: {}, *, states: bool = True
) -> tuple[tuple[L.Trainer, Net], tuple[L.Trainer, Net]]:
    """A plain training and ours, with the same losses, weights and states."""
    plain = fit(make, "auto", directory / "plain", **(SHORT | settings(directory / "plain")))
    mine = SHORT | settings(directory / "ours")
    mine["callbacks"] = [*mine.get("callbacks", ()), Drains()]
    ours = fit(make, all_on_ssd(directory, states=states), directory / "ours", **mine)
    assert plain[1].losses
    assert_identical(everything(*ours), everything(*plain))
    assert_moved(ours[0], states=states)
    return plain, ours


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


NOT_WITH_BAREBONES = (
    "enable_progress_bar",
    "logger",
    "enable_checkpointing",
    "enable_model_summary",
    "num_sanity_val_steps",
)


@pytest.mark.filterwarnings("ignore:.*no-op when using barebones")
@pytest.mark.filterwarnings("ignore:You are trying to `self.log.*barebones")
@pytest.mark.filterwarnings("ignore:.*no-op if `Trainer.barebones=True.`")
def test_barebones(tmp_path: Path) -> None:
    both(Net, tmp_path, lambda d: dict.fromkeys(NOT_WITH_BAREBONES) | {"barebones": True})


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


# -- how modules are made ----------------------------------------------------------------------------------------------


class MadeLate(Net):
    """Makes its layers when the strategy asks for them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()

    def configure_model(self) -> None:
        if not len(self.blocks):
            self.blocks = nn.ModuleList(Block() for _ in range(3))


def test_layers_made_in_configure_model(tmp_path: Path) -> None:
    both(MadeLate, tmp_path)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "64-true"])
def test_a_module_made_under_init_module(precision: Any, tmp_path: Path) -> None:
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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lightning_cli_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonargparse", reason="LightningCLI needs jsonargparse")
    from lightning.pytorch.cli import LightningCLI

    class_path = "lightning_ssd.strategy.SSDOffloadStrategy"
    policy = {"activations": "offload", "min_tensor_bytes": 4096, "optimizer_states": "offload"}
    ours = {
        "class_path": class_path,
        "init_args": {"policy": policy, "hardware": {"paths": [str(tmp_path)], "allow_unsuitable_paths": True}},
    }
    monkeypatch.setattr("sys.argv", ["train"])
    seen = []
    for strategy in ("auto", ours):
        settings = {"accelerator": "cpu", "devices": 1, "logger": False, "max_epochs": 1, "num_sanity_val_steps": 0}
        quiet = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        arguments = {"seed_everything": 7, "trainer": {**settings, **quiet, "strategy": strategy}}
        cli = LightningCLI(Net, run=False, save_config_callback=None, args=arguments)
        cli.trainer.fit(cli.model)
        seen.append(everything(cli.trainer, cli.model))
    assert_identical(seen[1], seen[0])
    assert_moved(cli.trainer)


# -- optimizers --------------------------------------------------------------------------------------------------------


class Adversarial(Net):
    """Generator and discriminator, toggled; gradients of the one flow through the other, frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.make, self.judge = Block(), nn.Sequential(Block(), nn.Linear(WIDTH, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        first, second = self.optimizers()
        with self.toggled_optimizer(first):
            made = self.make(real.flip(0))
            loss = nn.functional.softplus(-self.judge(made)).mean()
            self.manual_backward(loss)
            self.clip_gradients(first, 0.1, "norm")
            first.step()
            first.zero_grad()
        with self.toggled_optimizer(second):
            judged = nn.functional.softplus(self.judge(made.detach())).mean()
            judged = judged + nn.functional.softplus(-self.judge(real)).mean()
            self.manual_backward(judged)
            if batch_idx % 2:
                second.step()
                second.zero_grad()
        self.losses += [loss.detach(), judged.detach()]

    def configure_optimizers(self) -> Any:
        first = torch.optim.AdamW(self.make.parameters(), lr=1e-2)
        return first, torch.optim.AdamW(self.judge.parameters(), lr=1e-2)


def test_two_toggled_optimizers(tmp_path: Path) -> None:
    both(Adversarial, tmp_path, lambda d: {"limit_val_batches": 0})


class ClosesOver(ManualNet):
    """Steps with a closure that does forward and backward."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():

            def closure(optimizer: Any = optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss

            optimizer.step(closure=closure)


def test_closures_in_manual_optimization(tmp_path: Path) -> None:
    both(ClosesOver, tmp_path)


class ManyEvaluations(Net):
    """An optimizer that evaluates the model as often as it likes."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")


def test_lbfgs_with_activations_on_ssd(tmp_path: Path) -> None:
    (_, plain), _ = both(ManyEvaluations, tmp_path, lambda d: {"max_steps": 2, "limit_val_batches": 0}, states=False)
    assert len(plain.losses) > 4


class Wrapped(Net):
    """Returns its optimizer in the wrapper that Lightning gives to manual optimization."""

    def configure_optimizers(self) -> Any:
        return LightningOptimizer(super().configure_optimizers())


def test_an_optimizer_that_is_wrapped_already(tmp_path: Path) -> None:
    _, (trainer, _) = both(Wrapped, tmp_path)
    assert type(trainer.optimizers[0].inner) is torch.optim.AdamW  # type: ignore[attr-defined]
    both(Wrapped, tmp_path / "kept", states=False)


class NoOptimizer(Net):
    """Trains nothing; Lightning puts a stand-in in the place of the optimizer."""

    def configure_optimizers(self) -> None:
        return None


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_no_optimizer(tmp_path: Path) -> None:
    both(NoOptimizer, tmp_path, states=False)
    _, ours = fit(NoOptimizer, all_on_ssd(tmp_path), tmp_path)
    _, plain = fit(NoOptimizer, "auto", tmp_path)
    assert_identical(result(ours), result(plain))


class Words(Net):
    """Sparse gradients of an embedding, dense ones of the rest."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.words = nn.Embedding(300, WIDTH, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (x[:, :2].abs() * 100).long().clamp(max=299)
        return super().forward(self.words(rows).sum(1) + x)

    def configure_optimizers(self) -> Any:
        rest = [p for name, p in self.named_parameters() if not name.startswith("words")]
        if self.kind == "sgd":
            return torch.optim.SGD(self.parameters(), lr=1e-2)
        return torch.optim.SparseAdam(self.words.parameters(), lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return super().training_step(batch, batch_idx)
        loss = self.loss(batch)
        self.manual_backward(loss)
        assert self.words.weight.grad is not None
        assert self.words.weight.grad.is_sparse
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()
        return None


class WordsInTurns(Words):
    def __init__(self) -> None:
        super().__init__("adam")
        self.automatic_optimization = False


def test_sparse_gradients_with_two_optimizers(tmp_path: Path) -> None:
    both(WordsInTurns, tmp_path)


def test_sparse_gradients_with_an_optimizer_without_states(tmp_path: Path) -> None:
    both(partial(Words, "sgd"), tmp_path, states=False)


# -- models ------------------------------------------------------------------------------------------------------------


class Branching(Net):
    """How deep it goes depends on what it sees."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        depth = 1 + int(x.abs().sum().item()) % 3
        for block in self.blocks[:depth]:
            x = block(x)
            if x.mean() > 0:
                x = x * torch.sigmoid(x)
        return self.head(self.norm(x))


class Ragged(Net):
    """Batches of different size."""

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        rows = 20 + int(batch[0][0, 0].abs().item() * 1000) % (len(batch[0]) - 20)
        return super().loss([part[:rows] for part in batch])


class Packed(Net):
    """Several sequences in one row, which do not see each other; their lengths differ from batch to batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = (x[:, 0] > 1).long().cumsum(0)  # which sequence a token belongs to
        allowed = ends[:, None] == ends[None, :]
        for block in self.blocks:
            heads = x.view(1, len(x), 4, -1).transpose(1, 2)
            mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=allowed)
            x = block(x + mixed.transpose(1, 2).reshape(x.shape))
        lengths = ends.bincount()
        pooled = torch.segment_reduce(x, "mean", lengths=lengths[lengths > 0])
        return self.head(self.norm(x + pooled.repeat_interleave(lengths[lengths > 0], 0)))


class Adapter(nn.Module):
    """A frozen layer and a trained detour of low rank."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, 16, bias=False)
        self.up = nn.Linear(16, layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(nn.functional.dropout(self.down(x), 0.1, self.training))


class Adapted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.up, block.down = Adapter(block.up), Adapter(block.down)  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class TwoLoaders(Net):
    """A batch of several loaders' batches."""

    def train_dataloader(self) -> Any:
        x = torch.randn(150, WIDTH, generator=torch.Generator().manual_seed(9))
        other = DataLoader(TensorDataset(x, x[:, :1]), batch_size=50)
        return {"one": super().train_dataloader(), "other": other}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return sum(
            super(TwoLoaders, self).training_step(part, batch_idx) for part in batch.values() if part is not None
        )


MODELS: dict[str, Make] = {
    "data-dependent-control-flow": Branching,
    "variable-shapes": Ragged,
    "sequence-packing": Packed,
    "low-rank-adapters": Adapted,
    "several-loaders": TwoLoaders,
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, tmp_path: Path) -> None:
    both(MODELS[name], tmp_path)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(how: str) -> Net:
    module = Net()
    if how == "module":
        module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]  # Lightning's own trouble in a graph
        return torch.compile(module, backend="aot_eager")  # type: ignore[return-value]
    for block in module.blocks:
        block.compile(backend="aot_eager")
    return module


@pytest.mark.parametrize("how", ["module", "blocks"])
@pytest.mark.filterwarnings("ignore:Net is compiled as a whole")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled(how: str, tmp_path: Path) -> None:
    def settings(directory: Path) -> dict[str, Any]:
        return {"limit_train_batches": 3, "limit_val_batches": 0}

    both(partial(compiled, how), tmp_path, settings)


# -- what others wrap --------------------------------------------------------------------------------------------------


def test_backward_stays_lightnings_own(tmp_path: Path) -> None:
    """Who puts something in the place of ``Strategy.backward`` that calls ours is not called by ours again."""
    strategy = all_on_ssd(tmp_path)
    with mock.patch.object(Strategy, "backward", wraps=strategy.backward) as seen:
        _, module = fit(ManualNet, strategy, tmp_path, limit_val_batches=0)
    assert seen.call_count == len(module.losses) == 2 * NUM_BATCHES
    assert strategy.offloader is not None
    assert strategy._num_borders == 2 * NUM_BATCHES


def test_an_exception_reaches_lightnings_own_strategy(tmp_path: Path) -> None:
    with mock.patch.object(Strategy, "on_exception") as seen, pytest.raises(ZeroDivisionError) as raised:
        fit(Failing, all_on_ssd(tmp_path), tmp_path)
    seen.assert_called_once_with(raised.value)
