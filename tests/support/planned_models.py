"""What ``lightning-ssd plan --model tests.support.planned_models:NAME`` is tried with."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WIDTH = 1024
NUM_BLOCKS = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Net(nn.Module):
    """Plain PyTorch, with a batch of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))

    def example_batch(self, batch: int, sequence: int) -> torch.Tensor:
        return torch.randn(batch, sequence, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Adapted(Net):
    """Only its biases are trained."""

    def __init__(self) -> None:
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.endswith("bias"))


class NeedsValues(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum().item() > 0 else super().forward(-x)


class NoLoss(Net):
    def forward(self, x: torch.Tensor) -> str:  # type: ignore[override]
        return "done"


def no_model() -> str:
    return "no model"


class TakesPairs(nn.Module):
    """A model of tokens; its ``training_step`` takes what most data sets give."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 100)

    def loss(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, -2), labels.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        tokens, labels = batch
        return self.loss(tokens, labels)


class TakesMappings(TakesPairs):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch["input_ids"], batch["labels"])


class TakesOne(TakesPairs):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (tokens,) = batch
        return self.loss(tokens, tokens)


class TakesTensors(TakesPairs):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch, batch)


class TakesVectors(TakesPairs):
    """Of a batch that only its data module knows."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch["x"].expand(-1, -1, WIDTH).float()
        for block in self.blocks:
            x = block(x)
        return (self.head(x).mean(1) + batch["weights"]).square().mean()


class Data:
    """What ``--data`` asks of a LightningDataModule."""

    def prepare_data(self) -> None:
        self.is_prepared = True

    def setup(self, stage: str) -> None:
        assert stage == "fit"

    def train_dataloader(self) -> list[dict[str, torch.Tensor]]:
        assert self.is_prepared
        return [{"x": torch.zeros(3, 7, 1, dtype=torch.int64), "weights": torch.zeros(3, 1)}]


class NoData(Data):
    def train_dataloader(self) -> list[dict[str, torch.Tensor]]:
        return []


NOT_CALLABLE = 3
