"""Families of Hugging Face with everything in files: the bits of plain training, evaluation and generation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_ssd import Offloader
from lightning_ssd.parameters.files.mapped_storage import is_mapped
from tests.parity.models import floats, hugging_face_loss, tokens
from tests.support.everything_away import all_away, large, train
from tests.support.helpers import Batch, assert_identical

transformers = pytest.importorskip("transformers", reason="the models are those of transformers")

pytestmark = [
    pytest.mark.usefixtures("many_subgroups"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated"),
]

WORDS, WIDTH, HEADS, LENGTH = 97, 64, 4, 48
TEXT = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 3 * WIDTH}


def causal(step: int) -> Batch:
    ids = tokens(step, 2, 19, high=WORDS)
    return {"input_ids": ids, "labels": ids}


def translated(step: int) -> Batch:
    return {"input_ids": tokens(step, 2, 17, high=WORDS), "labels": tokens(step + 50, 2, 9, high=WORDS)}


def pictures(step: int) -> Batch:
    return {"pixel_values": floats(step, 2, 3, 32, 32), "labels": tokens(step, 2, high=5)}


def speech(step: int) -> Batch:
    return {"input_features": floats(step, 2, 16, 2 * LENGTH), "labels": tokens(step, 2, 9, high=WORDS)}


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, **SIZES, num_key_value_heads=2))


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**TEXT, n_embd=WIDTH, n_layer=2, n_head=HEADS, n_positions=LENGTH)
    )


def mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            **TEXT, **SIZES, num_key_value_heads=2, num_local_experts=4, output_router_logits=True
        )
    )


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            **TEXT, d_model=WIDTH, d_kv=16, d_ff=3 * WIDTH, num_layers=2, num_heads=HEADS, decoder_start_token_id=2
        )
    )


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**TEXT, **SIZES, max_position_embeddings=LENGTH))


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**SIZES, image_size=32, patch_size=8, num_labels=5)
    )


def whisper() -> nn.Module:
    return transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            **TEXT,
            d_model=WIDTH,
            num_mel_bins=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=HEADS,
            decoder_attention_heads=HEADS,
            encoder_ffn_dim=3 * WIDTH,
            decoder_ffn_dim=3 * WIDTH,
            max_source_positions=LENGTH,
            max_target_positions=LENGTH,
            decoder_start_token_id=2,
        )
    )


FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch], str]] = {
    "llama": (llama, causal, "input_ids"),
    "gpt2": (gpt2, causal, "input_ids"),
    "mixtral": (mixtral, causal, "input_ids"),
    "t5": (t5, translated, "input_ids"),
    "bert": (bert, causal, ""),
    "vit": (vit, pictures, ""),
    "whisper": (whisper, speech, "input_features"),
}
"""The model, its batches, and what it generates from, if it does."""
CHECKPOINTS: dict[str, dict[str, Any] | None] = {
    "whole": None,
    "checkpointed": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
}


def run(family: str, checkpoints: str, offloader: Offloader | None = None) -> dict[str, Any]:
    """Three steps, and after each a forward of evaluation and a generation."""
    make, batch, prompt = FAMILIES[family]
    seen: dict[str, Any] = {}

    def model() -> nn.Module:
        made = make()
        if CHECKPOINTS[checkpoints] is not None:
            made.gradient_checkpointing_enable(CHECKPOINTS[checkpoints])
            assert made.is_gradient_checkpointing
        return made

    def evaluate(made: nn.Module, step: int) -> None:
        made.eval()
        with torch.no_grad():
            seen[f"evaluation {step}"] = made(**batch(70 + step)).logits.clone()
            if prompt:
                asked = {prompt: batch(80 + step)[prompt]}
                seen[f"generated {step}"] = made.generate(**asked, max_new_tokens=6, min_new_tokens=6, do_sample=True)
        made.train()

    trained = train(model, batch, hugging_face_loss, offloader, after_step=evaluate)
    if offloader is not None:
        waiting = large(trained.model)
        assert len(waiting) > 5
        assert all(is_mapped(parameter.untyped_storage()) for parameter in waiting)
        assert trained.num_mapped >= len(waiting)
    return trained.result() | seen


@pytest.mark.parametrize(
    "checkpoints", ["whole", "checkpointed", pytest.param("reentrant", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_training_is_exact(family: str, checkpoints: str, tmp_path: Path) -> None:
    expected = run(family, checkpoints)
    assert not FAMILIES[family][2] or expected["generated 2"].shape[1] >= 6
    with all_away(tmp_path) as offloader:
        assert_identical(run(family, checkpoints, offloader), expected)
