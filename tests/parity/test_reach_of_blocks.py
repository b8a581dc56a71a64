"""How far a block's reach goes: what it remembers there is changed once, or the block is kept, or refused."""

from __future__ import annotations

import array
import functools
import itertools
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_ssd.errors import RecomputeError
from lightning_ssd.recompute.side_effects import SideEffectSnapshot
from tests.parity.models import floats
from tests.parity.recomputing import EVERY, Recomputing
from tests.parity.test_repeatable_blocks import RECOMPUTE, WIDTH, Block, training
from tests.support.helpers import Raised, Session, assert_identical, open_offloader, outcome


class Slotted:
    __slots__ = ("missing", "value")

    def __init__(self) -> None:
        self.value = 0

    def add(self) -> int:
        self.value += 1
        return self.value


class Meter:
    def __init__(self) -> None:
        self.value = 0

    def add(self, by: int = 1) -> int:
        self.value += by
        return self.value


class Named(dict[str, int]):
    value = 0


def counting() -> Callable[[], int]:
    def count(box: list[int] = [0]) -> int:  # noqa: B006 (which is the point)
        box[0] += 1
        return box[0]

    return count


def own_attribute() -> Callable[[], int]:
    def count() -> int:
        count.value += 1  # type: ignore[attr-defined]
        return int(count.value)  # type: ignore[attr-defined]

    count.value = 0  # type: ignore[attr-defined]
    return count


def keyword_default() -> Callable[[], int]:
    def count(*, box: list[int] = [0]) -> int:  # noqa: B006 (which is the point)
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


def alias(value: Any) -> Any:
    value.numpy()[0] += 1
    return value.clone()


def grown(value: bytearray) -> int:
    value.append(1)
    return len(value)


Case = tuple[Callable[[], Any], Callable[[Any], Any]]
PUT_BACK: dict[str, Case] = {
    "NumPy array": (lambda: np.zeros(2), in_place),
    "part of a NumPy array": (lambda: np.zeros((4, 4))[::2, ::2][0], in_place),
    "array.array": (lambda: array.array("l", [0]), in_place),
    "bytearray": (lambda: bytearray(2), in_place),
    "bytearray that grows": (lambda: bytearray(2), grown),
    "slots": (Slotted, named),
    "bound method": (lambda: Meter().add, lambda method: method()),
    "bound method of an object with slots": (lambda: Slotted().add, lambda method: method()),
    "method of a list": (lambda: [0].append, lambda append: append(1) or len(append.__self__)),
    "functools.partial": (lambda: functools.partial(Meter().add, by=2), lambda function: function()),
    "argument of a partial": (lambda: functools.partial(in_place, [0]), lambda function: function()),
    "attribute of a function": (own_attribute, lambda function: function()),
    "default argument": (counting, lambda function: function()),
    "default keyword argument": (keyword_default, lambda function: function()),
    "attribute of a dict": (Named, named),
    "UserDict": (lambda: UserDict({0: 0}), in_place),
    "six levels deep": (lambda: [[[[[[0]]]]]], deep),
    "one of 301 items": (lambda: [*[0] * 300, [0]], deep),
}
KEPT: dict[str, Case] = {
    "itertools.count": (lambda: itertools.count(1), next),
    "generator": (lambda: (number for number in range(1, 100)), next),
    "iterator of a list": (lambda: iter([*range(1, 100)]), next),
    "large array": (lambda: np.zeros(1 << 18), in_place),
    "more than is looked at": (lambda: [[0] for _ in range(5000)], deep),
    "array of objects": (lambda: np.array([[0], None], dtype=object), lambda value: in_place(value[0])),
}


def block_of(make: Callable[[], Any], use: Callable[[Any], Any]) -> type[Block]:
    class Remembering(Block):
        def prepare(self) -> None:
            self.memory = make()

        def factor(self, x: torch.Tensor) -> Any:
            return use(self.memory)

    return Remembering


@pytest.mark.parametrize("name", PUT_BACK)
def test_what_can_be_put_back_is(name: str, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    kind = block_of(*PUT_BACK[name])
    expected = outcome(training(kind, kind), Session())
    assert not isinstance(expected, Raised), expected
    with open_offloader(tmp_path, RECOMPUTE) as offloader:
        assert_identical(outcome(training(kind, kind), Session(offloader)), expected)
    assert not [told for told in recwarn if "is not recomputed" in str(told.message)]


@pytest.mark.parametrize("name", KEPT)
def test_what_cannot_be_put_back_keeps_the_block(name: str, tmp_path: Path) -> None:
    kind = block_of(*KEPT[name])
    expected = outcome(training(kind, kind), Session())
    assert not isinstance(expected, Raised), expected
    with open_offloader(tmp_path, RECOMPUTE) as offloader, pytest.warns(UserWarning, match="is not recomputed: "):
        assert_identical(outcome(training(kind, kind), Session(offloader)), expected)


def test_what_has_ended_and_what_only_looks_large_is_no_hindrance() -> None:
    block = Block()
    block.parameters_once = block.parameters()  # type: ignore[assignment]
    list(block.parameters_once)
    block.vocabulary = {str(number): number for number in range(20_000)}  # type: ignore[assignment]
    assert SideEffectSnapshot([block]).opaque is None


def test_a_default_argument_of_a_method_is_within_reach(tmp_path: Path) -> None:
    def program(session: Session) -> Any:
        class Remembering(Block):
            def factor(self, x: torch.Tensor, box: list[int] = [0]) -> Any:  # noqa: B006 (which is the point)
                box[0] += 1
                return box[0]

        return training(Remembering, Remembering)(session)

    with open_offloader(tmp_path, RECOMPUTE) as offloader:
        assert_identical(outcome(program, Session(offloader)), outcome(program, Session()))


def test_a_tensor_edited_by_its_alias_of_numpy(tmp_path: Path) -> None:
    class Aliased(Block):
        def prepare(self) -> None:
            self.sum = torch.zeros(1)
            self.alias = self.sum.numpy()

        def factor(self, x: torch.Tensor) -> Any:
            self.alias += 1
            return float(self.sum)

    expected = outcome(training(Aliased, Aliased), Session())
    with open_offloader(tmp_path, RECOMPUTE) as offloader:
        assert_identical(outcome(training(Aliased, Aliased), Session(offloader)), expected)


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
