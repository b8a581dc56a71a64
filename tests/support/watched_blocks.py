"""Models of small blocks, and an observer that remembers what it is told."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from lightning_ssd.common.method_patch import MethodPatch


class Watch:
    """An observer that writes down what it is told."""

    recomputes_all = False

    def __init__(self, *, recompute: bool = False, wants_inputs: bool = False) -> None:
        self.recompute = recompute
        self.wants_inputs = wants_inputs
        self.told: list[Any] = []
        self.num_trials = 0

    def block_enters(self, name: str) -> bool:
        self.told.append(name)
        return self.recompute

    def block_inputs(self, nbytes: int) -> None:
        self.told.append(nbytes)

    def block_is_kept(self) -> None:
        """Somebody else has decided."""

    def block_recomputed(self, sizes: Iterable[int]) -> None:
        """What is told of forward is enough."""

    def block_tried(self, begin_s: float, end_s: float) -> None:
        assert 0 < begin_s < end_s
        self.num_trials += 1

    def block_leaves(self) -> None:
        self.told.append("left")


class Half(nn.Module):
    """A small block."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, *, scale: float = 0.5, extra: Any = None) -> torch.Tensor:
        """Halves."""
        return self.linear(x).tanh() * scale


def chain(num_blocks: int = 2) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*[Half() for _ in range(num_blocks)])


LAYER = functools.partial(nn.TransformerEncoderLayer, 8, 2, 8, batch_first=True)


def nothing_of_ours(model: nn.Module) -> None:
    """Each module has the forward of its class, and knows no other way to be copied than that of its class."""
    for module in model.modules():
        assert not {"forward", "__getstate__", "_compiled_call_impl"} & set(vars(module))
        assert not any(isinstance(value, MethodPatch) for value in vars(module).values())
