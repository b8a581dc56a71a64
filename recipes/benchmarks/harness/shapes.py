"""The sizes that the benchmarks train: GPT-2 models, their batches, and how the command line chooses one."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from recipes.benchmarks.harness.gpt import GPT
from recipes.determinism import settle_first_calls

__all__ = [
    "PROFILES",
    "SHAPES",
    "TINY",
    "Shape",
    "add_shape_arguments",
    "choose_shape",
    "has_transformers",
]


def has_transformers() -> bool:
    """Whether the models are those of Hugging Face; else they are of ``recipes.benchmarks.harness.gpt``."""
    return importlib.util.find_spec("transformers") is not None


@dataclass(frozen=True)
class Shape:
    """A GPT-2 and its batch."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    sequence: int = 512
    batch: int = 8
    vocabulary: int = 16_384
    autocast: bool = False
    device: str = "cpu"

    def model(self) -> nn.Module:
        """The same weights in every process."""
        settle_first_calls()
        torch.manual_seed(0)
        # Made where it trains: a card draws a large model's weights at once, one core of the host takes longer than
        # all steps.
        with nullcontext() if self.device == "cpu" else torch.device(self.device):
            return self._made().to(self.device).train()

    def _made(self) -> nn.Module:
        if not has_transformers():
            return self._own_model()
        import transformers

        transformers.logging.set_verbosity_error()  # it remarks on the defaults of a model built from a configuration
        config = transformers.GPT2Config(
            n_layer=self.layers,
            n_embd=self.width,
            n_head=self.heads,
            n_positions=self.sequence,
            vocab_size=self.vocabulary,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        model: nn.Module = transformers.GPT2LMHeadModel(config)
        return model

    def _own_model(self) -> nn.Module:
        sizes = {name: getattr(self, name) for name in ("layers", "width", "heads", "sequence", "vocabulary")}
        return GPT(**sizes)

    def tokens(self, step: int) -> Tensor:
        """The batch of one step, the same in every process."""
        generator = torch.Generator().manual_seed(step)
        return torch.randint(0, self.vocabulary, (self.batch, self.sequence), generator=generator).to(self.device)

    def precision(self) -> AbstractContextManager[Any]:
        """Around forward."""
        return torch.autocast(self.device, dtype=torch.bfloat16) if self.autocast else nullcontext()


TINY = Shape(layers=2, width=64, heads=4, sequence=32, batch=2, vocabulary=211)
SHAPES = {
    "small": Shape(),
    # About the bytes of "small". Tall: a third of its arithmetic per byte, which is harder on the drive. Wide: twice.
    "tall": Shape(layers=48, width=256, heads=4, sequence=1536, batch=2),
    "wide": Shape(layers=4, width=1536, heads=16, batch=12),
}
PROFILES = {
    "cpu": SHAPES["small"],
    # GPT-2 large. Per sample, keep holds some 4 GiB of saved activations and half a GiB of logits; weights, gradients
    # and states take 12 GiB in each process, of which 9 stay while another one steps. Five processes side by side take
    # some 65 GiB of a card at this batch, and 120 GiB at 16.
    "gpu": Shape(
        layers=36, width=1280, heads=20, sequence=1024, batch=4, vocabulary=50_304, autocast=True, device="cuda"
    ),
}
_SIZES = ("layers", "width", "heads", "sequence", "batch", "vocabulary")


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """``--profile``, ``--shape``, ``--tiny`` and the single sizes."""
    parser.add_argument("--profile", default="cpu", choices=list(PROFILES))
    parser.add_argument("--shape", choices=list(SHAPES), help="of the CPU profile: deep or wide; default: small")
    parser.add_argument("--tiny", action="store_true", help="a toy size, to try the recipe itself")
    for name in _SIZES:
        parser.add_argument(f"--{name}", type=int)


def choose_shape(args: argparse.Namespace) -> Shape:
    """Profile or shape, then ``--tiny``, then single sizes."""
    sizes: Mapping[str, int | None] = {name: getattr(args, name) for name in _SIZES}
    given = {name: value for name, value in sizes.items() if value is not None}
    shape = PROFILES[args.profile]
    if args.shape is not None:
        if args.profile != "cpu":
            sys.exit(f"--shape {args.shape} belongs to --profile cpu; with {args.profile} give the single sizes")
        shape = SHAPES[args.shape]
    if args.tiny:
        shape = replace(TINY, autocast=shape.autocast)
    elif shape.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"--profile {args.profile} needs a CUDA device and there is none here; with --tiny it runs on the CPU")
    return replace(shape, **given)
