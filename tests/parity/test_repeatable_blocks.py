"""Blocks that remember: recomputed exactly where what they change is put back; else refused in time, or kept."""

from __future__ import annotations

import functools
import itertools
import random
import types
import weakref
from collections import OrderedDict, deque
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lightning_ssd.errors import ConfigError, RecomputeError
from tests.parity.models import floats
from tests.parity.recomputing import recompute_what_may_be
from tests.support.helpers import Raised, Session, Setup, assert_identical, open_offloader, outcome

RECOMPUTE = Setup(activations="recompute", drained=False)
WIDTH = 12


class Block(nn.Module):
    """Multiplies by what it remembers; backward needs the factor and what follows it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.prepare()

    def prepare(self):
        """Make the state."""

    def factor(self, x):
        """Use the state, and change it."""
        return 1.0

    def forward(self, x):
        return (self.linear(x) * torch.as_tensor(self.factor(x), dtype=x.dtype)).sin()

    def state(self):
        """To be compared after the training."""


class Doubling(dict[str, float]):
    """Shows other values than it has."""

    def values(self):
        return [value * 2 for value in super().values()]


class Reversed(list[int]):
    """Shows another order than it has."""

    def __iter__(self):
        return reversed(self)


class Remembering(Block):
    """Changes one of each kind of what is put back, and depends on it."""

    def prepare(self):
        self.linear = nn.utils.parametrizations.spectral_norm(self.linear)
        self.calls, self.scales, self.order = 0, Doubling(first=1.0), Reversed([1, 2])
        self.loss = torch.zeros(())  # computed anew in each call
        self.generator = torch.Generator().manual_seed(3)
        random.seed(4)
        np.random.seed(4)
        self.own, self.old, self.new = random.Random(5), np.random.RandomState(5), np.random.default_rng(5)
        for name in ("by_data", "by_numpy", "by_norm", "replaced", "shared", "elsewhere"):
            self.register_buffer(name, torch.ones(WIDTH))
        with torch.inference_mode():
            self.register_buffer("evaluated", torch.ones(WIDTH))
        self.register_buffer("counted", torch.zeros(1))
        self.register_buffer("repeated", self.counted.expand(4))
        self.part = nn.Module()
        self.part.register_buffer("shared", self.shared)
        self.statistics = (self.elsewhere, self.elsewhere.view(2, -1))

    def factor(self, x):
        return self._counted(x) * self._drawn() + self._statistics(x.detach().mean(0)) + self.part.shared

    def _counted(self, x):
        self.calls += 1
        self.loss = x.square().mean() + self.loss.detach() / 2
        if not hasattr(self, "made_once"):
            self.made_once = float(x.detach().mean()) + 1
        return (self.calls + self.scales["first"] + self.order[0] + float(self.loss.detach())) * self.made_once

    def _drawn(self):
        sources = (random, np.random, self.own, self.old, self.new)
        return torch.rand(WIDTH, generator=self.generator) + sum(source.random() for source in sources)

    def _statistics(self, mean):
        self.replaced = 0.9 * self.replaced + 0.1 * mean
        self.shared.mul_(0.9).add_(mean)
        self.statistics[0].mul_(0.9).add_(mean)  # by another reference to a buffer, and by a view of it
        self.statistics[1].data.mul_(0.5)
        self.counted.add_(mean[0])
        self.by_data.data.mul_(0.9).add_(mean)  # these three past autograd
        self.by_numpy.numpy()[:] += mean.numpy()
        nn.functional.batch_norm(mean.expand(4, WIDTH), self.by_norm, torch.ones(WIDTH), training=True)
        return sum(float(buffer.sum()) for buffer in self.buffers())

    def state(self):
        kept = self.calls, self.scales["first"], self.order[:], self.loss.detach(), self.made_once
        return [*kept, self._drawn(), *(buffer.clone() for buffer in self.buffers())]


class Net(nn.Module):
    def __init__(self, kinds, times=1):
        super().__init__()
        self.blocks = nn.ModuleList(kind() for kind in kinds)
        self.times = times

    def forward(self, x):
        for block in [*self.blocks] * self.times:
            x = x + block(x)
        loss = x.square().mean()
        for block in self.blocks:
            if isinstance(block, Remembering):
                loss = loss + block.loss
        return loss


def training(*kinds, steps=3, times=1):
    """Losses, gradients of each step and what the blocks remember."""

    def program(session):
        torch.manual_seed(3)
        net = Net(list(kinds), times)
        session.register(net)
        seen = []
        for step in range(steps):
            x = floats(step, 6, WIDTH)
            with session.saved():
                loss = net(x)
            loss.backward()
            session.end()
            seen.append([loss.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)])
            net.zero_grad()
        return seen, [block.state() for block in net.blocks], torch.rand(3)

    return program


def plainly(program):
    expected = outcome(program, Session())
    assert not isinstance(expected, Raised), expected
    return expected


def recomputed(program, directory):
    with open_offloader(directory, RECOMPUTE) as offloader:
        return outcome(program, Session(offloader))


@pytest.mark.parametrize("times", [1, 2])
def test_what_a_block_remembers_is_changed_once(times, tmp_path):
    program = training(Remembering, Remembering, times=times)
    assert_identical(recomputed(program, tmp_path), plainly(program))


class Difficult(Block):
    """Attributes that answer questions with errors, and random numbers of another kind; a hook from outside."""

    def prepare(self):
        self.lazy = RefusesAll()
        self.__dict__["proxy"] = weakref.proxy(nn.Linear(1, 1))  # dead
        self.pcg = np.random.RandomState(np.random.PCG64(3))

    def factor(self, x):
        return self.pcg.random()


class RefusesAll:
    __slots__ = ()

    def __getattr__(self, name):
        raise RuntimeError(f"no {name}")


class Odd(Block):
    """Not numbers, parts repeated in memory, complex and conjugate: equal all the same, and so is a statistic."""

    def prepare(self):
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        y = self.dropout(self.norm(self.linear(x)))
        z = (y * torch.full((1, 1), float("nan")).expand_as(y)).nan_to_num()
        turned = torch.complex(y, y).conj() * torch.complex(y, z)
        return y.t().exp().t() + z + turned.real + y[:, :1].expand_as(y).sigmoid()

    def state(self):
        return self.norm.running_mean


class BothModes(Block):
    """Saves statistics to normalise with, and edits them later: here or in its next call, past their version."""

    def prepare(self):
        self.norm = nn.BatchNorm1d(WIDTH)
        self.norm.register_buffer("overlapping", torch.full((1,), 0.5).expand(WIDTH))  # nothing can be written to it

    def forward(self, x):
        y = self.norm.eval()(self.linear(x)).sin()
        return (self.norm.train()(y) * self.norm.overlapping).sin()

    def state(self):
        return self.norm.running_var


@pytest.mark.parametrize("times", [1, 2])
def test_a_norm_in_both_modes_gives_the_bits_of_plain_training(times, tmp_path):
    program = training(BothModes, BothModes, times=times)
    assert_identical(recomputed(program, tmp_path), plainly(program))


@pytest.mark.parametrize("kind", [Difficult, Odd])
def test_what_looks_difficult_is_recomputed(kind, tmp_path):
    program = training(kind, kind)
    assert_identical(recomputed(program, tmp_path), plainly(program))


# -- what cannot be put back -----------------------------------------------------------------------------------------


class Meter:
    """Counts for all."""

    total = 0

    def add(self):
        type(self).total += 1
        return self.total


def in_place(value):
    value[0] += 1
    return value[0]


def named(value):
    value.value += 1
    return value.value


OUTSIDE = {
    "object": (lambda: types.SimpleNamespace(value=0), named),
    "class attribute": (Meter, Meter.add),
    "function": (lambda: functools.partial(in_place, [0]), lambda function: function()),
    "list in a dict": (lambda: {"inner": [0]}, lambda value: in_place(value["inner"])),
    "generator in a tuple": (
        lambda: (torch.Generator().manual_seed(3),),
        lambda value: torch.rand(WIDTH, generator=value[0]),
    ),
    "NumPy array": (lambda: np.zeros(2), in_place),
}
KEPT = {
    "itertools.count": (lambda: itertools.count(1), next),
    "generator": (lambda: (number for number in range(1, 100)), next),
    "iterator in a list": (lambda: [iter([*range(1, 100)])], lambda value: next(value[0])),
}


def block_of(make, use):
    class Remembering(Block):
        def prepare(self):
            self.memory = make()

        def factor(self, x):
            return use(self.memory)

    return Remembering


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_lies_outside_of_the_contract_is_refused(name, tmp_path):
    kind = block_of(*OUTSIDE[name])
    program = training(kind, kind, steps=1)
    plainly(program)
    refused = recomputed(program, tmp_path)
    assert refused.type == RecomputeError.__name__
    assert "it depends on something that has changed and is not put back" in refused.text


class OwnSlots(Block):
    __slots__ = ("calls",)

    def prepare(self):
        self.calls = 0

    def factor(self, x):
        self.calls += 1
        return self.calls


class Scripted(Block):
    """Buffers of what is scripted are out of Python's sight."""

    def prepare(self):
        self.norm = torch.jit.script(nn.BatchNorm1d(WIDTH))

    def factor(self, x):
        return self.norm(x)

    def state(self):
        return self.norm.running_mean.clone()


