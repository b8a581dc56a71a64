"""Ways of optimizing with Lightning: all on SSD, with the bits of the plain strategy."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn

from tests.parity.lightning_pairs import EVERYTHING_EXHAUSTIVELY, MARKS, all_on_ssd, both
from tests.support.helpers import assert_identical
from tests.support.trainers import (
    WIDTH,
    Block,
    ManualNet,
    Net,
    fit,
    result,
)

pytestmark = [*MARKS, *EVERYTHING_EXHAUSTIVELY]


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
