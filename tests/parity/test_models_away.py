"""The model families that people train with weights, gradients and states in files: the bits of plain training."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_ssd.parameters.files.mapped_storage import is_mapped
from tests.parity import models
from tests.parity.test_models import TRAININGS
from tests.support.everything_away import OPTIMIZERS, all_away, away_from_device, large, storage_bytes, train
from tests.support.helpers import Training, assert_identical


def perceptrons_training() -> Training:
    """Residual blocks with dropout."""

    def model() -> nn.Module:
        torch.manual_seed(4)
        return models.Perceptrons(dropout=0.1)

    return Training(model, lambda step: {"x": models.floats(step, 6, 40)}, models.mean_square)


pytestmark = pytest.mark.usefixtures("many_subgroups")

FAMILIES: dict[str, Callable[[], Training]] = TRAININGS | {"perceptrons": perceptrons_training}
WHAT = ("all", "head", "adapters")
ACTIVATIONS = ("keep", "offload", "recompute")
REPEATED = {"gpt2-960": "GPT2Block", "lstm": "LSTM"}
"""Classes of blocks where a model has only one of a kind."""


class Corrected(nn.Module):
    """A frozen layer with a trained correction of low rank, as in LoRA, whatever its input's last dimension means."""

    def __init__(self, frozen: nn.Module, sizes: tuple[int, int], rank: int = 8) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(sizes[0], rank, bias=False)
        self.up = nn.Linear(rank, sizes[1], bias=False)

    @property
    def weight(self) -> nn.Parameter:
        """That of the layer, whose type T5 looks at."""
        return self.frozen.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.frozen(x)
        if x.dim() == 4:  # channels are the second dimension of images
            correction = self.up(self.down(x.movedim(1, -1))).movedim(-1, 1)
            return y + nn.functional.adaptive_avg_pool2d(correction, y.shape[-2:])
        return y + self.up(self.down(x)) * 0.5


def sizes_of(layer: nn.Module) -> tuple[int, int] | None:
    """What a layer takes and gives, if it can be corrected."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    if isinstance(layer, nn.Conv2d):
        return layer.in_channels, layer.out_channels
    if type(layer).__name__ == "Conv1D":  # of transformers: a linear layer, transposed
        return layer.weight.shape[0], layer.weight.shape[1]
    return None


def adapted(model: nn.Module) -> nn.Module:
    """Everything frozen; linear layers and convolutions get corrections."""
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            sizes = sizes_of(layer)
            if sizes is not None and not isinstance(parent, Corrected):
                setattr(parent, name, Corrected(layer, sizes))
    return model


def headed(model: nn.Module) -> nn.Module:
    """All but the last module with parameters is frozen. A head that is tied to an embedding trains that, too."""
    model.requires_grad_(False)
    last = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))][-1]
    last.requires_grad_(True)
    return model


PREPARE: dict[str, Callable[[nn.Module], nn.Module]] = {
    "all": lambda model: model,
    "head": headed,
    "adapters": adapted,
}
SAMPLE = {
    ("gpt2", "all", "recompute", "sgd"),
    ("gpt2-eager-attention-dropout", "adapters", "offload", "adamw"),
    ("bert", "head", "recompute", "adamw"),
    ("t5", "all", "offload", "adafactor"),
    ("llama-grouped-queries", "adapters", "recompute", "adamw"),
    ("llama-grouped-queries", "all", "keep", "adamw"),
    ("convolutions-channels-last", "all", "offload", "sgd"),
    ("lstm", "all", "recompute", "adafactor"),
    ("perceptrons", "head", "keep", "sgd"),
}
PRODUCT = list(product(FAMILIES, WHAT, ACTIVATIONS, OPTIMIZERS))
assert set(PRODUCT) >= SAMPLE


@pytest.mark.parametrize(
    ("family", "what", "activations", "optimizer"),
    [case if case in SAMPLE else pytest.param(*case, marks=pytest.mark.exhaustive) for case in PRODUCT],
)
def test_training_is_exact(family: str, what: str, activations: str, optimizer: str, tmp_path: Path) -> None:
    """Losses, gradients, norms, weights and states."""
    training = FAMILIES[family]()
    steps = (lambda: PREPARE[what](training.make_model())), training.make_batch, training.loss
    expected = train(*steps, optimizer=optimizer).result()
    repeated = {"recompute_modules": REPEATED[family]} if activations == "recompute" and family in REPEATED else {}
    with all_away(tmp_path, activations=activations, **repeated) as offloader:
        trained = train(*steps, offloader, optimizer=optimizer)
        assert_identical(trained.result(), expected)
        assert all(norm > 0 for norm in expected["norms"])
        waiting = large(trained.model)
        assert waiting
        assert all(is_mapped(parameter.untyped_storage()) for parameter in waiting)
        assert offloader.stats.weights_bytes == storage_bytes(waiting)
        assert trained.num_mapped >= len(large(trained.model, trained=True))
        assert offloader.stats.failures == 0
        if what == "all" and optimizer != "adafactor":  # whose states are too small to leave
            assert offloader.optimizer_stats[0].written_bytes > 0


ON_DEVICE = {
    ("gpt2", "all", "keep", "adamw"),
    ("gpt2", "head", "recompute", "adamw"),
    ("gpt2-960", "adapters", "recompute", "sgd"),
    ("gpt2-eager-attention-dropout", "all", "offload", "sgd"),
    ("bert", "all", "recompute", "adamw"),
    ("t5", "all", "offload", "adafactor"),
    ("llama-grouped-queries", "adapters", "keep", "adamw"),
    ("convolutions-channels-last", "all", "keep", "sgd"),
    ("lstm", "all", "offload", "adamw"),
    ("perceptrons", "head", "recompute", "adamw"),
}
assert set(PRODUCT) >= ON_DEVICE


@pytest.mark.parametrize(
    ("family", "what", "activations", "optimizer"),
    [case if case in ON_DEVICE else pytest.param(*case, marks=pytest.mark.exhaustive) for case in PRODUCT],
)
def test_training_away_from_a_device_is_exact(
    family: str, what: str, activations: str, optimizer: str, tmp_path: Path
) -> None:
    """The same with weights and states alone, on a device whose copies end late."""
    training = FAMILIES[family]()
    steps = (lambda: PREPARE[what](training.make_model())), training.make_batch, training.loss
    expected = train(*steps, optimizer=optimizer).result()
    repeated = {"recompute_modules": REPEATED[family]} if activations == "recompute" and family in REPEATED else {}
    with away_from_device(tmp_path, activations=activations, **repeated) as offloader:
        trained = train(*steps, offloader, optimizer=optimizer)
        assert_identical(trained.result(), expected)
        assert offloader.stats.weights_bytes == storage_bytes(large(trained.model))
        assert offloader.stats.failures == 0
