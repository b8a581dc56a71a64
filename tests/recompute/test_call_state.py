"""The state of a block while its call is repeated: an interrupt where it is put back changes nothing."""

from __future__ import annotations

import random
import signal
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from lightning_ssd.common.rng import RandomStates
from lightning_ssd.recompute import call_state
from lightning_ssd.recompute.call_state import CallState


class Block(nn.Module):
    """Changes a buffer, an attribute and a list; draws."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.calls, self.seen = 0, [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        return (self.norm(self.linear(x)) * random.random() * torch.rand(8)).tanh()


def state_of(block: Block) -> Any:
    statistics = [buffer.tolist() for buffer in block.buffers()]
    return statistics, block.calls, list(block.seen), random.getstate(), torch.get_rng_state().tolist()


class Interrupts:
    """Calls a function, and sends Ctrl-C as it begins, or as it ends, some of the times."""

    def __init__(self, function: Any, times: range, *, at_the_end: bool) -> None:
        self.function, self.times, self.at_the_end, self.number = function, times, at_the_end, -1

    def __call__(self, *args: Any) -> Any:
        self.number += 1
        is_interrupted = self.number in self.times
        if is_interrupted and not self.at_the_end:
            signal.raise_signal(signal.SIGINT)
        result = self.function(*args)
        if is_interrupted and self.at_the_end:
            signal.raise_signal(signal.SIGINT)
        return result


@pytest.mark.parametrize("name", ["_put", "restore_hooks", "restore", "as_before", "forward"])
@pytest.mark.parametrize("at_the_end", [False, True])
@pytest.mark.parametrize("num", [1, 4])
@pytest.mark.parametrize("first", [0, 1])
def test_an_interrupted_repetition_leaves_all_as_it_was(
    first: int, num: int, at_the_end: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, x = Block(), torch.randn(4, 8)
    state = CallState([block], [x.device])
    expected = block(x)
    assert state.settle() is None
    attributes = vars(block)
    block(x)  # changes all once more
    before = state_of(block)
    owner: Any = {"restore": RandomStates, "as_before": call_state._Part, "forward": nn.Linear}.get(name, call_state)
    interrupted = Interrupts(getattr(owner, name), range(first, first + num), at_the_end=at_the_end)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, lambda *args: interrupted(*args))
        with pytest.raises(KeyboardInterrupt) if interrupted.times.start < (name != "forward") + 1 else nullcontext():
            state.run(block, x)
    assert state_of(block) == before
    assert vars(block) is attributes
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert torch.equal(state.run(block, x), expected)
    assert state_of(block) == before


def test_an_error_of_the_repetition_is_raised_and_all_is_put_back() -> None:
    block, x, wrong = Block(), torch.randn(4, 8), torch.randn(4, 9)
    state = CallState([block], [x.device])
    block(x)
    state.settle()
    before = state_of(block)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        state.run(block, wrong)
    assert state_of(block) == before


def test_what_looks_back_with_errors_is_left_alone() -> None:
    """A proxy of a dead object, and one that refuses every attribute."""

    class Refuses:
        __slots__ = ("__weakref__",)

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"no {name}")

    block, x = Block(), torch.randn(4, 8)
    block.__dict__["proxy"] = weakref.proxy(Refuses())
    block.refuses = Refuses()
    state = CallState([block], [x.device])
    expected = block(x)
    state.settle()
    assert torch.equal(state.run(block, x), expected)


class EditsBuffer(nn.Module):
    """Keeps a statistic in a buffer; how it is edited is the test's."""

    def __init__(self, edit: Any) -> None:
        super().__init__()
        self.linear, self.edit = nn.Linear(8, 8), edit
        self.register_buffer("mean", torch.full((8,), float("nan")))
        self.register_buffer("other", torch.zeros(8))
        self.array = self.mean.numpy()
        self.mean.nan_to_num_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.edit(self, x.detach().mean(0))
        return self.linear(x).tanh()


def _edits_elsewhere(alias: list[torch.Tensor]) -> Any:
    def edit(block: EditsBuffer, x: torch.Tensor) -> None:
        alias[:] = alias or [block.mean.data]
        alias[0].add_(x)

    return edit


PAST_AUTOGRAD = {
    "data": lambda block, x: block.mean.data.mul_(0.9).add_(x),
    "batch_norm": lambda block, x: nn.functional.batch_norm(x.expand(2, 8), block.mean, block.other, training=True),
    "NumPy": lambda block, x: block.mean.numpy().__iadd__(x.numpy()),
    "array attribute": lambda block, x: block.array.__iadd__(x.numpy()),
    "alias elsewhere": _edits_elsewhere([]),
}


@pytest.mark.parametrize("name", PAST_AUTOGRAD)
def test_a_buffer_that_is_edited_past_autograd_is_put_back(name: str) -> None:
    block, x = EditsBuffer(PAST_AUTOGRAD[name]), torch.randn(4, 8)
    state = CallState([block], [x.device])
    expected = block(x)
    assert state.settle() is None
    after = [buffer.clone() for buffer in block.buffers()]
    assert after[0].count_nonzero(), "nothing was edited"
    for _ in range(2):
        assert torch.equal(state.run(block, x), expected)
        assert all(map(torch.equal, block.buffers(), after)), "the buffer was edited twice"
    assert state.change() is None


@pytest.mark.parametrize("edit", [lambda view: view, lambda view: view.data, lambda view: view.numpy()])
def test_a_tensor_attribute_that_is_edited_is_told_of(edit: Any) -> None:
    """Also a view of a buffer, and one past autograd."""
    block = EditsBuffer(lambda block, x: edit(block.nested["views"][0]).__iadd__(1))
    block.nested = {"views": [block.mean.view(2, 4)]}
    state = CallState([block], [torch.device("cpu")])
    block(torch.randn(4, 8))
    assert state.settle() == "EditsBuffer.nested"


def test_a_buffer_that_is_not_edited_costs_no_copy() -> None:
    block, x = EditsBuffer(lambda block, x: None), torch.randn(4, 8)
    block.mean.fill_(float("nan"))
    state = CallState([block], [x.device])
    block(x)
    state.settle()
    assert not any(part.buffers for part in state._parts)
    block.mean.zero_()
    assert "EditsBuffer.mean was modified by an inplace operation" in str(state.change())
