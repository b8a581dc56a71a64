"""Recomputed blocks: what their forward registers and asks for, and every way of going backward, bit for bit."""

import pytest
from torch import nn

from lightning_ssd.errors import ConfigError
from tests.parity.graph_programs import PROGRAMS
from tests.parity.models import inputs, mean_square
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
def test_backward_after_the_pass(name):
    assert_recompute_parity(PROGRAMS[name])


@pytest.mark.parametrize("name", ["double_backward", "backward_inside_the_context"])
def test_backward_inside_of_the_pass(name):
    """As with manual optimization, and gradient penalties."""
    session = Recomputing(EVERY)
    assert_identical(outcome(PROGRAMS[name], session), outcome(PROGRAMS[name], Session()))
    assert session.asked == 3


# -- what a forward registers and asks for ---------------------------------------------------------------------------


class Hooking(nn.Module):
    """Its forward registers something that takes part in backward, with its input or its weight."""

    def __init__(self, register):
        super().__init__()
        self.linear = nn.Linear(40, 40)
        self.register = register
        self.seen = None

    def forward(self, x):
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
def test_what_a_forward_registers_with_an_input_is_there_once(register):
    def program(session):
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
def test_a_forward_that_registers_hooks_with_a_weight_is_refused(register):
    training = Training(lambda: nn.Sequential(Hooking(register), Hooking(register)), inputs, mean_square)
    with pytest.raises(ConfigError, match=r"a Hooking edits the hooks of Linear.weight in place"):
        training(Recomputing(EVERY, classes=("Hooking",)))


def _divide(gradient):
    gradient /= 3
