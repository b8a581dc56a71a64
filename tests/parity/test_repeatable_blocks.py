"""Blocks that remember: recomputed exactly where what they change can be put back, and refused where it cannot."""

from __future__ import annotations

import random
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lightning_ssd.scheduler
from lightning_ssd.blocks import Blocks, find_blocks
from lightning_ssd.errors import ConfigError
from lightning_ssd.planning.planner import make_plan
from lightning_ssd.planning.recomputation import recomputable
from lightning_ssd.reach import Reach
from lightning_ssd.trial import Trial
from tests.helpers import Raised, Session, Setup, assert_identical, open_offloader, outcome
from tests.parity.models import floats

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


class Containers(Block):
    def prepare(self) -> None:
        self.seen: dict[str, Any] = {"set": set(), "inner": [deque([0], maxlen=5)], "count": 0}

    def factor(self, x: torch.Tensor) -> Any:
        queue = self.seen["inner"][0]
        queue.append(queue[-1] + 1)
        self.seen["set"].add(queue[-1])
        self.seen["count"] += 1
        self.seen.setdefault(f"key {queue[-1]}", 1)
        return queue[0] + sum(self.seen["set"]) + self.seen["count"] + len(self.seen)

    def state(self) -> Any:
        return list(self.seen), sorted(self.seen["set"]), list(self.seen["inner"][0]), self.seen["count"]


class Counter:
    """An object that somebody has written."""

    def __init__(self) -> None:
        self.value = 0


class Objects(Block):
    def prepare(self) -> None:
        self.counter = Counter()
        self.names = types.SimpleNamespace(value=0)

    def factor(self, x: torch.Tensor) -> Any:
        self.counter.value += 1
        self.names.value += 2
        return self.counter.value * self.names.value

    def state(self) -> Any:
        return self.counter.value, self.names.value


class ClassAttribute(Block):
    step = 0
    items: list[int] = []  # noqa: RUF012

    def prepare(self) -> None:
        type(self).step = 0
        type(self).items.clear()
        type(self).__dict__.get("made") and delattr(type(self), "made")

    def factor(self, x: torch.Tensor) -> Any:
        kind = type(self)
        kind.step += 1
        kind.items.append(1)
        if "made" not in vars(kind):
            kind.made = 7 + kind.step
        return kind.step + len(kind.items) + kind.made

    def state(self) -> Any:
        return type(self).step, len(type(self).items)


