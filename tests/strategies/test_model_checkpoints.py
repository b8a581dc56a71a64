"""A Hugging Face model that checkpoints its blocks by itself, in the Trainer: the inputs move, the bits stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.parity.models import causal_batch, gpt2
from tests.support.helpers import assert_identical
from tests.support.trainers import Net, fit, offload_strategy, result

pytest.importorskip("transformers", reason="the blocks are transformers'")
WIDTH, NUM_BLOCKS, STEPS = 40, 3, 3
INPUT_BYTES = 3 * 37 * WIDTH * 4


class Checkpointed(Net):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        del self.blocks, self.norm, self.head
        self.model: Any = gpt2(hidden=WIDTH, layers=NUM_BLOCKS, dropout=0.1)
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        assert isinstance(self.model, nn.Module)

    def loss(self, batch: Any) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.losses.append(loss.detach().clone())
        assert isinstance(loss, torch.Tensor)
        return loss

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader([causal_batch(step) for step in range(STEPS)], batch_size=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("activations", ["offload", "recompute_offload"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:Trying to infer the `batch_size`", "ignore:`gradient_checkpointing"
)
def test_inputs_of_its_blocks_move(reentrant: bool, activations: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": STEPS, "limit_val_batches": 0}
    _, expected = fit(lambda: Checkpointed(reentrant=reentrant), "auto", tmp_path / "plain", **settings)
    strategy = offload_strategy(tmp_path, activations=activations, min_tensor_bytes=INPUT_BYTES)
    _, module = fit(lambda: Checkpointed(reentrant=reentrant), strategy, tmp_path / "ours", **settings)
    assert len(module.losses) == STEPS
    assert_identical(result(module), result(expected))
    stats = strategy.stats
    # Besides them the head saves little: without checkpoints a block saves more than twenty times its input.
    assert NUM_BLOCKS * STEPS * INPUT_BYTES <= stats.bytes_saved < 8 * NUM_BLOCKS * STEPS * INPUT_BYTES
    moved = stats.bytes_written + stats.bytes_host + stats.bytes_forwarded
    assert moved >= (NUM_BLOCKS - 1) * STEPS * INPUT_BYTES
