"""Operations of PyTorch that fill a tensor after they have saved it, and count no version."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_ssd.errors import RecomputeError
from tests.support.helpers import DRAINED, Session, Setup, assert_identical, assert_same, open_offloader
from tests.support.operator_survey import MovesWithin
from tests.support.processes import run_script

ROWS = 256


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nn.RReLU": nn.RReLU(),
    "nn.RReLU(inplace)": nn.RReLU(inplace=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu_": lambda x: torch.rrelu_(x, training=True),
    "rrelu twice": lambda x: F.rrelu(F.rrelu(x, training=True).neg(), training=True),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_an_operation_fills_after_saving_it(name: str, tmp_path: Path) -> None:
    def program(session: Session) -> Any:
        weight = torch.randn(ROWS, ROWS, requires_grad=True)
        with session.saved(), MovesWithin(session.offloader) as mode:
            loss = FUNCTIONS[name](weight * 2).square().sum()
        session.backward(loss)
        assert any("rrelu_with_noise" in name for name in mode.names)
        return weight.grad

    assert_same(program, tmp_path, setups=[DRAINED])


def test_a_block_that_is_kept_after_a_refusal(spill_dir: Path) -> None:
    """Its noise is the last that it saves, so that no repetition gets to it."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(ROWS, ROWS)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.rrelu(self.linear(x), training=True)

    def program(session: Session) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block())
        session.register(model)
        gradients = []
        for step in range(3):
            torch.manual_seed(step)
            with session.saved(), MovesWithin(session.offloader):
                loss = model(torch.randn(ROWS, ROWS)).square().sum()
            session.drain()
            try:
                loss.backward()
            except RecomputeError:
                gradients.append([])
            else:
                gradients.append([parameter.grad for parameter in model.parameters()])
            session.end()
            model.zero_grad()
        return gradients

    expected = program(Session())
    with open_offloader(spill_dir, Setup(activations="recompute_offload")) as offloader:
        got = program(Session.of(offloader, DRAINED))
        assert offloader.stats.bytes_written
    assert not all(got)
    assert got[-1]
    assert_identical([mine for mine in got if mine], [plain for plain, mine in zip(expected, got, strict=True) if mine])


@pytest.mark.slow
@pytest.mark.exhaustive
def test_every_operator_of_pytorch(spill_dir: Path) -> None:
    """``MovesWithin`` on PyTorch's own samples. Without the rule of ``activations/operation.py``, ``rrelu`` differs."""
    survey = json.loads(run_script("tests.support.operator_survey", str(spill_dir)).stdout)
    assert survey["different"] == {}
    assert survey["operators"] > 500
    assert survey["compared"] > 1000
    assert survey["written bytes"]