UNSEEN = "a \\w+ keeps attributes outside of its __dict__"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [*((block_of(*case), "") for case in KEPT.values()), (OwnSlots, UNSEEN), (Scripted, UNSEEN)],
    ids=[*KEPT, "slots", "scripted"],
)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_what_is_out_of_sight_keeps_the_block(kind: type[Block], reason: str, tmp_path: Path) -> None:
    program = training(kind, kind)
    expected = plainly(program)
    with pytest.warns(UserWarning, match=f"is not recomputed: {reason}"):
        assert_identical(recomputed(program, tmp_path), expected)


class EditsWeight(Block):
    def factor(self, x):
        with torch.no_grad():
            self.linear.bias.mul_(0.5)
        return 1.0


class GoesBack(Block):
    """A loss of its own, in forward."""

    def prepare(self):
        self.auxiliary = nn.Linear(WIDTH, 1)

    def factor(self, x):
        self.auxiliary(x.detach()).square().mean().backward()
        return 1.0


class StartsAnew(Block):
    """Forgets what other calls have accumulated."""

    def factor(self, x):
        self.linear.weight.grad = torch.zeros(WIDTH, WIDTH)
        return 1.0


class Exchanges(Block):
    """Gives a buffer other memory, which a repetition would do to the buffer itself."""

    def prepare(self):
        self.register_buffer("mean", torch.zeros(WIDTH))

    def factor(self, x):
        self.mean.data = 0.9 * self.mean + x.detach().mean(0)
        return 1.0

    def state(self):
        return self.mean


