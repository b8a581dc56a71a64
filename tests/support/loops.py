"""One training loop in Fabric, run with Fabric's own strategies and with ours. Importable by started processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn import functional

from lightning_ssd.strategies.fabric import SSDOffloadFabricStrategy
from recipes.determinism import settle_first_calls
from tests.support.trainers import offload_strategy

VOCABULARY, WINDOW, WIDTH = 50, 16, 32


class Block(nn.Module):
    """Of a transformer."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x):
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.second(x))


class Gpt(nn.Module):
    """Tied weights, dropout, a few blocks."""

    def __init__(self, width=WIDTH, window=WINDOW, *, make_block=Block, num_blocks=2):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(window, width)
        self.blocks = nn.ModuleList(make_block(width) for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens) + self.place.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def greedy(self, tokens):
        """A method that calls the modules inside, and is not marked as a forward."""
        return self.head(self.norm(self.embed(tokens))).argmax(-1)


class Conv(nn.Module):
    """Buffers that change in forward."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten()),
        )
        self.head = nn.Linear(8 * 8 * 8, VOCABULARY)

    def forward(self, tokens):
        # Of the precision that the weights have, as Fabric casts inputs only if they are floating.
        pictures = torch.stack([tokens] * WINDOW, 1).unsqueeze(1).to(self.head.weight.dtype) / VOCABULARY
        return self.head(self.body(pictures)).unsqueeze(1).expand(-1, WINDOW, -1)


def batches(number, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (8, WINDOW), generator=generator) for _ in range(number)]


def loss_of(logits, tokens):
    return functional.cross_entropy(logits.float().flatten(0, 1), tokens.roll(-1, 1).flatten())


def ours(directory, *, activations="offload", states="offload", **more):
    """Everything moves; works where the temporary directory is in memory, too."""
    policy = {"activations": activations, "optimizer_states": states, "min_tensor_bytes": 0}
    return offload_strategy(directory, SSDOffloadFabricStrategy, **policy, **more)


def make_fabric(strategy, **settings):
    settings = {"accelerator": "cpu", "devices": 1, **settings}
    return Fabric(strategy=strategy, **settings)


def drain(fabric):
    """Between forward and backward: from here on only the disk has what was queued."""
    offloader = getattr(fabric.strategy, "offloader", None)
    if offloader is not None:
        offloader.flush()


@dataclass
class Loop:
    """What a user writes. Everything it needs is made anew for each run."""

    make: Callable[[], nn.Module] = Gpt
    num_steps: int = 3
    num_micro_batches: int = 1
    clip: dict[str, float] = field(default_factory=dict)
    own_backward: bool = False
    prepare: Callable[[nn.Module], Any] = lambda module: module

    def __call__(self, fabric, *, seed=0):
        """Train; returns what there is to compare."""
        settle_first_calls()
        torch.manual_seed(3)
        module = self.make()
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        model, optimizer = fabric.setup(self.prepare(module), optimizer)
        seen = {"losses": [], "norms": []}
        for number, tokens in enumerate(batches(self.num_steps * self.num_micro_batches, seed=seed)):
            ends = (number + 1) % self.num_micro_batches == 0
            with fabric.no_backward_sync(model, enabled=not ends):
                loss = loss_of(model(tokens), tokens)
                drain(fabric)
                if self.own_backward:
                    loss.backward()
                else:
                    fabric.backward(loss / self.num_micro_batches)
            seen["losses"].append(loss.detach())
            if ends:
                if self.clip:
                    seen["norms"].append(fabric.clip_gradients(model, optimizer, **self.clip))
                optimizer.step()
                optimizer.zero_grad()
        seen["state"] = {name: value.clone() for name, value in model.state_dict().items()}
        seen["optimizer"] = optimizer.state_dict()
        return seen


def more_steps(fabric, model, optimizer, *, seed):
    torch.manual_seed(seed)
    losses = []
    for tokens in batches(2, seed=seed):
        loss = loss_of(model(tokens), tokens)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {"losses": losses, "weights": [p.detach().clone() for p in model.parameters()]}
