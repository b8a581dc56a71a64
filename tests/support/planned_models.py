"""What ``lightning-ssd plan --model tests.support.planned_models:NAME`` is tried with."""

from __future__ import annotations

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


NOT_CALLABLE = 3
