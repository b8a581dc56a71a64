"""What is set on the optimizer that came back reaches the one that steps."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from tests.support.optimizer_pairs import Pair, adamw, offloaded, offloaded_pair, opened

pytestmark = pytest.mark.usefixtures("small_subgroups")


class Scaled(Optimizer):
    """With a knob, and one that need not be there."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.scale = 1.0
        self.count = 0

    @property
    def halved(self) -> bool:
        return self.scale == 0.5

    @halved.setter
    def halved(self, is_halved: bool) -> None:
        self.scale = 0.5 if is_halved else 1.0

    def rate(self) -> float:
        return float(self.scale * getattr(self, "extra", 1.0))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                    p.sub_(momentum, alpha=group["lr"] * self.rate())


def test_attributes_reach_the_step(spill_dir: Path) -> None:
    with offloaded_pair(Scaled, spill_dir) as (pair, optimizer):
        for name, value in (("scale", 0.25), ("extra", 2.0), ("extra", 3.0), ("halved", True), ("count", 7)):
            setattr(optimizer, name, value)
            setattr(pair.twin, name, value)
            pair.step(optimizer)
            assert vars(pair.inner)["scale"] == vars(pair.twin)["scale"]
            pair.check(optimizer)
        assert optimizer.count == 8, "what a step counts is what is read"
        del optimizer.extra
        del pair.twin.extra  # type: ignore[attr-defined]
        pair.step(optimizer)
        pair.check(optimizer)
        with pytest.raises(AttributeError):
            del optimizer.extra


class Momenta:
    """Found by parameter."""

    def __init__(self) -> None:
        self.of: dict[torch.Tensor, torch.Tensor] = {}


class KeepsElsewhere(Optimizer):
    """Its momentum in an object that the first step makes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.momenta: Momenta | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.momenta = self.momenta or Momenta()
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(self.momenta.of.setdefault(p, torch.zeros_like(p)).mul_(0.9).add_(p.grad), alpha=0.1)


def test_what_an_object_keeps_by_parameter_is_not_lost_in_the_next_call(spill_dir: Path) -> None:
    with offloaded_pair(KeepsElsewhere, spill_dir, ((128, 150),) * 6) as (pair, optimizer):
        for active in (None, [0, 5], None):
            pair.step(optimizer, active)
            pair.check()


def test_methods_that_somebody_replaces_are_those_that_are_called(spill_dir: Path) -> None:
    with offloaded_pair(Scaled, spill_dir) as (pair, optimizer):
        for each in (optimizer, pair.twin):
            each.rate = lambda: 0.125
        pair.step(optimizer)
        pair.check(optimizer)


def test_wrappers_that_know_each_other_stay_out_of_their_optimizers(spill_dir: Path) -> None:
    one, other = Pair(adamw), Pair(adamw)
    with opened(spill_dir) as offloader:
        first, second = (offloader.offload_optimizer(pair.inner) for pair in (one, other))
        first.peer = second
        assert first.peer is second
        assert "peer" not in vars(one.inner)
        del first.peer
        assert not hasattr(first, "peer")


def test_what_frameworks_set_stays_on_the_wrapper(spill_dir: Path) -> None:
    with offloaded_pair(Scaled, spill_dir) as (pair, optimizer):
        schedules = [LambdaLR(each, lambda step: 1 / (1 + step)) for each in (optimizer, pair.twin)]
        assert "step" not in vars(pair.inner)
        optimizer._mark = 1
        assert "_mark" not in vars(pair.inner)
        for _ in range(3):
            pair.step(optimizer)
            for schedule in schedules:
                schedule.step()
        del optimizer._mark
        assert "_mark" not in vars(optimizer)
        pair.check(optimizer)
        optimizer.step = optimizer.step
        del optimizer.step


def test_it_is_neither_copied_nor_pickled(spill_dir: Path) -> None:
    with offloaded(Pair(Scaled).inner, spill_dir) as (optimizer, _):
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="state_dict"):
                copied(optimizer)
