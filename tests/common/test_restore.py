"""An interrupt where things are put back: they are, before it is raised, or when the next pass begins."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_ssd.common.restore import Meanwhile, num_noted, put_back_all, put_back_the_rest
from lightning_ssd.recompute import global_modes, side_effects
from tests.support.helpers import Setup, open_offloader

RECOMPUTE = Setup(activations="recompute", drained=False)


class Interrupts:
    """Calls a function, and is interrupted as it begins, or as it ends, some of the times."""

    def __init__(self, function: Any, times: range, *, at_the_end: bool = False) -> None:
        self.function, self.times, self.at_the_end, self.number = function, times, at_the_end, -1

    def __call__(self, *args: Any) -> Any:
        self.number += 1
        is_interrupted = self.number in self.times
        if is_interrupted and not self.at_the_end:
            raise KeyboardInterrupt
        result = self.function(*args)
        if is_interrupted:
            raise KeyboardInterrupt
        return result


def test_it_is_put_back_before_the_interrupt_is_raised() -> None:
    state = [0]
    leave = Interrupts(lambda: state.__setitem__(0, 0), range(1))
    with pytest.raises(KeyboardInterrupt), Meanwhile(lambda: state.__setitem__(0, 1), leave):
        assert state == [1]
    assert state == [0]
    assert num_noted() == 0


def test_an_interrupt_on_the_way_in_is_one_as_well() -> None:
    state = [0]
    enter = Interrupts(lambda: state.__setitem__(0, 1), range(1), at_the_end=True)
    with pytest.raises(KeyboardInterrupt), Meanwhile(enter, lambda: state.__setitem__(0, 0)):
        raise AssertionError
    assert state == [0]
    assert num_noted() == 0


def test_what_came_to_no_end_is_put_back_later_the_newest_first() -> None:
    order: list[int] = []
    interrupted = [Interrupts(lambda number=number: order.append(number), range(3)) for number in range(3)]
    for leave in interrupted:
        with pytest.raises(KeyboardInterrupt), Meanwhile(int, leave):
            pass
    assert num_noted() == 3
    put_back_the_rest(2)
    assert order == [2]
    put_back_all()
    assert order == [2, 1, 0]
    assert num_noted() == 0


def test_an_error_is_raised_once() -> None:
    def leave() -> None:
        raise ValueError

    with pytest.raises(ValueError), Meanwhile(int, leave):  # noqa: PT011
        pass
    put_back_all()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return (self.norm(self.linear(x)) * random.random()).tanh()


def state_of(net: nn.Module) -> Any:
    modes = [torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()]
    statistics = [buffer.tolist() for buffer in net.buffers()]
    return statistics, [block.calls for block in net.children()], random.getstate(), modes


@pytest.mark.parametrize("function", ["restore", "modes"])
@pytest.mark.parametrize("num", [1, 4])
@pytest.mark.parametrize("first", range(4))
def test_a_repetition_that_is_interrupted(
    function: str, first: int, num: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the entry of what puts things back, there and back again, once or four times in a row; at a later step."""
    net = nn.Sequential(Block(), Block())
    with open_offloader(tmp_path, RECOMPUTE) as offloader:
        offloader.register_module(net)
        for step in range(3):
            with sdpa_kernel(SDPBackend.MATH), offloader.saved_tensors():
                loss = net(torch.randn(4, 8)).sum()
            with offloader.saved_tensors():
                net(torch.randn(4, 8))  # changes all once more
            before = state_of(net)
            with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
                if step == 1:
                    interrupt(patch, function, range(first, first + num))
                loss.backward()
            while num_noted():
                assert num > 1, "one interrupt is no reason to leave anything"
                with suppress(KeyboardInterrupt):
                    put_back_all()  # as the next pass does
            assert state_of(net) == before
            assert num_noted() == 0
            offloader.end_backward()


def interrupt(patch: pytest.MonkeyPatch, function: str, times: range) -> None:
    if function == "restore":
        patch.setattr(side_effects, "_restore", Interrupts(side_effects._restore, times))
    else:
        modes = [mode._replace(write=Interrupts(mode.write, times, at_the_end=True)) for mode in global_modes._MODES]
        patch.setattr(global_modes, "_MODES", tuple(modes))


def test_the_next_pass_and_the_end_put_back_what_is_left(tmp_path: Path) -> None:
    left: list[str] = []
    net = nn.Sequential(Block(), Block())
    with open_offloader(tmp_path, RECOMPUTE) as offloader:
        offloader.register_module(net)
        for name in ("pass", "close"):
            with pytest.raises(KeyboardInterrupt):
                leave_behind(name, left)
            if name == "pass":
                with offloader.saved_tensors():
                    assert left == ["pass"]
    assert left == ["pass", "close"]


def leave_behind(name: str, left: list[str]) -> None:
    with Meanwhile(int, Interrupts(lambda: left.append(name), range(3))):
        pass
