"""Small real models whose sizes are odd on purpose: hidden 320 and 960 are where careless direct I/O loses data.

``transformers`` is imported by those that need it, so that the others serve where it is not installed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.helpers import Batch, Training

VOCABULARY = 311


def tokens(step: int, *shape: int, high: int = VOCABULARY) -> torch.Tensor:
    """Random tokens that depend on nothing but the step."""
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(100 + step))


def floats(step: int, *shape: int) -> torch.Tensor:
    """Normal numbers that depend on nothing but the step."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(200 + step))


def hugging_face_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss that the model itself computes."""
    loss = model(**batch).loss
    assert isinstance(loss, torch.Tensor)
    return loss


def mean_square(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean of the squared output."""
    return model(batch["x"]).square().mean()


def gpt2(*, hidden: int = 320, heads: int = 5, layers: int = 2, dropout: float = 0.0, **extra: Any) -> nn.Module:
    """GPT-2, its head tied to its embedding."""
    import transformers

    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=layers,
            n_embd=hidden,
            n_head=heads,
            n_positions=64,
            vocab_size=VOCABULARY,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
            **extra,
        )
    )


def causal_batch(step: int) -> Batch:
    """Tokens and labels for a causal model."""
    ids = tokens(step, 3, 37)
    return {"input_ids": ids, "labels": ids}


def gpt2_training(**settings: Any) -> Training:
    """GPT-2; ``settings`` go to :func:`gpt2` (model) or to :class:`Training` (the rest)."""
    training = {name: settings.pop(name) for name in list(settings) if name in Training.__dataclass_fields__}
    return Training(lambda: gpt2(**settings), causal_batch, hugging_face_loss, **training)


def bert_training() -> Training:
    """BERT with its dropout on and a padding mask."""

    def batch(step: int) -> Batch:
        ids = tokens(step, 3, 29)
        mask = torch.ones_like(ids)
        mask[:, 20 + step :] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": ids}

    def model() -> nn.Module:
        import transformers

        return transformers.BertForMaskedLM(
            transformers.BertConfig(
                vocab_size=VOCABULARY,
                hidden_size=320,
                num_hidden_layers=2,
                num_attention_heads=5,
                intermediate_size=520,
                max_position_embeddings=64,
            )
        )

    return Training(model, batch, hugging_face_loss)


def t5_training() -> Training:
    """T5: encoder, decoder, cross attention, relative positions, dropout."""

    def batch(step: int) -> Batch:
        return {"input_ids": tokens(step, 2, 31), "labels": tokens(step + 50, 2, 13)}

    def model() -> nn.Module:
        import transformers

        return transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=VOCABULARY,
                d_model=320,
                d_kv=40,
                d_ff=520,
                num_layers=2,
                num_heads=8,
                decoder_start_token_id=0,
                pad_token_id=0,
                eos_token_id=1,
                use_cache=False,
            )
        )

    return Training(model, batch, hugging_face_loss)


def llama_training() -> Training:
    """Llama with grouped queries: 8 heads share 2 keys and values."""

    def model() -> nn.Module:
        import transformers

        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=320,
                intermediate_size=472,
                num_hidden_layers=2,
                num_attention_heads=8,
                num_key_value_heads=2,
                max_position_embeddings=64,
                use_cache=False,
            )
        )

    return Training(model, causal_batch, hugging_face_loss)


class Residual(nn.Module):
    """A residual block as in ResNet, with an in-place ReLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        y += x
        return self.activation(y)


def convolution_training() -> Training:
    """A small ResNet in channels-last."""

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 20, 7, stride=2, padding=3),
            nn.MaxPool2d(3, stride=2, padding=1),
            Residual(20),
            Residual(20),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(20, 11),
        ).to(memory_format=torch.channels_last)

    def batch(step: int) -> Batch:
        return {"x": floats(step, 4, 3, 45, 45).contiguous(memory_format=torch.channels_last)}

    return Training(model, batch, mean_square)


class Recurrent(nn.Module):
    """Two LSTM layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(23, 67, num_layers=2, batch_first=True, dropout=0.25, bidirectional=True)
        self.head = nn.Linear(134, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.lstm(x)
        return self.head(y)


def lstm_training() -> Training:
    """An LSTM with dropout, both directions."""
    return Training(Recurrent, lambda step: {"x": floats(step, 5, 19, 23)}, mean_square)


class Perceptrons(nn.Module):
    """Residual blocks, each checkpointed or not; ``depth(step)`` of them run."""

    def __init__(self, *, width: int = 40, num_blocks: int = 4, mode: str = "none", dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 3 * width),
                nn.GELU(),
                nn.Dropout(dropout),
                nn.Linear(3 * width, width),
            )
            for _ in range(num_blocks)
        )
        self.mode = mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if self.mode == "none" or (self.mode == "alternate" and number % 2):
                x = x + block(x)
            else:
                x = x + checkpoint(block, x, use_reentrant=self.mode == "reentrant")
        return x


class Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank correction, as in LoRA."""

    def __init__(self, frozen: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.up(self.down(x)) * 0.5


def adapted_perceptrons() -> nn.Module:
    """Every linear layer frozen and adapted."""
    model = Perceptrons()
    for block in model.blocks:
        assert isinstance(block, nn.Sequential)
        for index, layer in enumerate(block):
            if isinstance(layer, nn.Linear):
                block[index] = Adapted(layer)
            else:
                layer.requires_grad_(False)
    return model
