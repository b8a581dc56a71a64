"""Optimizers that look at the memory of their own states in another way: such states cannot move, and are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from lightning_ssd.errors import ConfigError
from tests.support.optimizer_pairs import Pair, wrapped

pytestmark = pytest.mark.usefixtures("small_subgroups")


ALIASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "detached": lambda state: state.detach(),
    "data": lambda state: state.data,
    "numpy": lambda state: state.numpy(),
    "flat": lambda state: state.view(-1)[5:],
    "itself": lambda state: state,
}


class Caches(Optimizer):
    """Momentum that is halved through an alias, from some step on, and then added up."""

    alias: Callable[[torch.Tensor], Any] = staticmethod(ALIASES["detached"])

    def __init__(self, params: Any, first: int = 3) -> None:
        super().__init__(params, {"lr": 0.1, "first": first})
        self.cache: dict[torch.Tensor, Any] = {}

    def remember(self, p: torch.Tensor, state: dict[str, Any]) -> None:
        """Make the alias, once."""
        if p not in self.cache:
            self.cache[p] = type(self).alias(state["m"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(m=torch.zeros_like(p), sum=torch.zeros_like(p), n=0)
                state["n"] += 1
                if state["n"] >= group["first"]:
                    self.remember(p, state)
                state["m"].mul_(0.9).add_(p.grad)
                if p in self.cache:
                    self.cache[p][...] *= 0.5
                state["sum"].add_(state["m"])
                p.sub_(state["sum"], alpha=group["lr"])


class Former(Caches):
    """Keeps what was a state, and is none any more."""

    def remember(self, p: torch.Tensor, state: dict[str, Any]) -> None:
        if p not in self.cache:
            self.cache[p], state["m"] = state["m"], state["m"].clone()


def caches(how: str, first: int) -> Callable[[Any], Optimizer]:
    kind = type("Caches", (Caches,), {"alias": staticmethod(ALIASES[how])})
    return lambda p: kind(p, first)


@pytest.mark.parametrize("make", [*(caches(how, first) for how in ALIASES for first in (1, 3)), lambda p: Former(p, 2)])
def test_aliases_that_come_in_a_rehearsal_are_refused(make: Callable[[Any], Optimizer], spill_dir: Path) -> None:
    pair = Pair(make)
    text = r"per_parameter_optimizers names .*, (a parameter|a state|its attribute 'cache') differed after a step with"
    with pytest.raises(ConfigError, match=text), wrapped(pair.inner, spill_dir):
        pass
    pair.check()
    assert not pair.inner.cache  # type: ignore[attr-defined]


class RenewsAliases(Caches):
    """In ``__setstate__``, which ends a load."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.cache = {p: each["m"].detach() for p, each in self.state.items() if "m" in each}
        self.defaults["loads"] = self.defaults.get("loads", 0) + 1


def test_aliases_that_a_load_makes(spill_dir: Path) -> None:
    """The states stay in memory, where they are held."""
    pair = Pair(lambda p: RenewsAliases(p, 99), ((128, 150),) * 8 + ((7,),))
    with wrapped(pair.inner, spill_dir) as optimizer:
        for step in range(6):
            if step in (2, 4):
                saved = copy.deepcopy(pair.twin.state_dict())
                optimizer.load_state_dict(copy.deepcopy(saved) if step == 2 else optimizer.state_dict())
                pair.twin.load_state_dict(saved)
            pair.step(optimizer, [0, 1, 2, 8] if step % 3 == 2 else None)
            pair.check(optimizer)
        assert pair.inner.defaults == pair.twin.defaults
