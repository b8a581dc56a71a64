"""Steps in which some parameters have no gradient: an optimizer that looks at all of them sees them, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from lightning_ssd.errors import ConfigError
from tests.support.optimizer_pairs import Pair, wrapped

pytestmark = pytest.mark.usefixtures("small_subgroups")

SMALL = ((7,), (9,), (11, 3), (8,))
"""All in one subgroup."""
LARGE = ((128, 150),) * 8
MISSING: tuple[list[int] | None, ...] = ([1, 2], None, [0, 1], [2, 3], [3])


class Weighted(Optimizer):
    """Momentum with a rate that depends on more than the parameter."""

    weight: Callable[[list[dict[str, Any]], dict[str, Any], int], float]

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for number, p in enumerate(group["params"]):
                if p.grad is not None:
                    momentum = self.state[p].setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                    p.sub_(momentum, alpha=group["lr"] * type(self).weight(self.param_groups, group, number))


WEIGHTS: dict[str, Callable[[list[dict[str, Any]], dict[str, Any], int], float]] = {
    "by place": lambda _groups, _group, number: 0.5**number,
    "by number of parameters": lambda _groups, group, _number: 1 / len(group["params"]),
    "by number of all parameters": lambda groups, _group, _number: 1 / sum(len(each["params"]) for each in groups),
    "by gradients": lambda groups, _group, _number: float(
        sum(p.grad.abs().sum() for each in groups for p in each["params"] if p.grad is not None)
    ),
}


def weighted(name: str, *, split: bool) -> Callable[[Any], Optimizer]:
    kind = type("Weighted", (Weighted,), {"weight": staticmethod(WEIGHTS[name])})
    return lambda p: kind([{"params": p[:2]}, {"params": p[2:]}] if split else p)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", WEIGHTS)
def test_one_call_sees_parameters_without_a_gradient(name: str, split: bool, spill_dir: Path) -> None:
    pair = Pair(weighted(name, split=split), SMALL)
    with wrapped(pair.inner, spill_dir) as optimizer:
        for active in MISSING:
            pair.step(optimizer, active)
            pair.check(optimizer)
        assert optimizer.stats.num_subgroups == 1


def test_one_call_has_parameters_in_their_order_in_the_group(spill_dir: Path) -> None:
    pair = Pair(weighted("by place", split=False), SMALL)
    with wrapped(pair.inner, spill_dir) as optimizer:
        for active in (None, [1, 2], None):
            pair.step(optimizer, active)
            for each in (pair.inner, pair.twin):
                each.param_groups[0]["params"].reverse()
        pair.check()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", WEIGHTS)
def test_one_call_for_some_of_many_is_refused(name: str, split: bool, spill_dir: Path) -> None:
    pair = Pair(weighted(name, split=split), LARGE)
    before = [p.detach().clone() for p in pair.mine]
    with wrapped(pair.inner, spill_dir) as optimizer:
        pair.set_gradients([1])
        with pytest.raises(ConfigError, match="couples"):
            optimizer.step()
        assert all(map(torch.equal, pair.mine, before))


class NotesNorm(Optimizer):
    """Clips, in every third step, by what it has noted of all gradients in the step before."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        given = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = float(sum(p.grad.abs().sum() for p in given))
        for p in given:
            state = self.state[p]
            state["t"] = state.get("t", 0) + 1
            p.sub_(p.grad, alpha=0.1 / state["total"] if state["t"] % 3 == 0 else 0.1)
            state["total"] = total


def test_numbers_that_are_used_later_are_compared(spill_dir: Path) -> None:
    pair = Pair(NotesNorm, LARGE)
    before = [p.detach().clone() for p in pair.mine]
    with wrapped(pair.inner, spill_dir) as optimizer:
        pair.set_gradients()
        with pytest.raises(ConfigError, match="couples"):
            optimizer.step()
        assert all(map(torch.equal, pair.mine, before))