REFUSED = {
    GoesBack: (RecomputeError, "it asks for gradients in its own forward"),
    StartsAnew: (ConfigError, "a StartsAnew edits the gradient of Linear.weight in place"),
    Exchanges: (ConfigError, "a Exchanges edits the storage of Exchanges.mean in place"),
    EditsWeight: (ConfigError, "a EditsWeight edits Linear.bias in place"),
}


def replace_in_place(value):
    """Replace the only item by another float, for which Python takes the memory of the first one."""
    address, number, others = id(value[0]), int(value.pop()), list[float]()
    while id(new := number + 1.5) != address and len(others) < 1000:
        others.append(new)
    value.append(new)
    return 1.0


EDITED = {
    "list": (lambda: [1], lambda value: value.append(2) or len(value)),
    "list of a class of its own": (lambda: Reversed([1]), lambda value: value.append(2) or len(value)),
    "item of a list": (lambda: [1.0], lambda value: value.__setitem__(0, value[0] + 1) or value[0]),
    "item of a list, for one at the same address": (lambda: [float("1000.5")], lambda value: replace_in_place(value)),
    "deque": (lambda: deque([1], maxlen=3), lambda value: value.append(len(value)) or len(value)),
    "set": (lambda: {0}, lambda value: value.add(len(value)) or len(value)),
    "dict": (lambda: {"a": 1}, lambda value: value.update(b=len(value)) or len(value)),
    "order of a dict": (lambda: OrderedDict(a=1, b=2), lambda value: value.move_to_end("a") or len(value)),
    "tensor in a list": (lambda: [torch.ones(WIDTH)], lambda value: value[0].mul_(0.5).clone()),
    "list by another reference": (lambda: [1], lambda value: [value][0].append(2) or len(value)),
}


@pytest.mark.parametrize("name", EDITED)
def test_a_block_that_edits_a_container_is_an_error_or_kept(name, tmp_path):
    kind = block_of(*EDITED[name])
    got = recomputed(training(kind, kind), tmp_path)
    assert got.type == ConfigError.__name__
    assert "a Remembering edits Remembering.memory in place, so that it cannot be recomputed" in got.text
    program = training(kind, kind)
    with open_offloader(tmp_path, AUTO) as offloader:
        assert_identical(outcome(program, Session.of(offloader, AUTO)), plainly(program))


