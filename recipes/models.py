"""Transformers of Hugging Face `transformers`, built from a configuration with random weights, as Lightning modules.

Nothing here talks to a model hub: the architecture is real, the weights are initialised.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, PreTrainedConfig

from lightning_ssd.recompute.block_discovery import find_blocks
from recipes.data import MASK_TOKEN, PAD_TOKEN
from recipes.determinism import settle_first_calls
from recipes.mistakes import ConfigMistake

__all__ = ["LanguageModel", "Objective", "build_network", "compute_loss", "make_inputs"]

Objective = Literal["causal", "masked", "seq2seq"]

_BUILDERS: dict[str, Any] = {
    "causal": AutoModelForCausalLM,
    "masked": AutoModelForMaskedLM,
    "seq2seq": AutoModelForSeq2SeqLM,
}
_MASKED_SHARE = 0.15
_IGNORED_LABEL = -100


def build_network(config: PreTrainedConfig, objective: Objective) -> nn.Module:
    """Build the architecture that ``config`` describes, with random weights.

    Args:
        config: any configuration of `transformers` that the objective's auto class knows.
        objective: "causal" (GPT-2, Llama), "masked" (BERT) or "seq2seq" (T5).
    """
    if objective not in _BUILDERS:
        raise ValueError(f"model.objective={objective!r}; allowed: {', '.join(map(repr, _BUILDERS))}")
    settle_first_calls()  # so that plain training, too, is the same in every process
    try:
        network = cast(nn.Module, _BUILDERS[objective].from_config(config))
    except (ValueError, TypeError, ArithmeticError, AssertionError) as error:  # sizes that do not go together
        raise ConfigMistake(f"model.config: {type(config).__name__} cannot be built: {error}") from error
    # Some architectures come out of from_config in evaluation mode, which would switch dropout off.
    return network.train()


def make_inputs(tokens: Tensor, objective: Objective, *, mask_seed: int = 0) -> tuple[dict[str, Any], Tensor]:
    """Turn a batch of token windows into the keyword arguments of the network, and what it shall predict.

    Args:
        tokens: (batch, window) of token numbers.
        objective: "causal": predict the next token. "masked": 15 % of the tokens are hidden and predicted.
            "seq2seq": the encoder reads the first half of the window, the decoder predicts the second.
        mask_seed: seed of the hidden positions, so that every run of a step hides the same ones.
    """
    if objective == "causal":
        labels = torch.roll(tokens, shifts=-1, dims=1)
        labels[:, -1] = _IGNORED_LABEL
        return {"input_ids": tokens, "use_cache": False}, labels
    if objective == "masked":
        # Drawn on the CPU: the same positions whatever the device, and the global generator stays untouched.
        generator = torch.Generator().manual_seed(mask_seed)
        hidden = (torch.rand(tokens.shape, generator=generator) < _MASKED_SHARE).to(tokens.device)
        return {"input_ids": tokens.masked_fill(hidden, MASK_TOKEN)}, tokens.masked_fill(~hidden, _IGNORED_LABEL)
    source, target = tokens.chunk(2, dim=1)
    shifted = torch.roll(target, shifts=1, dims=1)
    shifted[:, 0] = PAD_TOKEN
    return {"input_ids": source, "decoder_input_ids": shifted, "use_cache": False}, target


def compute_loss(network: nn.Module, tokens: Tensor, objective: Objective, *, mask_seed: int = 0) -> Tensor:
    """Mean cross-entropy of one batch of token windows, in float32."""
    inputs, labels = make_inputs(tokens, objective, mask_seed=mask_seed)
    logits: Tensor = network(**inputs).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=_IGNORED_LABEL)


class LanguageModel(pl.LightningModule):
    """A language model of `transformers` with its objective and AdamW.

    Args:
        config: the architecture. The weights are made in ``configure_model``, hence directly on the device where
            the strategy wants them, and not before ``fit``.
        objective: what is predicted, see :func:`make_inputs`.
        learning_rate: of AdamW.
        weight_decay: of AdamW.
    """

    def __init__(
        self,
        *,
        config: PreTrainedConfig,
        objective: Objective,
        learning_rate: float = 3e-4,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__()
        self.config = config
        self.objective: Objective = objective
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.network: nn.Module | None = None

    def make_network(self) -> nn.Module:
        """The network alone, for loops of one's own."""
        return build_network(self.config, self.objective)

    def configure_model(self) -> None:
        """Make the weights once; Lightning calls this again for every fit, validate or test.

        Where the strategy has a mesh of devices, each gets its shards (FSDP2), block by block.
        """
        if self.network is None:
            self.network = self.make_network()
            if self.device_mesh is not None:
                _shard(self.network, self.device_mesh["data_parallel"])

    def forward(self, tokens: Tensor, *, mask_seed: int = 0) -> Tensor:
        """Loss of one batch of token windows."""
        if self.network is None:
            raise RuntimeError("the weights do not exist yet; call configure_model() first, as Trainer.fit does")
        return compute_loss(self.network, tokens, self.objective, mask_seed=mask_seed)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Loss of one batch, logged as ``train/loss``."""
        loss = self(batch, mask_seed=batch_idx)
        self.log("train/loss", loss, prog_bar=True)
        return cast(Tensor, loss)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Mean loss over the validation windows, logged as ``val/loss``."""
        self.log("val/loss", self(batch, mask_seed=batch_idx), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over all parameters that are trained."""
        return self.make_optimizer(self.parameters())

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """AdamW over those of the parameters that are trained."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.learning_rate, weight_decay=self.weight_decay)


def _shard(network: nn.Module, mesh: DeviceMesh) -> None:
    """Spread parameters over the mesh. The equal blocks are groups of their own, so that few are gathered at a time."""
    for block in (*find_blocks(network).values(), network):
        fully_shard(block, mesh=mesh)
