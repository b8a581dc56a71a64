"""Optimizers that go by the place of a group, or of a parameter in its group: the bits of the plain ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from tests.support.optimizer_pairs import Pair, assert_same_parameters, offloaded, offloaded_pair

pytestmark = pytest.mark.usefixtures("small_subgroups")


class ByPlace(Optimizer):
    """Momentum, with a rate for each parameter that a subclass finds in its own way."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 0.1, "betas": [0.9, 0.5], **options})
        self.base_rates = [group["lr"] for group in self.param_groups]

    def rates(self) -> list[tuple[nn.Parameter, float]]:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            assert (first, second) == (0.9, 0.5)
        for p, rate in self.rates():
            if p.grad is not None:
                momentum = self.state[p].setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                p.sub_(momentum, alpha=rate)


class ZipsGroups(ByPlace):
    """As AdaBound does."""

    def rates(self) -> list[tuple[nn.Parameter, float]]:
        pairs = zip(self.param_groups, self.base_rates, strict=True)
        return [(p, rate) for group, rate in pairs for p in group["params"]]


class ZipsNames(ByPlace):
    """A rate by name."""

    def rates(self) -> list[tuple[nn.Parameter, float]]:
        pairs = [pair for g in self.param_groups for pair in zip(g["param_names"], g["params"], strict=True)]
        return [(p, 0.01 * int(name)) for name, p in pairs]


class ZipsRates(ByPlace):
    """A list of the group's own."""

    def rates(self) -> list[tuple[nn.Parameter, float]]:
        pairs = [pair for g in self.param_groups for pair in zip(g["scales"], g["params"], strict=True)]
        return [(p, scale) for scale, p in pairs]


class NotesInGroups(ByPlace):
    """Counts deep within the options of each group, in place."""

    def rates(self) -> list[tuple[nn.Parameter, float]]:
        for group in self.param_groups:
            group["notes"]["past"].append(1)
        return [(p, 0.1 / len(g["notes"]["past"])) for g in self.param_groups for p in g["params"]]


def _two(p: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": p[:6], "lr": 0.1}, {"params": p[6:], "lr": 0.01}]


def _scaled(p: list[nn.Parameter]) -> list[dict[str, Any]]:
    scales = [0.01 * (number + 1) for number in range(len(p))]
    return [{"params": p[:2], "scales": scales[:2]}, {"params": p[2:], "scales": scales[2:]}]


MAKERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "zips groups, one of them empty": lambda p: ZipsGroups([{"params": []}, *_two(p)]),
    "zips names": lambda p: ZipsNames([(str(number), q) for number, q in enumerate(p)]),
    "notes in groups": lambda p: NotesInGroups([{"params": [q], "notes": {"past": []}} for q in p]),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_places_are_those_of_the_plain_step(maker: str, spill_dir: Path) -> None:
    with offloaded_pair(MAKERS[maker], spill_dir) as (pair, optimizer):
        for active in (None, [0, 3, 7], [7, 8], None):
            pair.step(optimizer, active)
        pair.check(optimizer)


@pytest.mark.parametrize("masters", [False, True])
def test_places_of_half_precision_parameters(masters: bool, spill_dir: Path) -> None:
    """What is updated is not the parameter, but its float32 copy; with numbers that both hold exactly."""
    start = [torch.full((128, 150), float(n)) for n in range(6)]
    names = ["0", "100", "200", "400", "800", "1600"]
    mine, plain = ([nn.Parameter(p.clone().bfloat16()) for p in start] for _ in range(2))
    twin = ZipsNames(list(zip(names, plain, strict=True)))
    inner = ZipsNames(list(zip(names, mine, strict=True)))
    policy = OffloadPolicy(
        activations="keep", optimizer_states="offload", master_weights=masters, per_parameter_optimizers="ZipsNames"
    )
    with Offloader(policy=policy, hardware=HardwareProfile(paths=str(spill_dir))).open() as offloader:
        optimizer = offloader.offload_optimizer(inner)
        for p, q in zip(mine, plain, strict=True):
            p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
        optimizer.step()
        twin.step()
        assert_same_parameters(mine, plain)


def test_a_list_by_parameter_is_no_option_of_the_group(spill_dir: Path) -> None:
    """PyTorch's own ``param_names`` alone is known to have an entry for each."""
    pair = Pair(lambda p: ZipsRates(_scaled(p)))
    with offloaded(pair.inner, spill_dir) as (optimizer, _), pytest.raises(ValueError, match=r"zip\(\) argument"):
        pair.step(optimizer)
