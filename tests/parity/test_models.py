"""Whole trainings, bit for bit: the model families that people train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.parity import models
from tests.support.helpers import AUTO_SETUPS, KEEP, PLANNED, Setup, Training, assert_parity

TRAININGS: dict[str, Callable[[], Training]] = {
    "gpt2": models.gpt2_training,
    "gpt2-eager-attention-dropout": lambda: models.gpt2_training(dropout=0.1, attn_implementation="eager"),
    "gpt2-960": lambda: models.gpt2_training(hidden=960, heads=15, layers=1, steps=2),
    "bert": models.bert_training,
    "t5": models.t5_training,
    "llama-grouped-queries": models.llama_training,
    "convolutions-channels-last": models.convolution_training,
    "lstm": models.lstm_training,
}


@pytest.mark.parametrize("name", TRAININGS)
def test_training_is_exact(name: str, tmp_path: Path) -> None:
    assert_parity(TRAININGS[name](), tmp_path)


BUDGETED = Setup(activations="auto", recompute_modules="blocks", activation_budget=3 << 20, settled=True)


@pytest.mark.parametrize("name", ["gpt2", "t5", "convolutions-channels-last", "lstm"])
def test_training_is_exact_under_plans(name: str, tmp_path: Path) -> None:
    """Eight steps: without a plan, then with the plans that are made meanwhile."""
    setups = AUTO_SETUPS if name == "gpt2" else (PLANNED,)
    assert_parity(replace(TRAININGS[name](), steps=8), tmp_path, setups=setups)


def test_training_is_exact_under_a_budget(tmp_path: Path) -> None:
    """Smaller than what one step saves, so that pack has to wait."""
    assert_parity(replace(models.gpt2_training(), steps=8), tmp_path, setups=[BUDGETED])


def test_parity_check_can_fail(tmp_path: Path) -> None:
    """A run that offloads nothing must not pass for a proof."""
    with pytest.raises(AssertionError, match="nothing was offloaded"):
        assert_parity(models.lstm_training(), tmp_path, setups=[KEEP])
