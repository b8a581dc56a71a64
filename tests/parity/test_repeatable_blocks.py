"""Blocks that remember: recomputed exactly where what they change is put back, and refused where it is not."""

from __future__ import annotations

import array
import collections
import functools
import itertools
import random
import types
import warnings
import weakref
from collections import OrderedDict, UserDict, deque
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
from tests.parity.recomputing import EVERY, Recomputing
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


class OwnContainers(Block):
    """One of them is shared with a part."""

    def prepare(self) -> None:
        self.seen: Any = {"count": 0}
        self.numbers, self.queue = {0}, deque([0], maxlen=5)
        self.order: Any = OrderedDict()
        self.linear.seen = self.seen

    def factor(self, x: torch.Tensor) -> Any:
        self.queue.append(self.queue[-1] + 1)
        self.numbers.add(self.queue[-1])
        self.linear.seen["count"] += 1
        self.seen.setdefault(f"key {self.queue[-1]}", 1)
        self.order[self.queue[-1]] = 1
        return self.queue[0] + sum(self.numbers) + self.seen["count"] + len(self.seen) + len(self.order)

    def state(self) -> Any:
        return list(self.seen), sorted(self.numbers), list(self.queue), self.seen["count"], list(self.order)


class OwnGenerator(Block):
    def prepare(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def factor(self, x: torch.Tensor) -> Any:
        return torch.rand(WIDTH, generator=self.generator)

    def state(self) -> Any:
        return self.factor(torch.zeros(1))


class GeneratorInList(OwnGenerator):
    def prepare(self) -> None:
        self.generators = [torch.Generator().manual_seed(3)]

    def factor(self, x: torch.Tensor) -> Any:
        return torch.rand(WIDTH, generator=self.generators[0])


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


PUT_BACK = [OwnList, ReplacedList, OwnContainers, OwnGenerator, GeneratorInList, Elsewhere]


@pytest.mark.parametrize("kind", PUT_BACK)
def test_what_a_block_remembers_is_changed_once(
    kind: type[Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = training(kind, kind)
    expected = outcome(program, Session())
    with open_offloader(tmp_path, RECOMPUTE) as offloader:
        assert_identical(outcome(program, Session(offloader)), expected)

    # Without putting back, the gradients would be wrong, and only what is saved would tell.
    monkeypatch.setattr(CallState, "run", lambda state, function, *args, **kwargs: function(*args, **kwargs))
    with open_offloader(tmp_path, RECOMPUTE) as offloader:
        got = outcome(program, Session(offloader))
    assert isinstance(got, Raised)
    assert got.type == RecomputeError.__name__
    monkeypatch.setattr(Fingerprint, "difference", lambda one, other: None)
    wrong = "the bits differ|second time"
    with open_offloader(tmp_path, RECOMPUTE) as offloader, pytest.raises(AssertionError, match=wrong):
        assert_identical(outcome(program, Session(offloader)), expected)


class Difficult(Block):
    """Attributes that answer questions with errors, and random numbers of another kind; a hook from outside."""

    def prepare(self) -> None:
        self.lazy = RefusesAll()
        self.__dict__["proxy"] = weakref.proxy(Counter())  # dead
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


@pytest.mark.filterwarnings("ignore:block .* hook .* of a Linear in it would run again; register it with the block")
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


# -- what is not put back --------------------------------------------------------------------------------------------


class Counter:
    """An object that the user has written."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, by: int = 1) -> int:
        self.value += by
        return self.value


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


class Named(dict[str, int]):
    value = 0


class OfClass:
    """Attributes of a class, and a generator that all instances share."""

    step = 0
    counter = Counter()
    generator = torch.Generator().manual_seed(3)


def counting() -> Callable[[], int]:
    def count(box: list[int] = [0]) -> int:  # noqa: B006 (which is the point)
        box[0] += 1
        return box[0]

    return count


def in_place(value: Any) -> Any:
    value[0] += 1
    return value[0]


def deep(value: Any) -> Any:
    while isinstance(value[-1], list):
        value = value[-1]
    return in_place(value)


def named(value: Any) -> Any:
    value.value += 1
    return value.value


def of_class(value: Any) -> Any:
    type(value).step += 1
    return type(value).step


OUTSIDE = "RecomputeError"
CANNOT_BE_SEEN = "of which a change could not be seen"
EDITS = "a Remembering edits Remembering.memory in place"

MEMORIES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], str]] = {
    "object": (Counter, named, EDITS),
    "namespace": (lambda: types.SimpleNamespace(value=0), named, EDITS),
    "slots": (Slotted, named, EDITS),
    "attribute of a dict": (Named, named, EDITS),
    "item of a dict of its own class": (lambda: Named({0: 0}), in_place, EDITS),
    "attribute of a class": (OfClass, of_class, "a Remembering edits the class OfClass in place"),
    "object of a class": (OfClass, lambda value: value.counter.add(), "a Remembering edits OfClass.counter in place"),
    "itertools.count": (lambda: itertools.count(1), next, CANNOT_BE_SEEN),
    "generator": (lambda: (number for number in range(1, 100)), next, CANNOT_BE_SEEN),
    "bound method": (lambda: Counter().add, lambda method: method(), EDITS),
    "functools.partial": (lambda: functools.partial(Counter().add, by=2), lambda function: function(), EDITS),
    "default argument": (counting, lambda function: function(), OUTSIDE),
    "generator of a class": (OfClass, lambda value: torch.rand(WIDTH, generator=value.generator), ""),
    "UserDict": (lambda: UserDict({0: 0}), in_place, ""),
    "list in a list": (lambda: [[[0]]], deep, ""),
    "dict in a namespace": (lambda: types.SimpleNamespace(d={0: 0}), lambda value: in_place(value.d), ""),
    "collections.Counter": (lambda: collections.Counter([0]), in_place, ""),
    "NumPy array": (lambda: np.zeros(2), in_place, ""),
    "array of objects": (lambda: np.array([[0], None], dtype=object), lambda value: in_place(value[0]), ""),
    "array.array": (lambda: array.array("l", [0]), in_place, ""),
    "bytearray": (lambda: bytearray(2), in_place, ""),
    "tensor by its alias of NumPy": (
        lambda: torch.zeros(2).numpy(),
        lambda value: torch.from_numpy(value).add_(1)[0].clone(),
        "",
    ),
    "module in a list": (lambda: [nn.BatchNorm1d(WIDTH)], lambda value: value[0](torch.ones(2, WIDTH))[0] + 1, ""),
}
"""How to make it, how to use it, and what comes of it: put back, kept with a warning, or refused with an error."""


def block_of(name: str, *, uses_now: bool = True) -> type[Block]:
    make, use, _ = MEMORIES[name]

    class Remembering(Block):
        def prepare(self) -> None:
            self.memory = make()

        def factor(self, x: torch.Tensor) -> Any:
            used = use(self.memory)
            return used if uses_now else 1.0

        def state(self) -> Any:
            return use(self.memory)

    return Remembering


@pytest.mark.parametrize("uses_now", [True, False])
@pytest.mark.parametrize("activations", ["recompute", "auto"])
@pytest.mark.parametrize("name", MEMORIES)
def test_what_a_block_remembers(
    name: str, activations: str, uses_now: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is equal, or an error tells, also where this step does not depend on it, so that no comparison can."""
    verdict = MEMORIES[name][2]
    if verdict == OUTSIDE and not uses_now:
        pytest.skip("what a forward changes outside of its modules is the user's promise")
    monkeypatch.setattr(lightning_ssd.scheduling.plan_maker, "make_plan", recomputes_all)
    monkeypatch.setattr(lightning_ssd.scheduling.plan_maker, "make_plan_apart", recomputes_all)
    OfClass.step, OfClass.counter = 0, Counter()
    OfClass.generator.manual_seed(3)
    program = training(*[block_of(name, uses_now=uses_now)] * 2, steps=4)
    expected = outcome(program, Session())
    assert not isinstance(expected, Raised)
    OfClass.step, OfClass.counter = 0, Counter()
    OfClass.generator.manual_seed(3)
    setup = RECOMPUTE
    if activations == "auto":
        setup = Setup(activations="auto", activation_budget=1 << 26, settled=True, recompute_modules="Block")
    with open_offloader(tmp_path, setup) as offloader, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        got = outcome(program, Session.of(offloader, setup))
    said = [str(warning.message) for warning in warned]
    if verdict == OUTSIDE:
        assert isinstance(got, Raised)
        assert got.type == RecomputeError.__name__
        assert "call zero_grad() and repeat the step" in got.text
    elif "edits" in verdict:
        if activations == "recompute":
            assert isinstance(got, Raised)
            assert got.type == ConfigError.__name__
            assert verdict in got.text
        else:
            assert_identical(got, expected)
    else:
        assert_identical(got, expected)
        if activations == "recompute":
            assert len(said) == bool(verdict), said
            assert all("Remembering.memory holds a" in text and verdict in text for text in said)


@pytest.mark.parametrize("name", [name for name, (_, _, verdict) in MEMORIES.items() if verdict == OUTSIDE])
def test_what_is_not_put_back_is_refused(name: str, tmp_path: Path) -> None:
    """Before any gradient of the block is used; from then on the block is kept."""
    torch.manual_seed(3)
    net = Net([block_of(name)] * 2)
    with open_offloader(tmp_path, RECOMPUTE) as offloader:
        offloader.register_module(net)
        for refused in ("blocks.1", "blocks.0"):
            with offloader.saved_tensors():
                loss = net(floats(1, 6, WIDTH))
            with pytest.raises(RecomputeError) as raised:
                loss.backward()
            for said in (f"block '{refused}' (Remembering)", "is not put back", "call zero_grad() and repeat the step"):
                assert said in str(raised.value)
            assert net.get_submodule(refused).linear.weight.grad is None
        with offloader.saved_tensors():
            loss = net(floats(1, 6, WIDTH))
        loss.backward()
        assert all(parameter.grad is not None for parameter in net.parameters())


class Viewing(nn.Module):
    """Saves nothing of its weight but a small part."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(floats(1, 8, WIDTH)[:4])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.weight.sum()).tanh()


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "offset": lambda data: data.as_strided(data.shape, data.stride(), 4 * WIDTH),
    "strides": lambda data: data.as_strided(data.shape, (1, 4)),
    "shape": lambda data: data[:2],
}


@pytest.mark.parametrize("name", VIEWS)
def test_another_view_of_the_same_data_is_refused(name: str) -> None:
    """Strides alone give the same sum here, and are found before anything is compared."""

    def program(session: Session) -> Any:
        net = nn.ModuleList([Viewing(), Viewing()])
        session.register(net)
        with session.saved():
            loss = net[1](net[0](floats(2, 5, WIDTH))).sum()
        for block in net:
            block.weight.data = VIEWS[name](block.weight.data)
        loss.backward()

    refused = outcome(program, Recomputing(EVERY))
    assert isinstance(refused, Raised)
    assert refused.type == RecomputeError.__name__
    assert "Viewing.weight was given other data" in refused.text


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
    kinds = (OwnGenerator, OwnList, EditsTensor, GoesBack, Elsewhere)
    program = training(*kinds, steps=6)
    expected = outcome(program, Session())
    setup = Setup(activations="auto", activation_budget=1 << 26, settled=True, recompute_modules="Block")
    with open_offloader(tmp_path, setup) as offloader:
        assert_identical(outcome(program, Session.of(offloader, setup)), expected)
        assert offloader.trace is not None
        assert "blocks.2" in {block.name for block in offloader.trace.blocks}
        report = offloader.plan_report
        assert report is not None, "no pass has followed its plan"
