"""Recomputed blocks: what their forward registers and asks for, and every way of going backward, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_ssd.errors import RecomputeError
from tests.parity.graph_programs import PROGRAMS
from tests.parity.models import Perceptrons, floats, inputs, mean_square
from tests.parity.recomputing import EVERY, Recomputing, assert_recompute_parity
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


class AskingForGradients(nn.Module):
    """Its forward asks for gradients of what it has computed so far, so that it runs again before it has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(40, 40))
        self.norm = nn.BatchNorm1d(17)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.register_hook(lambda gradient: gradient / 3)
        self.count += 1
        y = self.norm(self.linear(x)) * float(self.count)
        (gradient,) = torch.autograd.grad(y.tanh().square().sum(), x, create_graph=True)
        self.count += 1
        return x + gradient * float(self.count)


def test_a_block_that_runs_again_within_its_own_forward() -> None:
    def make_model() -> nn.Module:
        return nn.Sequential(nn.Linear(40, 40), *(AskingForGradients() for _ in range(3)))

    assert_recompute_parity(Training(make_model, inputs, mean_square), classes=("AskingForGradients",))


class Forces(Plain):
    """Its forward asks for gradients of its input."""

    def __init__(self, *, retains: bool = False) -> None:
        super().__init__()
        self.retains = retains

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.retains:
            x.retain_grad()
        y = super().forward(x)
        (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return (y + gradient).tanh()


def test_a_gradient_that_is_retained_of_the_input_of_a_block_that_asks_for_it() -> None:
    """A repetition asks for it once more."""
    linear: list[torch.Tensor] = []

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.blocks = nn.Linear(40, 40), nn.Sequential(Forces(), Forces(), Forces())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.linear(x)
            hidden.retain_grad()
            linear.append(hidden)
            return self.blocks(hidden)  # type: ignore[no-any-return]

    def program(session: Session) -> Any:
        linear.clear()
        return Training(Net, inputs, mean_square)(session), [hidden.grad for hidden in linear]

    assert_recompute_parity(program, classes=("Forces",))


def test_a_block_that_asks_for_gradients_and_retains_that_of_its_input_is_refused() -> None:
    def make_model() -> nn.Module:
        return nn.Sequential(nn.Linear(40, 40), Forces(retains=True), Forces(retains=True))

    with pytest.raises(RecomputeError, match=r"it calls retain_grad\(\) of an input, and asks for gradients"):
        Training(make_model, inputs, mean_square)(Recomputing(EVERY, classes=("Forces",)))


class Hooking(nn.Module):
    """Its forward registers something that takes part in backward: on its input each time, on its weight once."""

    def __init__(self, register: Callable[[torch.Tensor, nn.Parameter], object], *, on_weight: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(40, 40)
        self.register, self.on_weight, self.has_registered = register, on_weight, False
        self.seen: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not (self.on_weight and self.has_registered):
            self.register(x, self.linear.weight)
            self.has_registered = True
        self.seen = x
        return self.linear(x).tanh()


@pytest.mark.parametrize(
    ("register", "on_weight"),
    [
        (lambda x, weight: x.register_hook(lambda gradient: gradient / 3), False),
        (lambda x, weight: x.grad_fn.register_prehook(lambda gradients: (gradients[0] / 3,)), False),
        (lambda x, weight: x.retain_grad(), False),
        (lambda x, weight: weight.register_hook(lambda gradient: gradient / 3), True),
        (lambda x, weight: weight.register_post_accumulate_grad_hook(lambda weight: _divide(weight.grad)), True),
    ],
    ids=["hook of an input", "hook of its node", "retained gradient", "hook of a weight", "hook after accumulation"],
)
def test_what_a_forward_registers_is_there_once(
    register: Callable[[torch.Tensor, nn.Parameter], object], on_weight: bool
) -> None:
    def program(session: Session) -> Any:
        blocks = [Hooking(register, on_weight=on_weight) for _ in range(3)]
        result = Training(lambda: nn.Sequential(nn.Linear(40, 40), *blocks), inputs, mean_square)(session)
        return result, [block.seen.grad for block in blocks if block.seen is not None and block.seen.retains_grad]

    assert_recompute_parity(program, classes=("Hooking",))


def _divide(gradient: torch.Tensor) -> None:
    gradient /= 3
