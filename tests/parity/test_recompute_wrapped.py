"""Recomputed blocks together with what others do to blocks, bit for bit."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.parity import models
from tests.parity.models import Perceptrons, floats, inputs, mean_square
from tests.parity.recomputing import EVERY, NONE, SECOND, Recomputing, assert_recompute_parity
from tests.support.helpers import Session, Training, assert_identical, outcome


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant", "alternate"])
def test_checkpoints_of_the_model(mode: str) -> None:
    training = models.checkpointed(mode)
    expected = outcome(training, Session())
    for wants_inputs in (False, True):
        session = Recomputing(EVERY, wants_inputs=wants_inputs)
        assert_identical(outcome(training, session), expected)
        refused = session.blocks[0].refused
        assert len(refused) == {"reentrant": 0, "non-reentrant": 4, "alternate": 2}[mode]
        assert all("checkpoints it by itself" in reason for reason in refused.values())


@pytest.mark.parametrize("reentrant", [False, True])
def test_hugging_face_checkpointing(reentrant: bool) -> None:
    def prepare(model: nn.Module) -> nn.Module:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})  # type: ignore[operator]
        return model

    training = models.gpt2_training(hidden=40, dropout=0.1, prepare=prepare)
    expected = outcome(training, Session())
    assert_identical(outcome(training, Recomputing(EVERY)), expected)


def test_a_checkpoint_inside_of_a_block() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(40, 40), nn.Dropout(0.2), nn.GELU())
            self.last = nn.Linear(40, 40)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = checkpoint(self.inner, x, use_reentrant=False)
            assert isinstance(y, torch.Tensor)
            return self.last(y).tanh()

    training = Training(lambda: nn.Sequential(Inner(), Inner(), Inner()), inputs, mean_square)
    expected = outcome(training, Session())
    repeated = []
    for chooses in (EVERY, SECOND, NONE):
        session = Recomputing(chooses)
        assert_identical(outcome(training, session), expected)
        repeated.append(len(session.repeated))
    assert repeated[0] > repeated[1] > repeated[2] > 0


def test_hooks_of_a_block_run_once() -> None:
    def program(session: Session) -> Any:
        model = Perceptrons(dropout=0.2)
        session.register(model)
        seen: list[Any] = []
        for number, block in enumerate(model.blocks):
            block.register_forward_pre_hook(lambda m, a, n=number: seen.append(("pre", n)))
            block.register_forward_hook(lambda m, a, y, n=number: seen.append(("post", n, y.detach().sum())))
            block.register_full_backward_pre_hook(lambda m, g, n=number: seen.append(("back-pre", n)))
            block.register_full_backward_hook(
                lambda m, i, o, n=number: seen.append(("back", n, i[0].sum(), o[0].sum()))
            )
        x = floats(0, 6, 17, 40).requires_grad_()
        with session.saved():
            loss = mean_square(model, {"x": x})
        loss.backward()
        assert len(seen) == 16
        return seen, x.grad

    assert_recompute_parity(program)


def test_transforms_run_plainly() -> None:
    def program(session: Session) -> Any:
        model = Perceptrons(num_blocks=2)
        session.register(model)
        parameters = dict(model.named_parameters())
        x = floats(0, 6, 40)

        def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.func.functional_call(model, parameters, (x,)).square().mean()

        with nullcontext() if session.offloader is None else session.saved():
            return torch.func.grad(loss)({name: p.detach() for name, p in parameters.items()})

    expected = outcome(program, Session())
    session = Recomputing(EVERY)
    with session.saved():
        assert_identical(outcome(program, session), expected)


@pytest.mark.gpu
def test_random_numbers_of_the_device() -> None:
    """Also of a block that is given nothing on its device."""

    class Source(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(40, 40), nn.Dropout(0.2), nn.Linear(40, 40))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x.to("cuda")).tanh()
            assert isinstance(y, torch.Tensor)
            return y

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sources = nn.ModuleList([Source(), Source()])
            self.blocks = Perceptrons(dropout=0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.blocks(sum((source(x) for source in self.sources), x.to("cuda")))
            assert isinstance(y, torch.Tensor)
            return y

    assert_recompute_parity(Training(lambda: Net().to("cuda"), inputs, mean_square))
