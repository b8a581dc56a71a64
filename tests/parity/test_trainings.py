"""Whole trainings, bit for bit: what people train, with whatever of it waits on a drive.

Of the matrix each training meets two ways of treating activations; the rest is exhaustive.
"""

import functools
from dataclasses import replace

import pytest
import torch

from lightning_ssd.parameters.files.mapped_storage import is_mapped
from tests.parity import models
from tests.parity.models import TRAININGS, floats, tokens
from tests.support.everything_away import EVERYTHING, MIN_TENSOR_BYTES, all_away, away_from_device, large, storage_bytes
from tests.support.helpers import (
    AUTO_SETUPS,
    DRAINED,
    KEEP,
    PLANNED,
    Raised,
    Session,
    Setup,
    Training,
    assert_identical,
    assert_parity,
    assert_released,
    moved,
    outcome,
)
from tests.support.pairs import some_of_each

pytestmark = pytest.mark.usefixtures("many_subgroups")

ACTIVATIONS = {
    "drained": DRAINED,
    "running": Setup(MIN_TENSOR_BYTES, drained=False),
    "planned": PLANNED,
    "recomputed": Setup(activations="recompute_offload"),
}
AWAY = {
    "nothing": {},
    "states": {"optimizer_states": "offload"},
    "everything": EVERYTHING,
}
"""What waits besides activations."""
REPEATED = {"gpt2-960": "GPT2Block", "lstm": "LSTM", "in-place": "InPlace"}
"""Classes of blocks where a model has only one of a kind."""


def opened(directory, setup, away, device, blocks):
    """An offloader for the host, or for a device whose copies end late."""
    policy = {"activations": setup.activations, "max_slowdown": setup.max_slowdown}
    policy |= dict.fromkeys(EVERYTHING, "keep") | AWAY[away]
    policy |= {"recompute_modules": blocks} if setup.activations.startswith("recompute") else {}
    if device == "host":
        return all_away(directory, **policy)
    return away_from_device(directory, **policy | {"gradients": "keep"})  # which stay on the device


@functools.lru_cache(maxsize=2)  # tests of one training follow each other
def plainly(name, steps):
    """What plain PyTorch gives."""
    expected = outcome(training_of(name, steps), Session())
    assert not isinstance(expected, Raised), expected
    assert all(norm > 0 for norm in expected["norms"])
    return expected


def training_of(name, steps, seen=lambda model: model):
    training = TRAININGS[name]()
    return replace(
        training,
        steps=max(steps, training.steps if name == "jumping" else 0),
        max_norm=0.1,
        prepare=lambda model: seen(training.prepare(model)),
    )


@some_of_each("name, activations, away, device", TRAININGS, ACTIVATIONS, AWAY, ["host", "late"])
def test_training_is_exact(name, activations, away, device, tmp_path):
    """Losses, gradients, norms, weights, buffers and states."""
    setup, made = ACTIVATIONS[activations], []
    steps = (
        6 if setup.settled else min(3, TRAININGS[name]().steps)
    )  # without a plan, then with those that are made meanwhile
    training = training_of(name, steps, lambda model: made.append(model) or model)
    with opened(tmp_path, setup, away, device, REPEATED.get(name, "blocks")) as offloader:
        assert_identical(outcome(training, Session.of(offloader, setup)), plainly(name, steps))
        assert_released(offloader)
        stats, waiting = offloader.stats, large(made[0])
        assert stats.failures == 0
        if device == "host" and name != "lstm":  # whose kernels save less than this through hooks
            assert moved(stats) > 0 or setup.settled, "nothing was offloaded"
            assert stats.bytes_read > 0 or setup is not DRAINED
        if away == "everything" and waiting:
            assert stats.weights_bytes == storage_bytes(waiting)
            assert device == "late" or all(is_mapped(parameter.untyped_storage()) for parameter in waiting)


@pytest.mark.parametrize("setup", AUTO_SETUPS, ids=["planned", "planning", "auto"])
def test_training_is_exact_under_plans(setup, tmp_path):
    assert_parity(models.gpt2_training(hidden=40, steps=8), tmp_path, setups=[setup])


def test_training_is_exact_under_a_budget(tmp_path):
    """Smaller than what one step saves, so that pack has to wait."""
    setup = Setup(activations="auto", recompute_modules="blocks", activation_budget=3 << 20, settled=True)
    assert_parity(models.gpt2_training(steps=8), tmp_path, setups=[setup])


