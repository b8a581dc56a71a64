"""Optimizers that look at the memory of their own states in another way: they see, and write, the true states."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from tests.support.optimizer_pairs import Pair, lent_of, wrapped

pytestmark = [
    pytest.mark.usefixtures("small_subgroups"),
    pytest.mark.filterwarnings("ignore:this optimizer's states share memory"),
]


ALIASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "detached": lambda state: state.detach(),
    "data": lambda state: state.data,
    "numpy": lambda state: state.numpy(),
    "flat": lambda state: state.view(-1)[5:],
    "itself": lambda state: state,
}


class Caches(Optimizer):
    """Momentum that is halved through an alias, from some step on, and then added up."""

    alias: Callable[[torch.Tensor], Any]

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "first": 3})
        self.cache: dict[torch.Tensor, Any] = {}

    def remember(self, p: torch.Tensor, state: dict[str, Any], first: int) -> None:
        """Make the alias, once."""
        if state["n"] >= first and p not in self.cache:
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
                self.remember(p, state, group["first"])
                state["m"].mul_(0.9).add_(p.grad)
                if p in self.cache:
                    self.cache[p][...] *= 0.5
                state["sum"].add_(state["m"])
                p.sub_(state["sum"], alpha=group["lr"])


def caches(how: str) -> Callable[[Any], Optimizer]:
    return type("Caches", (Caches,), {"alias": staticmethod(ALIASES[how])})


@pytest.mark.parametrize("loaded_at", [None, 1, 4])
@pytest.mark.parametrize("how", ALIASES)
def test_aliases_that_come_in_a_later_step(how: str, loaded_at: int | None, spill_dir: Path) -> None:
    pair = Pair(caches(how), ((128, 150),) * 8 + ((7,),))
    with wrapped(pair.inner, spill_dir) as optimizer:
        for step in range(7):
            if step == loaded_at:
                saved = copy.deepcopy(pair.twin.state_dict())
                optimizer.load_state_dict(copy.deepcopy(saved))
                pair.twin.load_state_dict(saved)
            pair.step(optimizer, [0, 1, 2, 8] if step % 3 == 2 else None)
            pair.check(optimizer)


def test_rehearsals_leave_no_copy_among_what_is_kept_by_parameter(spill_dir: Path) -> None:
    pair = Pair(caches("detached"))
    for each in (pair.inner, pair.twin):
        each.param_groups[0]["first"] = 1
    with wrapped(pair.inner, spill_dir) as optimizer:
        pair.step(optimizer, [0, 1, 2, 3, 4])
        pair.step(optimizer)
        pair.check(optimizer)
        assert isinstance(pair.inner, Caches)
        assert set(pair.inner.cache) == set(pair.mine)


def test_states_return_to_the_drive_when_no_alias_is_left(spill_dir: Path) -> None:
    pair = Pair(caches("detached"))
    with wrapped(pair.inner, spill_dir) as optimizer:
        for _ in range(4):
            pair.step(optimizer)
        assert len(lent_of(optimizer)) == 10, "all are looked at"
        for _ in range(2):
            assert isinstance(pair.inner, Caches)
            assert isinstance(pair.twin, Caches)
            for each in (pair.inner, pair.twin):
                each.cache.clear()
                for group in each.param_groups:
                    group["first"] = 99
            pair.step(optimizer)
            assert not lent_of(optimizer)
            pair.check(optimizer)


def test_a_tensor_that_was_replaced_and_is_held_keeps_its_bytes(spill_dir: Path) -> None:
    class Former(Caches):
        def remember(self, p: torch.Tensor, state: dict[str, Any], first: int) -> None:
            if state["n"] == first:
                self.cache[p], state["m"] = state["m"], state["m"].clone()

    pair = Pair(Former)
    with wrapped(pair.inner, spill_dir) as optimizer:
        for _ in range(6):
            pair.step(optimizer)
        pair.check(optimizer)
        former = [each.cache for each in (pair.inner, pair.twin) if isinstance(each, Former)]
        assert all(map(torch.equal, *(cache.values() for cache in former)))


def test_an_alias_of_one_state_leaves_the_rest_on_the_drive(spill_dir: Path) -> None:
    class CachesOne(Caches):
        def remember(self, p: torch.Tensor, state: dict[str, Any], first: int) -> None:
            if p.shape == (64, 150):
                super().remember(p, state, first)

        alias = staticmethod(ALIASES["detached"])

    pair = Pair(CachesOne, ((128, 150),) * 9 + ((64, 150), (64, 150)))
    with wrapped(pair.inner, spill_dir) as optimizer:
        for step in range(8):
            pair.step(optimizer, [number for number in range(11) if number != step + 3])
            pair.check(optimizer)
        assert 2 <= len(lent_of(optimizer)) <= 5


class RenewsAliases(Caches):
    """In ``__setstate__``, which ends a load."""

    alias = staticmethod(ALIASES["detached"])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.cache = {p: each["m"].detach() for p, each in self.state.items() if "m" in each}
        self.defaults["loads"] = self.defaults.get("loads", 0) + 1


class AddsAliases(Caches):
    """To those that there are."""

    alias = staticmethod(ALIASES["detached"])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for p, each in self.state.items():
            self.cache[p] = each["m"].view(-1).view(p.shape)


@pytest.mark.parametrize("kind", [RenewsAliases, AddsAliases])
@pytest.mark.parametrize("first", [2, 99])
def test_aliases_that_a_load_makes(kind: type[Caches], first: int, spill_dir: Path) -> None:
    pair = Pair(kind, ((128, 150),) * 8 + ((7,),))
    for each in (pair.inner, pair.twin):
        each.param_groups[0]["first"] = first
    with wrapped(pair.inner, spill_dir) as optimizer:
        for step in range(6):
            if step in (2, 4):
                saved = copy.deepcopy(pair.twin.state_dict())
                optimizer.load_state_dict(copy.deepcopy(saved) if step == 2 else optimizer.state_dict())
                pair.twin.load_state_dict(saved)
            pair.step(optimizer, [0, 1, 2, 8] if step % 3 == 2 else None)
            pair.check(optimizer)
        assert pair.inner.defaults == pair.twin.defaults
