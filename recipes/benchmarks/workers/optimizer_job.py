"""What one process of ``recipes.benchmarks.optimizer`` is told: parameters of which sizes, optimizer, mode."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from recipes.determinism import settle_first_calls

__all__ = ["BASELINE", "MODES", "OPTIMIZERS", "SIZES", "Needs", "OptimizerJob", "Sizes", "cache_share", "parse_modes"]

BASELINE = "torch"
MODES = (BASELINE, "ssd", "cache=50%")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_CACHE = re.compile(r"cache=(\d{1,3})%")
_PROCESS_BYTES = 1 << 30
"""PyTorch itself, its threads, staging buffers."""
_CUDA_PROCESS_BYTES = 4 << 30
_RESIDENT_SHARE = 0.2
"""Of the states, for planning which processes fit side by side; more than ever should be in memory."""


class Kind(NamedTuple):
    """An optimizer of PyTorch, how it is built, and how many states of a parameter's size and type it has."""

    cls: type[torch.optim.Optimizer]
    settings: dict[str, Any]
    num_states: int


OPTIMIZERS = {
    "adamw": Kind(torch.optim.AdamW, {"lr": 1e-4}, 2),
    "adam": Kind(torch.optim.Adam, {"lr": 1e-4}, 2),
    "sgd": Kind(torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}, 1),
    "adagrad": Kind(torch.optim.Adagrad, {"lr": 1e-3}, 1),
    "rmsprop": Kind(torch.optim.RMSprop, {"lr": 1e-4}, 1),
    "nadam": Kind(torch.optim.NAdam, {"lr": 1e-4}, 2),
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Parameters with the shapes of a GPT's; nothing is computed with them but the update."""

    hidden: int
    layers: int
    vocabulary: int
    dtype: str = "float32"
    device: str = "cpu"

    def shapes(self) -> Iterator[tuple[int, ...]]:
        """One per parameter: embedding, per layer two norms, attention and feed-forward, at the end a norm."""
        hidden = self.hidden
        yield (self.vocabulary, hidden)
        for _ in range(self.layers):
            for rows, columns in ((3, 1), (1, 1), (4, 1), (1, 4)):
                yield (rows * hidden, columns * hidden)
                yield (rows * hidden,)
            yield from ((hidden,),) * 4
        yield from ((hidden,),) * 2

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return sum(prod(shape) for shape in self.shapes())

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return self.num_parameters * DTYPES[self.dtype].itemsize

    def model(self) -> nn.Module:
        """The same weights in every process."""
        settle_first_calls()  # of the square root in an update, say
        generator = torch.Generator(self.device).manual_seed(0)
        made = nn.ParameterList()
        for shape in self.shapes():
            weights = torch.empty(shape, dtype=DTYPES[self.dtype], device=self.device)
            made.append(nn.Parameter(weights.uniform_(-0.05, 0.05, generator=generator)))
        return made


SIZES = {
    "tiny": Sizes(hidden=512, layers=2, vocabulary=1_001),
    "350m": Sizes(hidden=1024, layers=24, vocabulary=50_257),
    "1b": Sizes(hidden=1536, layers=32, vocabulary=50_257),
    "3b": Sizes(hidden=2816, layers=30, vocabulary=50_257),
}


def cache_share(mode: str) -> float:
    """Of the states, what stays in memory between steps: 0.5 for "cache=50%", 0 for all other modes."""
    match = _CACHE.fullmatch(mode)
    return 0.0 if match is None else int(match[1]) / 100


def parse_modes(text: str) -> list[str]:
    """Names from a list with commas.

    Raises:
        ValueError: a name is unknown or comes twice, or there is none.
    """
    modes = [mode.strip() for mode in text.split(",") if mode.strip()]
    allowed = f"allowed: {', '.join(MODES)}, with any share"
    wrong = [mode for mode in modes if mode not in MODES and not 0 < cache_share(mode) <= 1]
    if wrong or not modes:
        raise ValueError(f"{', '.join(wrong) or 'nothing'}; {allowed}")
    if len(set(modes)) < len(modes):
        raise ValueError(f"a mode twice in {text}; {allowed} once")
    return modes


class Needs(NamedTuple):
    """What a process takes, in bytes: an estimate on the safe side."""

    host: int
    device: int
    disk: int


@dataclass(frozen=True, kw_only=True)
class OptimizerJob:
    """What one process does."""

    mode: str
    sizes: Sizes
    optimizer: str
    directory: str
    threads: int
    master_weights: bool = False
    """Half-precision parameters are updated through float32 copies: by hand in plain PyTorch, as states in ours."""

    @property
    def state_bytes(self) -> int:
        """What PyTorch's optimizer holds between steps, copies of weights included, but for scalars."""
        num_states = OPTIMIZERS[self.optimizer].num_states
        if self.master_weights:
            return (num_states + 1) * self.sizes.num_parameters * torch.float32.itemsize
        return num_states * self.sizes.nbytes

    @property
    def cache_bytes(self) -> int:
        """Of the states, what stays in host memory between steps."""
        return round(cache_share(self.mode) * self.state_bytes)

    @property
    def needs(self) -> Needs:
        """For deciding which processes run side by side."""
        # PyTorch makes temporaries of the size of a parameter; one more copy is a checkpoint on its way to the drive.
        largest = max(prod(shape) for shape in self.sizes.shapes()) * DTYPES[self.sizes.dtype].itemsize
        is_plain = self.mode == BASELINE
        states = self.state_bytes if is_plain else round(_RESIDENT_SHARE * self.state_bytes)
        work = 2 * self.sizes.nbytes + states + 3 * largest
        disk = self.state_bytes * (1 if is_plain else 2)
        if self.sizes.device == "cpu":
            return Needs(_PROCESS_BYTES + work + self.cache_bytes, 0, disk)
        return Needs(_CUDA_PROCESS_BYTES + self.cache_bytes, _PROCESS_BYTES + work, disk)
