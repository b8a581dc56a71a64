"""``torch.compile``: each block by itself, as advised, and the whole model. The backend needs no C++ compiler."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.parity.models import Perceptrons, floats, gpt2_training, mean_square
from tests.support.helpers import DRAINED, EAGER, Training, assert_parity

BACKEND = "aot_eager"


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    with warnings.catch_warnings():
        # Advice about whole-model compilation, and PyTorch's own deprecations inside its compiler.
        warnings.simplefilter("ignore")
        yield
    torch.compiler.reset()


def by_block(model: nn.Module) -> nn.Module:
    assert isinstance(model, Perceptrons)
    for block in model.blocks:
        block.compile(backend=BACKEND)
    return model


def whole(model: nn.Module) -> nn.Module:
    model.compile(backend=BACKEND)
    return model


@pytest.mark.parametrize("prepare", [by_block, whole], ids=["blocks", "whole"])
def test_exact(prepare: Callable[[nn.Module], nn.Module], tmp_path: Path) -> None:
    training = Training(Perceptrons, lambda step: {"x": floats(step, 9, 17, 40)}, mean_square, prepare=prepare)
    assert_parity(training, tmp_path, setups=[DRAINED, EAGER])


def test_checkpointed_blocks_inside_a_compiled_model(tmp_path: Path) -> None:
    training = Training(
        lambda: Perceptrons(mode="alternate"), lambda step: {"x": floats(step, 9, 17, 40)}, mean_square, prepare=whole
    )
    assert_parity(training, tmp_path, setups=[DRAINED])


def test_gpt2_blocks(tmp_path: Path) -> None:
    def compile_blocks(model: nn.Module) -> nn.Module:
        for block in model.get_submodule("transformer.h").children():
            block.compile(backend=BACKEND)
        return model

    assert_parity(replace(gpt2_training(steps=2), prepare=compile_blocks), tmp_path, setups=[DRAINED])


def test_compiled_after_the_context_was_used(tmp_path: Path) -> None:
    """The context entered by eager code first, then by compiled code whose graph breaks."""

    class Broken(Perceptrons):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = x + block(x)
                torch._dynamo.graph_break()
            return x

    training = Training(Broken, lambda step: {"x": floats(step, 9, 17, 40)}, mean_square, prepare=whole)
    assert_parity(training, tmp_path, setups=[DRAINED, EAGER])