class OwnGenerator(Block):
    def prepare(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def factor(self, x: torch.Tensor) -> Any:
        return torch.rand(WIDTH, generator=self.generator)

    def state(self) -> Any:
        return self.factor(torch.zeros(1))


class GeneratorInList(OwnGenerator):
    def prepare(self) -> None:
        self.generators = {"all": [(torch.Generator().manual_seed(3),)]}

    def factor(self, x: torch.Tensor) -> Any:
        return torch.rand(WIDTH, generator=self.generators["all"][0][0])


class GeneratorOfClass(OwnGenerator):
    generator = torch.Generator()

    def prepare(self) -> None:
        self.generator.manual_seed(3)


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
            if isinstance(block, Hidden):
                block.hidden.calls = 0
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


REMEMBERING = [
    *(OwnList, ReplacedList, Containers, Objects, ClassAttribute),
    *(OwnGenerator, GeneratorInList, GeneratorOfClass, Elsewhere),
]


@pytest.mark.parametrize("kind", REMEMBERING)
def test_what_a_block_remembers_is_changed_once(
    kind: type[Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = training(kind, kind)
    expected = outcome(program, Session())
    with open_offloader(tmp_path, RECOMPUTE) as offloader:
        assert_identical(outcome(program, Session(offloader)), expected)

    # Without putting back, the trial tells.
    monkeypatch.setattr(Reach, "as_before", lambda reach: nullcontext())
    with open_offloader(tmp_path, RECOMPUTE) as offloader:
        got = outcome(program, Session(offloader))
        assert isinstance(got, Raised)
        assert "other bits" in got.text

    # And without a trial the gradients would be wrong, and nobody would know.
    monkeypatch.setattr(Trial, "run", lambda trial, first, again, why_not: first())
    with open_offloader(tmp_path, RECOMPUTE) as offloader, pytest.raises(AssertionError, match="the bits differ"):
        assert_identical(outcome(program, Session(offloader)), expected)


# -- what cannot be put back -----------------------------------------------------------------------------------------


class OutOfSight:
    """Has no ``__dict__`` to look into."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class Hidden(Block):
    """Computes something else when it runs for the second time in a pass; the model sets it back in each."""

    def prepare(self) -> None:
        self.hidden = OutOfSight()

    def factor(self, x: torch.Tensor) -> Any:
        self.hidden.calls += 1
        return self.hidden.calls


class Saves(torch.autograd.Function):
    """Returns its input; only backward knows the factor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(factor)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * ctx.saved_tensors[0], None


class HiddenFromOutput(Hidden):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Saves.apply(self.linear(x).tanh(), torch.full((), self.factor(x), dtype=x.dtype))  # type: ignore[no-any-return]


class HiddenSign(Hidden):
    """0.0 and -0.0 are not the same."""

    def factor(self, x: torch.Tensor) -> Any:
        self.hidden.calls += 1
        return 0.0 if self.hidden.calls == 1 else -0.0


class HiddenNumber(Hidden):
    """Another number of saved tensors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y * 1 if self.factor(x) == 1 else (y.exp() * 0 + y)


class HiddenError(Hidden):
    def factor(self, x: torch.Tensor) -> Any:
        if self.hidden.calls:
            raise RuntimeError("not again")
        return super().factor(x)


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


REFUSED = {
    Hidden: "a Hidden cannot be recomputed exactly: run again from the same inputs it computed other bits",
    HiddenFromOutput: "other bits",
    HiddenSign: "other bits",
    HiddenNumber: "other bits",
    HiddenError: "it raised RuntimeError: not again",
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


class Pass:
    """Wants every block recomputed that can be."""

    wants_inputs = True
    must_recompute = False

    def __init__(self) -> None:
        self.told: list[str] = []

    def block_enters(self, name: str) -> bool:
        self.told.append(name)
        return True

    def block_inputs(self, nbytes: int) -> None: ...

    def block_leaves(self) -> None: ...

    def block_kept(self) -> None:
        self.told.append("kept")

    @contextmanager
    def repeating(self) -> Iterator[None]:
        self.told.append("repeated")
        yield

    def block_tried(self) -> AbstractContextManager[None]:
        return self.repeating()


def saves(net: nn.Module, blocks: Blocks, observer: Pass) -> int:
    """Elements that one pass saves, weights left out; its backward runs too."""
    weights = {parameter.data_ptr() for parameter in net.parameters()}
    packed = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(0 if tensor.data_ptr() in weights else tensor.numel())
        return tensor

    with blocks.observe(observer, observer), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = net(floats(0, 6, WIDTH))
    loss.backward()
    return sum(packed)


def test_a_block_is_kept_until_it_has_proved_itself() -> None:
    net, observer = Net([OwnGenerator, Hidden]), Pass()
    with Blocks(find_blocks(net, ("Block",))) as blocks:
        with pytest.warns(UserWarning, match=r"block 'blocks.1' \(Hidden\) is not recomputed: run again"):
            first = saves(net, blocks, observer)
        assert observer.told == ["blocks.0", "kept", "repeated", "blocks.1", "kept", "repeated"]
        assert list(blocks.refused) == ["blocks.1"]
        observer.told.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            second = saves(net, blocks, observer)
        assert observer.told == ["blocks.0", "blocks.1", "kept"]
        assert second < first
        observer.told.clear()
        net.eval()  # another forward
        saves(net, blocks, observer)
        assert observer.told == ["blocks.0", "kept", "repeated", "blocks.1", "kept"]


def recomputes_all(trace: Any, machine: Any, goal: Any) -> Any:
    """A planner that recomputes whatever it may."""
    plan = make_plan(trace, machine, replace(goal, recompute=False))
    return replace(plan, recompute=frozenset(recomputable(trace))) if goal.recompute else plan


def test_a_plan_recomputes_only_what_is_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightning_ssd.scheduler, "make_plan", recomputes_all)
    kinds = (OwnGenerator, Hidden, OwnList, ClassAttribute, HiddenFromOutput, EditsTensor, Elsewhere)
    program = training(*kinds, steps=6)
    expected = outcome(program, Session())
    setup = Setup(activations="auto", activation_budget=1 << 26, settled=True)
    with open_offloader(tmp_path, setup) as offloader:
        session = Session.of(offloader, setup)
        monkeypatch.setattr(
            "lightning_ssd.offloader.find_blocks", lambda module, names: find_blocks(module, ("Block",))
        )
        with pytest.warns(UserWarning, match="is not recomputed") as warned:
            assert_identical(outcome(program, session), expected)
        assert offloader.trace is not None
        assert offloader.trace.recomputed == {0, 2, 3, 6}
        report = offloader.plan_report
        assert report is not None, "no pass has followed its plan"
    told = sorted(str(warning.message).split("(")[1].split(")")[0] for warning in warned)
    assert told == ["EditsTensor", "Hidden", "HiddenFromOutput"]


def test_a_plan_that_changes_its_mind_after_the_trial_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def recomputes_at_first(trace: Any, machine: Any, goal: Any) -> Any:
        asked.append(goal.recompute)
        return recomputes_all(trace, machine, replace(goal, recompute=len(asked) == 1))

    monkeypatch.setattr(lightning_ssd.scheduler, "make_plan", recomputes_at_first)
    program = training(OwnGenerator, OwnList, steps=6)
    expected = outcome(program, Session())
    setup = Setup(activations="auto", activation_budget=1 << 26, settled=True)
    with open_offloader(tmp_path, setup) as offloader:
        monkeypatch.setattr(
            "lightning_ssd.offloader.find_blocks", lambda module, names: find_blocks(module, ("Block",))
        )
        assert_identical(outcome(program, Session.of(offloader, setup)), expected)
        assert offloader.trace is not None
        assert offloader.trace.blocks
        assert not offloader.trace.recomputed
        assert offloader.plan_report is not None, "no pass has followed its plan"
    assert asked[:2] == [True, True]
