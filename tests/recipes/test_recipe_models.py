"""What the recipes' models are given to predict."""

from __future__ import annotations

import torch

from recipes.data import MASK_TOKEN, PAD_TOKEN
from recipes.models import make_inputs


def test_a_causal_model_predicts_the_next_token() -> None:
    tokens = torch.tensor([[5, 6, 7, 8]])
    inputs, labels = make_inputs(tokens, "causal")
    assert inputs["input_ids"].tolist() == [[5, 6, 7, 8]]
    assert labels.tolist() == [[6, 7, 8, -100]]


def test_a_masked_model_predicts_what_is_hidden() -> None:
    tokens = torch.randint(3, 500, (64, 128))
    inputs, labels = make_inputs(tokens, "masked", mask_seed=3)
    hidden = inputs["input_ids"] == MASK_TOKEN
    assert 0.13 < hidden.float().mean() < 0.17
    assert torch.equal(labels[hidden], tokens[hidden])
    assert (labels[~hidden] == -100).all()
    assert torch.equal(make_inputs(tokens, "masked", mask_seed=3)[1], labels)
    assert not torch.equal(make_inputs(tokens, "masked", mask_seed=4)[1], labels)


def test_a_sequence_to_sequence_model_predicts_the_second_half() -> None:
    inputs, labels = make_inputs(torch.tensor([[5, 6, 7, 8]]), "seq2seq")
    assert inputs["input_ids"].tolist() == [[5, 6]]
    assert inputs["decoder_input_ids"].tolist() == [[PAD_TOKEN, 7]]
    assert labels.tolist() == [[7, 8]]
