"""What is put back for a repetition is as it was afterwards: also where Ctrl-C comes anywhere in it."""

import random
import weakref

import pytest
import torch
from torch import nn

from lightning_ssd.recompute.call_state import CallState
from tests.parity.recomputing import EVERY, Recomputing
from tests.support.interrupted_points import PointsIn

REPETITION = ("recompute/call_state.py", "recompute/checkpointed_call.py", "recompute/fingerprint.py", "common/rng.py")


class Block(nn.Module):
    """Changes one of each kind of what is put back."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.generator = torch.Generator().manual_seed(3)
        self.calls, self.names = 0, {"first": 0}
        self.losses = []

    def forward(self, x):
        self.calls += 1
        self.names = {**self.names, "last": self.calls}
        self.losses = [*self.losses, x.detach().square().mean()]
        x.register_hook(lambda gradient: gradient / 3)
        noise = torch.rand(8, generator=self.generator) * self.calls * len(self.losses)
        return (self.norm(self.linear(x)) * noise * random.random()).tanh()


def state_of(net, *tensors):
    remembered = [
        (block.calls, list(block.names.items()), block.generator.get_state())
        for block in net.children()
        if isinstance(block, Block)
    ]
    remembered += [[*map(id, block.losses)] for block in net.children() if isinstance(block, Block)]
    hooks = [len(tensor._backward_hooks or ()) for tensor in (*net.parameters(), *tensors)]
    return repr((remembered, [b.tolist() for b in net.buffers()], hooks, random.getstate(), torch.get_rng_state()))


def test_one_interrupt_anywhere_leaves_all_as_it_was():
    points, num = PointsIn(*REPETITION), 0
    while True:
        net = nn.Sequential(Block(), Block())
        x = torch.ones(4, 8).requires_grad_()
        session = Recomputing(EVERY, classes=("Block",))
        session.register(net)
        with session.saved():
            loss = net(x).sum()
            net(torch.randn(4, 8, requires_grad=True))  # changes all once more
        before = state_of(net, x)
        if points.interrupt(loss.backward) is None:
            break
        assert state_of(net, x) == before, points.where
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        num += 1
    assert state_of(net, x) == before
    assert num > 100


class Leaving(nn.Module):
    """Leaves what nobody asks for the gradient of, as layers of experts do with an auxiliary loss."""

    def __init__(self, where):
        super().__init__()
        self.linear, self.gate = nn.Linear(8, 8), nn.Linear(8, 8)
        self.where = where
        self.loss = None
        self.losses = []

    def forward(self, x):
        loss = self.gate(x).softmax(-1).square().sum()
        if self.where == "attribute":
            self.loss = loss
        elif self.where == "a tuple":
            self.loss = (loss, (loss,))
        else:
            self.losses = [loss]
        return self.linear(x).tanh()


@pytest.mark.parametrize("where", ["attribute", "a tuple", "a list"])
@pytest.mark.filterwarnings("ignore:block .* is not recomputed. Leaving.losses holds tensors")
def test_graphs_of_earlier_calls_are_let_go(where):
    net = nn.Sequential(Leaving(where), Leaving(where))
    session = Recomputing(EVERY, classes=("Leaving",))
    session.register(net)
    given = []
    net[1].register_forward_pre_hook(lambda module, args: given.append(weakref.ref(args[0])))
    for _ in range(4):
        with session.saved():
            loss = net(torch.randn(4, 8)).sum()
        loss.backward()
        session.end()
        del loss
    assert len(session.repeated) > 0
    assert sum(reference() is not None for reference in given) <= 1


def test_what_began_as_it_ended_is_put_back_all_the_same():
    """That nobody seems to have drawn from a generator tells nothing."""
    random.seed(7)
    state = CallState([nn.Linear(2, 2)])
    random.seed(7)  # the call
    assert state.settle() is None
    drawn = random.random()
    before = random.getstate()
    state.as_before(random.seed, 7)
    assert random.getstate() == before
    assert random.random() != drawn


def test_arguments_may_have_any_name():
    state = CallState([nn.Linear(2, 2)])
    assert state.as_before(dict, run=1, self=2) == {"run": 1, "self": 2}
