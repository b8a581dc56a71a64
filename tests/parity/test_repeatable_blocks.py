"""Blocks that remember: recomputed exactly where what they change is put back, and refused where they edit tensors."""

from __future__ import annotations

import random
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lightning_ssd.scheduling.plan_maker
from lightning_ssd.errors import ConfigError, RecomputeError
from lightning_ssd.planning.planner import make_plan
from lightning_ssd.planning.recompute_trace import recomputable
from lightning_ssd.recompute.call_state import CallState
from lightning_ssd.recompute.fingerprint import Fingerprint
from tests.parity.models import floats
from tests.support.helpers import Raised, Session, Setup, assert_identical, open_offloader, outcome

RECOMPUTE = Setup(activations="recompute", drained=False)
WIDTH = 12


class Block(nn.Module):
    """Multiplies by what it remembers; backward needs the factor and what follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.prepare()

    def prepare(self) -> None:
        """Make the state."""

    def factor(self, x: torch.Tensor) -> Any:
        """Use the state, and change it."""
        return 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * torch.as_tensor(self.factor(x), dtype=x.dtype)).sin()

    def state(self) -> Any:
        """To be compared after the training."""


class OwnList(Block):
    def prepare(self) -> None:
        self.seen: list[int] = []

    def factor(self, x: torch.Tensor) -> Any:
        self.seen.append(len(self.seen))
        return len(self.seen)

    def state(self) -> Any:
        return list(self.seen)


class ReplacedList(Block):
    """The model takes what is in the list, and puts a new one there before backward."""

    def prepare(self) -> None:
        self.losses: list[torch.Tensor] = []

    def factor(self, x: torch.Tensor) -> Any:
        self.losses.append(x.square().mean())
        return 1 + len(self.losses)

    def state(self) -> Any:
        return len(self.losses)


class Named(dict[str, int]):
    """Refuses to be emptied."""

    def clear(self) -> None:
        raise AssertionError


class Containers(Block):
    def prepare(self) -> None:
        self.set, self.queue, self.counts = {0}, deque([0], maxlen=3), OrderedDict(first=0)
        self.named = Named()

    def factor(self, x: torch.Tensor) -> Any:
        self.queue.append(self.queue[-1] + 1)
        self.set.add(self.queue[-1])
        self.counts[f"key {self.queue[-1]}"] = 1
        self.counts.move_to_end("first")
        self.named["count"] = self.named.get("count", 0) + 1
        return self.queue[0] + sum(self.set) + len(self.counts) + self.named["count"]

    def state(self) -> Any:
        return sorted(self.set), list(self.queue), list(self.counts), dict(self.named)


class OwnGenerator(Block):
    def prepare(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def factor(self, x: torch.Tensor) -> Any:
        return torch.rand(WIDTH, generator=self.generator)

    def state(self) -> Any:
        return self.factor(torch.zeros(1))


class Elsewhere(Block):
    """Random numbers of Python and NumPy."""

    def prepare(self) -> None:
        random.seed(4)
        np.random.seed(4)
        self.own = random.Random(5)
        self.old = np.random.RandomState(5)
        self.new = np.random.default_rng(5)

    def factor(self, x: torch.Tensor) -> Any:
        sources = (random, np.random, self.own, self.old, self.new)
        return sum(source.random() for source in sources)  # type: ignore[attr-defined]

    def state(self) -> Any:
        return self.factor(torch.zeros(1))


class UnseenBuffers(Block):
    """Edits its buffers past autograd, and one that inference mode has made stays as it is."""

    def prepare(self) -> None:
        for name in ("by_data", "by_numpy", "by_norm"):
            self.register_buffer(name, torch.ones(WIDTH))
        with torch.inference_mode():
            self.register_buffer("evaluated", torch.ones(WIDTH))

    def factor(self, x: torch.Tensor) -> Any:
        mean = x.detach().mean(0)
        self.by_data.data.mul_(0.9).add_(mean)
        self.by_numpy.numpy()[:] += mean.numpy()
        nn.functional.batch_norm(x.detach(), self.by_norm, torch.ones(WIDTH), training=True)
        return sum(float(buffer.sum()) for buffer in self.buffers())

    def state(self) -> Any:
        return [buffer.clone() for buffer in self.buffers()]


class SharedBuffer(Block):
    """Is registered with a part of the block, too."""

    def prepare(self) -> None:
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.part = nn.Module()
        self.part.register_buffer("mean", self.mean)

    def factor(self, x: torch.Tensor) -> Any:
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        return self.part.mean.clone()

    def state(self) -> Any:
        return self.mean.clone()


class Doubling(dict[str, float]):
    """Shows other values than it has."""

    def values(self) -> Any:
        return [value * 2 for value in super().values()]


class Reversed(list[int]):
    """Shows another order than it has."""

    def __iter__(self) -> Any:
        return reversed(self)


class ContainersOfTheirOwn(Block):
    def prepare(self) -> None:
        self.scales, self.order = Doubling(first=1.0), Reversed([1, 2])

    def factor(self, x: torch.Tensor) -> Any:
        self.order.append(len(self.order))
        return self.scales["first"] + self.order[0]

    def state(self) -> Any:
        return self.scales["first"], self.order[:]


class SecondReference(Block):
    """Fills a list past the attribute, with what comes from an autograd graph."""

    def prepare(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.elsewhere = (self.losses,)

    def factor(self, x: torch.Tensor) -> Any:
        self.elsewhere[0].append(x.square().mean())
        return 1.0

    def state(self) -> Any:
        return len(self.losses)


class ReplacedHooks(Block):
    """Removes the hooks of its weight, without handles, before it registers another."""

    def factor(self, x: torch.Tensor) -> Any:
        if self.linear.weight._backward_hooks:
            self.linear.weight._backward_hooks.clear()
        self.linear.weight.register_hook(lambda gradient: gradient / 3)
        return 1.0


class Net(nn.Module):
    def __init__(self, kinds: list[type[Block]]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for kind in kinds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        loss = x.square().mean()
        for block in self.blocks:
            if isinstance(block, ReplacedList):
                loss, block.losses = loss + sum(block.losses), []
        return loss


def training(*kinds: type[Block], steps: int = 3) -> Callable[[Session], Any]:
    """Losses, gradients of each step and what the blocks remember."""

    def program(session: Session) -> Any:
        torch.manual_seed(3)
        net = Net(list(kinds))
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


REMEMBERING = [OwnList, ReplacedList, Containers, OwnGenerator, Elsewhere]


@pytest.mark.parametrize("kind", REMEMBERING)
def test_what_a_block_remembers_is_changed_once(
    kind: type[Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = training(kind, kind)
    expected = outcome(program, Session())
    with open_offloader(tmp_path, RECOMPUTE) as offloader:
        assert_identical(outcome(program, Session(offloader)), expected)

    # Without putting back, the gradients would be wrong, and only what is saved would tell.
    monkeypatch.setattr(CallState, "as_before", lambda state, run, *args, **kwargs: run(*args, **kwargs))
    with open_offloader(tmp_path, RECOMPUTE) as offloader:
        got = outcome(program, Session(offloader))
    assert isinstance(got, Raised)
    assert got.type == RecomputeError.__name__
    monkeypatch.setattr(Fingerprint, "difference", lambda one, other: None)
    wrong = "the bits differ|second time"
    with open_offloader(tmp_path, RECOMPUTE) as offloader, pytest.raises(AssertionError, match=wrong):
        assert_identical(outcome(program, Session(offloader)), expected)


@pytest.mark.parametrize("kind", [UnseenBuffers, SharedBuffer, ContainersOfTheirOwn, ReplacedHooks, SecondReference])
def test_what_is_changed_by_the_back_door_is_changed_once(kind: type[Block], tmp_path: Path) -> None:
    program = training(kind, kind)
    with open_offloader(tmp_path, RECOMPUTE) as offloader:
        assert_identical(outcome(program, Session(offloader)), outcome(program, Session()))


class Difficult(Block):
    """Attributes that answer questions with errors, and random numbers of another kind; a hook from outside."""

    def prepare(self) -> None:
        self.lazy = RefusesAll()
        self.__dict__["proxy"] = weakref.proxy(nn.Linear(1, 1))  # dead
        self.pcg = np.random.RandomState(np.random.PCG64(3))

    def factor(self, x: torch.Tensor) -> Any:
        return self.pcg.random()


class RefusesAll:
    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


def test_what_cannot_be_looked_into_is_left_alone(tmp_path: Path) -> None:
    program = training(Difficult, Difficult)
    expected = outcome(program, Session())
    assert not isinstance(expected, Raised)
    with open_offloader(tmp_path, RECOMPUTE) as offloader:
        assert_identical(outcome(program, Session(offloader)), expected)


@pytest.mark.parametrize("activations", ["recompute", "auto"])
def test_a_hook_that_collects_sees_each_forward_once_before_the_loss(tmp_path: Path, activations: str) -> None:
    """Hugging Face collects attentions and router logits so; a block that ran twice would count double in the loss."""

    def program(session: Session) -> Any:
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

    expected = outcome(program, Session())
    budget = {"activation_budget": 1 << 26} if activations == "auto" else {}
    setup = Setup(activations=activations, settled=True, recompute_modules="Block", **budget)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lightning_ssd.scheduling.plan_maker, "make_plan", recomputes_all)
        patch.setattr(lightning_ssd.scheduling.plan_maker, "make_plan_apart", recomputes_all)
        with open_offloader(tmp_path, setup) as offloader:
            assert_identical(outcome(program, Session.of(offloader, setup)), expected)


# -- what cannot be put back -----------------------------------------------------------------------------------------


class EditsTensor(Block):
    def prepare(self) -> None:
        self.sum = [torch.ones(WIDTH)]

    def factor(self, x: torch.Tensor) -> Any:
        self.sum[0].add_(x.detach().mean(0))
        return self.sum[0].clone()


class EditsWeight(Block):
    def factor(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            self.linear.bias.mul_(0.5)
        return 1.0


class GoesBack(Block):
    """A loss of its own, in forward."""

    def prepare(self) -> None:
        self.auxiliary = nn.Linear(WIDTH, 1)

    def factor(self, x: torch.Tensor) -> Any:
        self.auxiliary(x.detach()).square().mean().backward()
        return 1.0


class StartsAnew(GoesBack):
    """The gradient of this call takes the place of the last one's."""

    def factor(self, x: torch.Tensor) -> Any:
        self.auxiliary.zero_grad()
        return super().factor(x)