def test_parity_check_can_fail(tmp_path):
    """A run that offloads nothing must not pass for a proof."""
    with pytest.raises(AssertionError, match="nothing was offloaded"):
        assert_parity(models.lstm_training(), tmp_path, setups=[KEEP])


def test_two_threads_of_torch(tmp_path):
    torch.set_num_threads(2)  # the fixture sets it back
    assert_parity(models.gpt2_training(layers=1, hidden=160, steps=2), tmp_path, setups=[DRAINED])


# -- evaluation and generation of what waits in files ------------------------------------------------------------------

WORDS = 97
TEXT = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 192}


def causal(step):
    ids = tokens(step, 2, 19, high=WORDS)
    return {"input_ids": ids, "labels": ids}


def translated(step):
    return {"input_ids": tokens(step, 2, 17, high=WORDS), "labels": tokens(step + 50, 2, 9, high=WORDS)}


def pictures(step):
    return {"pixel_values": floats(step, 2, 3, 32, 32), "labels": tokens(step, 2, high=5)}


def speech(step):
    return {"input_features": floats(step, 2, 16, 96), "labels": tokens(step, 2, 9, high=WORDS)}


SPEECH = {"d_model": 64, "num_mel_bins": 16, "max_source_positions": 48, "max_target_positions": 48}
SPEECH |= {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 2), ("ffn_dim", 192))}
SPEECH |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 2}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 192, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 2}
GENERATING = {
    "LlamaForCausalLM": (TEXT | SIZES | {"num_key_value_heads": 2}, causal, "input_ids"),
    "GPT2LMHeadModel": (TEXT | {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 48}, causal, "input_ids"),
    "MixtralForCausalLM": (
        TEXT | SIZES | {"num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True},
        causal,
        "input_ids",
    ),
    "T5ForConditionalGeneration": (TEXT | T5, translated, "input_ids"),
    "BertForMaskedLM": (TEXT | SIZES | {"max_position_embeddings": 48}, causal, ""),
    "ViTForImageClassification": (SIZES | {"image_size": 32, "patch_size": 8, "num_labels": 5}, pictures, ""),
    "WhisperForConditionalGeneration": (TEXT | SPEECH, speech, "input_features"),
}
"""The model, its batches, and what it generates from, if it does."""
CHECKPOINTS = {"whole": None, "checkpointed": {"use_reentrant": False}, "reentrant": {"use_reentrant": True}}
DEFAULT = [
    ("LlamaForCausalLM", "reentrant"),
    ("MixtralForCausalLM", "whole"),
    ("T5ForConditionalGeneration", "checkpointed"),
    ("ViTForImageClassification", "whole"),
    ("WhisperForConditionalGeneration", "checkpointed"),
]


def run(kind, checkpoints, offloader=None):
    """Three steps, and after each a forward of evaluation and a generation."""
    config, batch, prompt = GENERATING[kind]
    seen = {}
    trained = []

    def model():
        made = models.transformer(kind, **config)
        if CHECKPOINTS[checkpoints] is not None:
            made.gradient_checkpointing_enable(CHECKPOINTS[checkpoints])
            assert made.is_gradient_checkpointing
        trained.append(made)
        return made

    def evaluate(made, step):
        made.eval()
        with torch.no_grad():
            seen[f"evaluation {step}"] = made(**batch(70 + step)).logits.clone()
            if prompt:
                asked = {prompt: batch(80 + step)[prompt]}
                seen[f"generated {step}"] = made.generate(**asked, max_new_tokens=6, min_new_tokens=6, do_sample=True)
        made.train()

    training = Training(model, batch, models.hugging_face_loss, max_norm=0.1, after_step=evaluate)
    result = training(Session(offloader, drained=True))
    if offloader is not None:
        waiting = large(trained[0])
        assert len(waiting) > 5
        assert all(is_mapped(parameter.untyped_storage()) for parameter in waiting)
    return result | seen


@pytest.mark.parametrize(
    ("kind", "checkpoints"),
    [
        pytest.param(kind, name, marks=() if (kind, name) in DEFAULT else pytest.mark.exhaustive)
        for kind in GENERATING
        for name in CHECKPOINTS
    ],
)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated")
def test_evaluation_and_generation_are_exact(kind, checkpoints, tmp_path):
    expected = run(kind, checkpoints)
    assert not GENERATING[kind][2] or expected["generated 2"].shape[1] >= 6
    with all_away(tmp_path) as offloader:
        assert_identical(run(kind, checkpoints, offloader), expected)
