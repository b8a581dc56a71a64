"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685): a frozen linear layer and two small trained matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from recipes.mistakes import ConfigMistake

__all__ = ["LoRA", "LoRALayer", "add_adapters"]


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Settings of the adapters."""

    rank: int = 8
    """Of each adapter's matrices."""
    alpha: float = 16.0
    """An adapter's output is scaled by ``alpha / rank``, so that another rank needs no other learning rate."""
    target_modules: Sequence[str] | None = None
    """Names of the layers that get an adapter, or ends of them (``c_attn``, ``mlp.c_fc``); ``None``: every linear layer
    but the output head."""


class LoRALayer(nn.Module):
    """A linear layer with an adapter beside it, which begins as nothing.

    The adapter is float32 whatever the layer is: AdamW's small updates would be lost in bfloat16.

    Args:
        base: the layer. It is neither changed nor frozen here.
        rank: of the adapter.
        scale: of the adapter's output.
    """

    def __init__(self, base: nn.Linear | Conv1D, *, rank: int, scale: float) -> None:
        super().__init__()
        # Conv1D, of GPT-2, keeps its weight the other way round.
        out_features, in_features = base.weight.shape if isinstance(base, nn.Linear) else base.weight.T.shape
        self.base = base
        self.scale = scale
        self.down = nn.Parameter(torch.empty(rank, in_features, dtype=torch.float32))
        self.up = nn.Parameter(torch.zeros(out_features, rank, dtype=torch.float32))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    @property
    def weight(self) -> Tensor:
        """Of the layer; some architectures ask for its type."""
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        """What the layer says, and the adapter's part."""
        y = cast(Tensor, self.base(x))
        change = functional.linear(functional.linear(x.to(self.down.dtype), self.down), self.up)
        return y + (self.scale * change).to(y.dtype)


def add_adapters(network: PreTrainedModel, settings: LoRA) -> None:
    """Put an adapter beside each layer that the settings name. Nothing else of the network changes.

    Raises:
        ConfigMistake: a name is that of no linear layer.
    """
    head = cast(Any, network).get_output_embeddings()
    linear = {name: layer for name, layer in network.named_modules() if isinstance(layer, nn.Linear | Conv1D)}
    if settings.target_modules is None:
        chosen = [name for name, layer in linear.items() if layer is not head]
    else:
        chosen = [name for name in linear if any(_is_named(name, target) for target in settings.target_modules)]
        for target in settings.target_modules:
            if not any(_is_named(name, target) for name in linear):
                known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
                raise ConfigMistake(
                    f"model.lora.target_modules: {target!r} is the name of no linear layer of "
                    f"{type(network).__name__}; allowed: {known}, or null for all but the output head"
                )
    for name in chosen:
        parent, _, own = name.rpartition(".")
        layer = LoRALayer(linear[name], rank=settings.rank, scale=settings.alpha / settings.rank)
        setattr(network.get_submodule(parent), own, layer)


def _is_named(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")
