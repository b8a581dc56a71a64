"""Recomputed blocks: state that changes, and every way of going backward, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_ssd.errors import RecomputeError
from tests.parity.models import Perceptrons, floats, mean_square
from tests.parity.recomputing import (
    EVERY,
    Recomputing,
    assert_recompute_parity,
    inputs,
)
from tests.support.helpers import (
    Session,
    Training,
    assert_identical,
    outcome,
)

# -- state -----------------------------------------------------------------------------------------------------------


class Remembering(nn.Module):
    """State of all sorts that a forward changes and depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(40, 40))
        self.register_buffer("mean", torch.zeros(40))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.last: torch.Tensor | None = None
        self.number = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))  # a new tensor
        self.count += 1  # the same tensor
        self.number += 1
        if not hasattr(self, "made_once"):
            self.made_once = x.detach().mean() + 1
        y = self.linear(x - self.mean) * (1 + 1 / self.number) * self.made_once
        if self.last is not None:
            y = y + self.last
        self.last = y.detach().mean()
        return y.tanh()


@pytest.mark.parametrize("times", [1, 2])
def test_state_is_changed_once(times: int) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(Remembering(), Remembering())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(times):
                x = x + self.blocks(x)
            return x

    made: list[Net] = []

    def program(session: Session) -> Any:
        result = Training(lambda: made.append(Net()) or made[-1], inputs, mean_square)(session)  # type: ignore[func-returns-value]
        return result, [(block.number, block.last, block.made_once) for block in made[-1].blocks]

    assert_recompute_parity(program)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(40, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


def test_an_input_may_be_a_parameter() -> None:
    """As learnt queries are. Autograd gives it back as a tensor."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries = nn.Parameter(torch.randn(17, 40))
            self.blocks = nn.Sequential(Plain(), Plain())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.blocks(self.queries)

    assert_recompute_parity(Training(Net, inputs, mean_square), classes=("Plain",))


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


def test_a_training_mode_that_changes_before_backward() -> None:
    def program(session: Session) -> Any:
        model = Perceptrons(dropout=0.3)
        session.register(model)
        with session.saved():
            loss = mean_square(model, inputs(0))
        model.eval()
        loss.backward()
        assert not any(module.training for module in model.modules())
        return [parameter.grad for parameter in model.parameters()]

    assert_recompute_parity(program)


def test_random_numbers_after_backward() -> None:
    def program(session: Session) -> Any:
        model = Perceptrons(dropout=0.3)
        session.register(model)
        with session.saved():
            loss = mean_square(model, inputs(0))
        between = torch.rand(3)
        loss.backward()
        return between, torch.rand(3), [parameter.grad for parameter in model.parameters()]

    assert_recompute_parity(program)


# -- ways of going backward ------------------------------------------------------------------------------------------


def test_backward_twice() -> None:
    def program(session: Session) -> Any:
        model = nn.Sequential(Remembering(), Remembering(), *[nn.Sequential(nn.Linear(40, 40), nn.Dropout(0.2))] * 2)
        session.register(model)
        with session.saved():
            loss = mean_square(model, inputs(0))
        loss.backward(retain_graph=True)
        loss.backward()
        return [parameter.grad for parameter in model.parameters()], list(model.buffers())

    assert_recompute_parity(program)


def test_passes_in_flight_and_backward_in_another_order() -> None:
    def program(session: Session) -> Any:
        model = Perceptrons(dropout=0.3)
        session.register(model)
        losses = []
        for step in range(3):
            with session.saved():
                losses.append(mean_square(model, inputs(step)))
        for loss in (losses[1], losses[0], losses[2]):
            loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    assert_recompute_parity(program)


def test_backward_inside_of_the_pass() -> None:
    """As with manual optimization, and gradient penalties."""

    def program(session: Session) -> Any:
        model = Perceptrons(dropout=0.3, mode="reentrant")  # whose backward calls the blocks themselves
        session.register(model)
        x = floats(0, 6, 17, 40).requires_grad_()
        with session.saved():
            mean_square(model, {"x": x}).backward()
        return x.grad, [parameter.grad for parameter in model.parameters()]

    expected = outcome(program, Session())
    session = Recomputing(EVERY)
    assert_identical(outcome(program, session), expected)
    assert session.asked == 0  # forward ran without gradients, and the rest is a repetition


def test_gradient_of_a_gradient() -> None:
    def program(session: Session) -> Any:
        model = nn.Sequential(*[nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3)])
        session.register(model)
        x = floats(0, 6, 40).requires_grad_()
        with session.saved():
            (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
            grad.square().sum().backward()
        return x.grad, [parameter.grad for parameter in model.parameters()]

    expected = outcome(program, Session())
    session = Recomputing(EVERY)
    assert_identical(outcome(program, session), expected)
    assert session.asked == 3


def test_errors_in_a_block_are_the_models_own() -> None:
    class Failing(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] == 1:
                raise KeyError("one")
            return super().forward(x)

    def program(session: Session) -> Any:
        model = nn.Sequential(*[Failing(nn.Linear(40, 40), nn.Dropout(0.2)) for _ in range(2)])
        session.register(model)
        with pytest.raises(KeyError, match="one"), session.saved():
            model(floats(0, 1, 40))
        with session.saved():
            loss = mean_square(model, {"x": floats(1, 3, 40)})
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = outcome(program, Session())
    session = Recomputing(EVERY)
    assert_identical(outcome(program, session), expected)
    assert session.depth == 0


def test_evaluation_between() -> None:
    def program(session: Session) -> Any:
        model = Perceptrons(dropout=0.3)
        session.register(model)
        results = []
        with session.saved():
            loss = mean_square(model, inputs(0))
            with torch.no_grad():
                results.append(model(floats(1, 2, 3, 40)))
            with torch.inference_mode():
                results.append(model(floats(1, 2, 3, 40)).clone())
        loss.backward()
        return results, [parameter.grad for parameter in model.parameters()]

    assert_recompute_parity(program)
