"""What lies outside of a recomputed block's contract: refused before its gradients are used; or the block is kept."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_ssd.errors import RecomputeError
from lightning_ssd.recompute.call_state import CallState
from tests.parity.models import floats
from tests.parity.recomputing import EVERY, Recomputing
from tests.parity.test_repeatable_blocks import RECOMPUTE, WIDTH, Block, training
from tests.support.helpers import Raised, Session, assert_identical, open_offloader, outcome


class Meter:
    """An object that somebody has written."""

    total = 0

    def __init__(self) -> None:
        self.value = 0

    def add(self, by: int = 1) -> int:
        self.value += by
        return self.value

    def add_to_class(self) -> int:
        type(self).total += 1
        return self.total


def counting() -> Callable[[], int]:
    def count(box: list[int] = [0]) -> int:  # noqa: B006 (which is the point)
        box[0] += 1
        return box[0]

    return count


def in_place(value: Any) -> Any:
    value[0] += 1
    return value[0]


def named(value: Any) -> Any:
    value.value += 1
    return value.value


def alias(value: Any) -> Any:
    value[1][0] += 1
    return float(value[0])


def aliased() -> Any:
    tensor = torch.zeros(1)
    return tensor, tensor.numpy()


Case = tuple[Callable[[], Any], Callable[[Any], Any]]
OUTSIDE: dict[str, Case] = {
    "object": (Meter, named),
    "namespace": (lambda: types.SimpleNamespace(value=0), named),
    "class attribute": (Meter, Meter.add_to_class),
    "bound method": (lambda: Meter().add, lambda method: method()),
    "functools.partial": (lambda: functools.partial(in_place, [0]), lambda function: function()),
    "default argument": (counting, lambda function: function()),
    "list in a dict": (lambda: {"inner": [0]}, lambda value: in_place(value["inner"])),
    "generator in a tuple": (
        lambda: (torch.Generator().manual_seed(3),),
        lambda value: torch.rand(WIDTH, generator=value[0]),
    ),
    "NumPy array": (lambda: np.zeros(2), in_place),
    "alias of a tensor in NumPy": (aliased, alias),
}
KEPT: dict[str, Case] = {
    "itertools.count": (lambda: itertools.count(1), next),
    "generator": (lambda: (number for number in range(1, 100)), next),
    "iterator in a list": (lambda: [iter([*range(1, 100)])], lambda value: next(value[0])),
}


def block_of(make: Callable[[], Any], use: Callable[[Any], Any]) -> type[Block]:
    class Remembering(Block):
        def prepare(self) -> None:
            self.memory = make()

        def factor(self, x: torch.Tensor) -> Any:
            return use(self.memory)

    return Remembering


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_lies_outside_of_the_contract_is_refused(name: str, tmp_path: Path) -> None:
    """And from then on the block is kept, as the user finds the step when it is repeated."""
    kind = block_of(*OUTSIDE[name])
    assert not isinstance(outcome(training(kind, kind, steps=1), Session()), Raised)
    with open_offloader(tmp_path, RECOMPUTE) as offloader:
        refused = outcome(training(kind, kind, steps=1), Session(offloader))
    assert isinstance(refused, Raised)
    assert refused.type == RecomputeError.__name__
    assert "it depends on something that has changed and is not put back" in refused.text


@pytest.mark.parametrize("name", KEPT)
def test_an_iterator_keeps_the_block(name: str, tmp_path: Path) -> None:
    kind = block_of(*KEPT[name])
    expected = outcome(training(kind, kind), Session())
    assert not isinstance(expected, Raised), expected
    with open_offloader(tmp_path, RECOMPUTE) as offloader, pytest.warns(UserWarning, match="is not recomputed: "):
        assert_identical(outcome(training(kind, kind), Session(offloader)), expected)


class OwnSlots(Block):
    __slots__ = ("calls",)

    def prepare(self) -> None:
        self.calls = 0

    def factor(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return self.calls


class Scripted(Block):
    """Buffers of what is scripted are out of Python's sight."""

    def prepare(self) -> None:
        self.norm = torch.jit.script(nn.BatchNorm1d(WIDTH))

    def factor(self, x: torch.Tensor) -> Any:
        return self.norm(x)

    def state(self) -> Any:
        return self.norm.running_mean.clone()


@pytest.mark.parametrize("kind", [OwnSlots, Scripted])
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_attributes_out_of_sight_keep_the_block(kind: type[Block], tmp_path: Path) -> None:
    program = training(kind, kind)
    expected = outcome(program, Session())
    assert not isinstance(expected, Raised), expected
    warned = pytest.warns(UserWarning, match=r"is not recomputed: a \w+ keeps attributes outside of its __dict__")
    with open_offloader(tmp_path, RECOMPUTE) as offloader, warned:
        assert_identical(outcome(program, Session(offloader)), expected)


# -- second references to buffers ------------------------------------------------------------------------------------


class SecondReference(Block):
    """Edits a buffer by a tuple, of which the sum in backward knows nothing."""

    def prepare(self) -> None:
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.statistics = (self.mean,)

    def edit(self, mean: torch.Tensor) -> None:
        self.statistics[0].mul_(0.9).add_(mean)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.edit(x.detach().mean(0))
        return self.linear(x).tanh() + self.mean


class SecondReferencePastAutograd(SecondReference):
    def edit(self, mean: torch.Tensor) -> None:
        self.statistics[0].data.mul_(0.9).add_(mean)


@pytest.mark.parametrize("kind", [SecondReference, SecondReferencePastAutograd])
def test_a_buffer_edited_by_a_second_reference_is_refused_and_edited_once(kind: type[Block]) -> None:
    net = nn.Sequential(kind(), kind())
    session = Recomputing(EVERY, classes=(kind.__name__,))
    session.register(net)
    with session.saved():
        loss = net(floats(2, 5, WIDTH)).sum()
    before = [buffer.clone() for buffer in net.buffers()]
    for _ in range(2):
        with pytest.raises(RecomputeError, match=f"it edits {kind.__name__}.mean, a buffer, by a second reference"):
            loss.backward()
        assert_identical([*net.buffers()], before)
    assert all(parameter.grad is None for parameter in net.parameters())


def test_a_generator_at_its_end_is_no_hindrance() -> None:
    block = Block()
    block.parameters_once = block.parameters()  # type: ignore[assignment]
    list(block.parameters_once)
    assert CallState([block]).opaque is None


# -- other views of the same data ------------------------------------------------------------------------------------


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
