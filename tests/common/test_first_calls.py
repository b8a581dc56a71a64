"""Equal trainings stay equal in their first step: first calls of MKL's functions never race.

The race itself shows in one process of twenty or fewer, so that what is tested is that all first calls are made before
it can happen.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GPT2Config

from lightning_ssd import Offloader, OffloadPolicy
from lightning_ssd.common.first_calls import FUNCTIONS, settle_first_calls
from recipes.benchmarks.harness.shapes import Shape
from recipes.models import build_network


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, torch.dtype, int]]:
    """(function, dtype, elements) of each call, from a process in which nothing was called yet."""
    calls: list[tuple[str, torch.dtype, int]] = []
    for name in FUNCTIONS:

        def call(number: torch.Tensor, name: str = name) -> None:
            calls.append((name, number.dtype, number.numel()))

        monkeypatch.setattr(torch, name, call)
    settle_first_calls.cache_clear()
    return calls


def test_every_function_is_called_on_one_element_once(called: list[tuple[str, torch.dtype, int]]) -> None:
    settle_first_calls()
    settle_first_calls()
    assert sorted(called, key=str) == sorted(
        ((name, dtype, 1) for name in FUNCTIONS for dtype in (torch.float32, torch.float64)), key=str
    )


def test_an_offloader_makes_the_calls_when_it_opens(
    called: list[tuple[str, torch.dtype, int]], spill_dir: Path
) -> None:
    with Offloader(policy=OffloadPolicy(activations="keep"), default_directory=spill_dir).open(torch.nn.Linear(1, 1)):
        assert len(called) == 2 * len(FUNCTIONS)


def test_every_recipe_that_trains_plainly_makes_them_too() -> None:
    """Otherwise plain training could differ from itself, and from ours."""
    settle_first_calls.cache_clear()
    build_network(GPT2Config(vocab_size=8, n_positions=4, n_embd=8, n_layer=1, n_head=2), "causal")
    assert settle_first_calls.cache_info().currsize == 1
    settle_first_calls.cache_clear()
    Shape(layers=1, width=8, heads=2, sequence=4, vocabulary=8).model()
    assert settle_first_calls.cache_info().currsize == 1


def test_random_numbers_and_modes_stay_as_they_were() -> None:
    before = torch.get_rng_state()
    settle_first_calls.cache_clear()
    with torch.device("meta"):
        settle_first_calls()
    assert torch.equal(torch.get_rng_state(), before)