REFUSED = {
    GoesBack: "a GoesBack edits the gradient of Linear.weight in place",
    StartsAnew: "a StartsAnew edits the gradient of Linear.weight in place",
    EditsTensor: "a EditsTensor edits EditsTensor.sum in place",
    EditsWeight: "a EditsWeight edits Linear.bias in place",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_block_that_must_be_recomputed_and_cannot_be_is_an_error(kind: type[Block], tmp_path: Path) -> None:
    with open_offloader(tmp_path, RECOMPUTE) as offloader:
        got = outcome(training(kind, kind), Session(offloader))
    assert isinstance(got, Raised)
    assert got.type == ConfigError.__name__
    assert REFUSED[kind] in got.text
    assert "OffloadPolicy.recompute_modules" in got.text


class Odd(Block):
    """Not numbers, parts repeated in memory, complex and conjugate: equal all the same, and so is a statistic."""

    def prepare(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.dropout(self.norm(self.linear(x)))
        z = (y * torch.full((1, 1), float("nan")).expand_as(y)).nan_to_num()
        turned = torch.complex(y, y).conj() * torch.complex(y, z)
        return y.t().exp().t() + z + turned.real + y[:, :1].expand_as(y).sigmoid()

    def state(self) -> Any:
        return self.norm.running_mean


def test_what_only_looks_different_is_recomputed(tmp_path: Path) -> None:
    program = training(Odd, Odd)
    expected = outcome(program, Session())
    with open_offloader(tmp_path, RECOMPUTE) as offloader:
        assert_identical(outcome(program, Session(offloader)), expected)


# -- where nobody has to recompute -----------------------------------------------------------------------------------


def recomputes_all(trace: Any, machine: Any, goal: Any) -> Any:
    """A planner that recomputes whatever it may."""
    plan = make_plan(trace, machine, replace(goal, recompute=False))
    return replace(plan, recompute=frozenset(recomputable(trace))) if goal.recompute else plan


def test_a_plan_recomputes_only_what_edits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightning_ssd.scheduling.plan_maker, "make_plan", recomputes_all)
    monkeypatch.setattr(lightning_ssd.scheduling.plan_maker, "make_plan_apart", recomputes_all)
    kinds = (OwnGenerator, OwnList, Containers, EditsTensor, GoesBack, Elsewhere)
    program = training(*kinds, steps=6)
    expected = outcome(program, Session())
    setup = Setup(activations="auto", activation_budget=1 << 26, settled=True, recompute_modules="Block")
    with open_offloader(tmp_path, setup) as offloader:
        assert_identical(outcome(program, Session.of(offloader, setup)), expected)
        assert offloader.trace is not None
        assert "blocks.3" in {block.name for block in offloader.trace.blocks}
        report = offloader.plan_report
        assert report is not None, "no pass has followed its plan"
