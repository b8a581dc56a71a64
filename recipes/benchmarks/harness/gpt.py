"""A GPT-2 of plain PyTorch, for machines without ``transformers``: the same sizes, weights of its own."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["GPT"]


class Block(nn.Module):
    """Attention, then a feed-forward network, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.c_attn(self.ln_1(x)).view(batch, length, 3, self._heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*parts.unbind(), is_causal=True)
        x = x + self.c_proj(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.c_out(functional.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Called as ``transformers.GPT2LMHeadModel`` is, as far as the benchmarks do; blocks are ``transformer.h``."""

    def __init__(self, *, layers: int, width: int, heads: int, sequence: int, vocabulary: int) -> None:
        super().__init__()
        self.transformer = nn.Module()
        self.transformer.wte = nn.Embedding(vocabulary, width)
        self.transformer.wpe = nn.Embedding(sequence, width)
        self.transformer.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.transformer.ln_f = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        """The loss of predicting each token from those before it."""
        parts = self.transformer
        x = parts.wte(input_ids) + parts.wpe(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in parts.h:
            x = block(x)
        logits = functional.linear(parts.ln_f(x), parts.wte.weight)  # as in GPT-2: one matrix for both ends
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss, logits=logits)
