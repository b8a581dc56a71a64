"""What a recomputed block has saved: edited in place, asked for twice, filled late, or other integers than before."""

import pytest
import torch
from torch import nn
from torch.nn.functional import rrelu

from lightning_ssd.errors import OffloadError, RecomputeError
from tests.parity.models import floats
from tests.parity.recomputing import EVERY, Recomputing
from tests.support.helpers import Raised, Session, assert_identical, outcome

ORDER = {"rows": torch.arange(64)}
"""Out of reach of every block."""
WIDTH = 12


class Block(nn.Module):
    def __init__(self, function, size):
        super().__init__()
        self.one, self.two = nn.Linear(size, size), nn.Linear(size, size)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def training(function, x, *, before_backward=int):
    def program(session):
        model = nn.Sequential(*(Block(function, x.shape[1]) for _ in range(2)))
        session.register(model)
        with session.saved():
            y = model(x)
            loss = (y * y.detach().sin()).sum()
        before_backward()
        loss.backward(retain_graph=True)
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    return program


def edits_result(block, x):
    y = block.one(x).exp()
    return y.mul_(2) * y


def edits_argument(block, x):
    y = block.one(x)
    z = y.sin()
    y.mul_(2)
    return z


def gives_what_it_saves(block, x):
    return block.one(x).exp()


@pytest.mark.parametrize(
    ("function", "after"),
    [(edits_result, torch.sum), (edits_argument, torch.sum), (gives_what_it_saves, torch.Tensor.zero_)],
)
def test_an_edit_is_pytorchs_own_error(function, after):
    def program(session):
        model = nn.Sequential(*(Block(function, 8) for _ in range(2)))
        session.register(model)
        with session.saved():
            y = model(floats(0, 4, 8))
        loss = y.sum()
        with torch.no_grad():
            after(y)
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    for session in (Session(), Recomputing(EVERY)):
        raised = outcome(program, session)
        assert raised.type == "RuntimeError"
        assert raised.meaning == "edited in place: [4, 8] is at 1, not 0"


class AsksTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, x * 2)
        return x.sin()

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * ctx.saved_tensors[0].cos() + ctx.saved_tensors[1]


def asks_twice(block, x):
    return AsksTwice.apply(block.one(x)) + x


def rectified_inside(block, x):
    return block.two(rrelu(block.one(x), training=True))


@pytest.mark.parametrize("function", [asks_twice, rectified_inside])
def test_what_a_plain_checkpoint_cannot_do(function):
    program = training(function, floats(0, 16, 64))
    expected = outcome(program, Session())
    assert not isinstance(expected, Raised)
    session = Recomputing(EVERY)
    assert_identical(outcome(program, session), expected)
    assert session.repeated


def assert_refused(program):
    assert not isinstance(outcome(program, Session()), Raised)
    refused = outcome(program, Recomputing(EVERY))
    assert refused.type == RecomputeError.__name__


@pytest.mark.parametrize("rows", [16, 70000])  # memory that was used before, and new memory, which is all zeros
def test_noise_that_no_repetition_gets_to_is_refused(rows):
    assert_refused(training(lambda block, x: rrelu(block.one(x), training=True), floats(0, rows, 128)))


@pytest.mark.parametrize("error", [MemoryError("out of memory"), OffloadError("a drive is lost")])
def test_what_says_nothing_of_the_block_is_raised_as_it_is(error):
    def fails_in_backward(block, x):
        y = block.one(x).sin()
        if torch._C._current_autograd_node() is not None:
            raise error
        return block.two(y).sin()

    program = training(fails_in_backward, floats(0, 16, 64))
    assert outcome(program, Recomputing(EVERY)) == Raised(type(error).__name__, str(error))


def test_other_indices_that_give_the_same_output_are_refused(monkeypatch):
    turn = lambda: monkeypatch.setitem(ORDER, "rows", ORDER["rows"].flip(0))  # noqa: E731
    assert_refused(training(lambda block, x: block.one(x)[ORDER["rows"]], torch.ones(64, 8), before_backward=turn))


@pytest.mark.parametrize(("rows", "shape"), [("equal", (1,)), ("equal at first", (2,)), ("other", ())])
def test_an_index_or_two_are_no_seeds(rows, shape, monkeypatch):
    """Where the rows of a table are equal, the output tells nothing, and of later steps even less."""
    index = torch.zeros(shape, dtype=torch.int64)

    def forward(block, x):
        return block.one(x).tanh() + block.two.weight.index_select(0, ORDER["row"]).sum(0)

    def program(session):
        net = nn.ModuleList(Block(forward, 8) for _ in range(2))
        session.register(net)
        for step in range(2):
            num_rows = 1 if rows == "equal" or (rows == "equal at first" and step == 0) else 8
            with torch.no_grad():
                for block in net:
                    block.two.weight.copy_(floats(step, num_rows, 8))
            ORDER["row"] = index
            with session.saved():
                loss = net[1](net[0](floats(step, 16, 8))).square().sum()
            ORDER["row"] = index + 1
            loss.backward()
            session.end()
        return [parameter.grad for parameter in net.parameters()]

    monkeypatch.setitem(ORDER, "row", index)
    assert_refused(program)


# -- buffers and weights ---------------------------------------------------------------------------------------------


class Viewing(nn.Module):
    """Saves nothing of its weight but a small part."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(floats(1, 8, WIDTH)[:4])

    def forward(self, x):
        return (self.linear(x) * self.weight.sum()).tanh()


VIEWS = {
    "offset": lambda data: data.as_strided(data.shape, data.stride(), 4 * WIDTH),
    "strides": lambda data: data.as_strided(data.shape, (1, 4)),
    "shape": lambda data: data[:2],
}


@pytest.mark.parametrize("name", VIEWS)
def test_another_view_of_the_same_data_is_refused(name):
    """Strides alone give the same sum here, and are found before anything is compared."""

    def program(session):
        net = nn.ModuleList([Viewing(), Viewing()])
        session.register(net)
        with session.saved():
            loss = net[1](net[0](floats(2, 5, WIDTH))).sum()
        for block in net:
            block.weight.data = VIEWS[name](block.weight.data)
        loss.backward()

    assert "Viewing.weight was given other data" in outcome(program, Recomputing(EVERY)).text
