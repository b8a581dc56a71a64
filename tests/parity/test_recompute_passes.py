"""Recomputed blocks: what their forward registers and asks for, and every way of going backward, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_ssd.errors import ConfigError, RecomputeError
from tests.parity.graph_programs import PROGRAMS
from tests.parity.models import Perceptrons, floats, inputs, mean_square
from tests.parity.recomputing import EVERY, NONE, Recomputing, assert_recompute_parity
from tests.support.helpers import Session, Training, assert_identical, outcome

# -- ways of going backward ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("retained", "double_backward_outside", "all_in_another_thread", "many_graphs_alive"),
        *("exception_in_forward", "exception_in_backward", "step_borders_in_odd_places", "evaluation_between"),
    ],
)
def test_backward_after_the_pass(name: str) -> None:
    assert_recompute_parity(PROGRAMS[name])


@pytest.mark.parametrize("name", ["double_backward", "backward_inside_the_context"])
def test_backward_inside_of_the_pass(name: str) -> None:
    """As with manual optimization, and gradient penalties."""
    session = Recomputing(EVERY)
    assert_identical(outcome(PROGRAMS[name], session), outcome(PROGRAMS[name], Session()))
    assert session.asked == 3


def test_a_reentrant_checkpoint_inside_of_the_pass() -> None:
    """Its backward calls the blocks themselves."""

    def program(session: Session) -> Any:
        model = Perceptrons(dropout=0.3, mode="reentrant")
        session.register(model)
        x = floats(0, 6, 17, 40).requires_grad_()
        with session.saved():
            mean_square(model, {"x": x}).backward()
        return x.grad, [parameter.grad for parameter in model.parameters()]

    session = Recomputing(EVERY)
    assert_identical(outcome(program, session), outcome(program, Session()))
    assert session.asked == 0  # forward ran without gradients, and the rest is a repetition


# -- what a forward registers and asks for ---------------------------------------------------------------------------


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(40, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


def test_hooks_of_an_input_outlast_the_time_in_which_it_is_frozen() -> None:
    """Autograd gives a frozen one back as the very tensor."""

    class Scaling(Plain):
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x * scale)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(40, 40), nn.Parameter(torch.randn(40))
            self.scale.register_hook(lambda gradient: gradient / 3)
            self.blocks = nn.ModuleList([Scaling(), Scaling(), Scaling()])
            self.num_calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.scale.requires_grad_(self.num_calls > 0)
            self.num_calls += 1
            x = self.linear(x)
            for block in self.blocks:
                x = block(x, self.scale)
            return x

    assert_recompute_parity(Training(Net, inputs, mean_square), classes=("Scaling",))


class AskingForGradients(Plain):
    """Its forward asks for gradients of what it has computed so far."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return (y + gradient).tanh()


def test_a_block_that_asks_for_gradients_in_its_forward_is_refused_and_kept() -> None:
    def make_model() -> nn.Module:
        return nn.Sequential(nn.Linear(40, 40), AskingForGradients(), AskingForGradients())

    training = Training(make_model, inputs, mean_square)
    with pytest.raises(RecomputeError, match="it asks for gradients in its own forward"):
        training(Recomputing(EVERY, classes=("AskingForGradients",)))
    silent = Recomputing(NONE, classes=("AskingForGradients",), wants_inputs=True)
    assert_identical(outcome(training, silent), outcome(training, Session()))
    assert all("asks for gradients" in reason for reason in silent.blocks[0].refused.values())
    assert len(silent.blocks[0].refused) == 2


class Hooking(nn.Module):
    """Its forward registers something that takes part in backward, with its input or its weight."""

    def __init__(self, register: Callable[[torch.Tensor, nn.Parameter], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(40, 40)
        self.register = register
        self.seen: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.register(x, self.linear.weight)
        self.seen = x
        return self.linear(x).tanh()


@pytest.mark.parametrize(
    "register",
    [
        lambda x, weight: x.register_hook(lambda gradient: gradient / 3),
        lambda x, weight: x.grad_fn.register_prehook(lambda gradients: (gradients[0] / 3,)),
        lambda x, weight: x.retain_grad(),
    ],
    ids=["hook of an input", "hook of its node", "retained gradient"],
)
def test_what_a_forward_registers_with_an_input_is_there_once(
    register: Callable[[torch.Tensor, nn.Parameter], object],
) -> None:
    def program(session: Session) -> Any:
        blocks = [Hooking(register) for _ in range(3)]
        result = Training(lambda: nn.Sequential(nn.Linear(40, 40), *blocks), inputs, mean_square)(session)
        return result, [block.seen.grad for block in blocks if block.seen is not None and block.seen.retains_grad]

    assert_recompute_parity(program, classes=("Hooking",))


@pytest.mark.parametrize(
    "register",
    [
        lambda x, weight: weight.register_hook(lambda gradient: gradient / 3),
        lambda x, weight: weight.register_post_accumulate_grad_hook(lambda weight: _divide(weight.grad)),
    ],
    ids=["hook of a weight", "hook after accumulation"],
)
def test_a_forward_that_registers_hooks_with_a_weight_is_refused(
    register: Callable[[torch.Tensor, nn.Parameter], object],
) -> None:
    training = Training(lambda: nn.Sequential(Hooking(register), Hooking(register)), inputs, mean_square)
    with pytest.raises(ConfigError, match=r"a Hooking edits the hooks of Linear.weight in place"):
        training(Recomputing(EVERY, classes=("Hooking",)))


def _divide(gradient: torch.Tensor) -> None:
    gradient /= 3