class Collects(Block):
    """Its list is filled by the model: with what other calls have computed."""

    def prepare(self):
        self.memory = []


@pytest.mark.parametrize(
    ("is_detached", "is_between", "text"),
    [
        (True, True, "Collects.memory has other items than in forward"),
        (True, False, ""),
        (False, False, "Collects.memory holds tensors that an earlier call has computed; leave them there detached"),
    ],
)
@pytest.mark.filterwarnings("ignore:block 'blocks.0'")
def test_a_container_that_the_model_fills(is_detached, is_between, text, tmp_path):
    """Before backward it is refused; between steps the block goes on, unless the container holds graphs."""

    def program(session):
        torch.manual_seed(3)
        net, seen = Net([Collects, Collects]), []
        session.register(net)
        for step in range(3):
            with session.saved():
                loss = net(floats(step, 6, WIDTH))
            if is_between:
                net.blocks[0].memory.append(loss.detach())
            loss.backward()
            session.end()
            if not is_between:
                net.blocks[0].memory.append(loss.detach() if is_detached else loss)
            seen.append([loss.detach(), *(p.grad.clone() for p in net.parameters())])
        return seen

    expected = plainly(program)
    if is_between:
        got = recomputed(program, tmp_path)
        assert (got.type, text in got.text) == (RecomputeError.__name__, True)
    elif text:
        with pytest.warns(UserWarning, match=text):
            assert_identical(recomputed(program, tmp_path), expected)
    else:
        assert_identical(recomputed(program, tmp_path), expected)


class Counts(Block):
    """Edits a buffer in place."""

    def prepare(self):
        self.register_buffer("calls", torch.zeros(1))

    def factor(self, x):
        self.calls += 1
        return 1.0

    def state(self):
        return self.calls


def test_a_buffer_that_gets_other_memory_before_backward_is_refused(tmp_path):
    def program(session):
        net = Net([Counts, Counts])
        session.register(net)
        with session.saved():
            loss = net(floats(0, 6, WIDTH))
        net.blocks[0].calls.data = torch.zeros(1)
        loss.backward()

    got = recomputed(program, tmp_path)
    assert (got.type, "Counts.calls was given other data" in got.text) == (RecomputeError.__name__, True)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_block_that_must_be_recomputed_and_cannot_be_is_an_error(kind, tmp_path):
    got = recomputed(training(kind, kind), tmp_path)
    error, text = REFUSED[kind]
    assert got.type == error.__name__
    assert text in got.text
    assert "OffloadPolicy.recompute_modules" in got.text


# -- under plans -----------------------------------------------------------------------------------------------------


@pytest.fixture
def _recomputes_what_it_may(monkeypatch):
    recompute_what_may_be(monkeypatch)


AUTO = Setup(activations="auto", activation_budget=1 << 26, settled=True, recompute_modules="Block")


@pytest.mark.usefixtures("_recomputes_what_it_may")
@pytest.mark.parametrize("setup", [RECOMPUTE, AUTO], ids=["recompute", "auto"])
def test_a_hook_that_collects_sees_each_forward_once_before_the_loss(setup, tmp_path):
    """Hugging Face collects attentions and router logits so; a block that ran twice would count double in the loss."""

    def program(session):
        torch.manual_seed(3)
        net, collected = Net([Block, Block]), []
        for block in net.blocks:
            block.linear.register_forward_hook(lambda module, inputs, output: collected.append(output))
        session.register(net)
        seen = []
        for step in range(6):
            with session.saved():
                loss = net(floats(step, 6, WIDTH)) + sum(output.square().mean() for output in collected)
            seen.append((len(collected), loss.detach()))
            loss.backward()
            session.end()
            collected.clear()
        return seen

    with open_offloader(tmp_path, setup) as offloader:
        assert_identical(outcome(program, Session.of(offloader, setup)), plainly(program))


@pytest.mark.usefixtures("_recomputes_what_it_may")
def test_a_plan_recomputes_only_what_edits_nothing(tmp_path):
    program = training(Remembering, block_of(*EDITED["tensor in a list"]), GoesBack, Remembering, steps=6)
    expected = plainly(program)
    with open_offloader(tmp_path, AUTO) as offloader:
        assert_identical(outcome(program, Session.of(offloader, AUTO)), expected)
        assert "blocks.1" in {block.name for block in offloader.trace.blocks}
        assert offloader.plan_report is not None, "no pass has followed its plan"
