"""An optimizer by hand, for tests of what a user declares."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

MANY = ((128, 150),) * 6 + ((7,),)
"""More than a subgroup holds."""


class Momentum(Optimizer):
    """By hand, with places for what a class adds."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "count": 0})
        self.t = 0
        self.notes: dict[str, Any] = {"past": []}
        self.beta = torch.ones(())
        self.prepare()

    def prepare(self) -> None:
        """What it has of its own."""

    def before(self) -> None:
        """Before the closure."""

    def begin(self) -> None:
        """Behind the closure."""

    def scale(self) -> Any:
        """Of all gradients."""
        return 1.0

    def change(self, p: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        """For each parameter."""
        return update

    def without(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        """A parameter has no gradient."""

    @property
    def own(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.before()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.begin()
        scale = self.scale()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    self.without(p, group)
                else:
                    momentum = self.state[p].setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(p.grad / scale)
                    p.sub_(self.change(p, momentum), alpha=group["lr"])
        return loss


def kind(name: str, base: type[Momentum] = Momentum, **methods: Any) -> type[Momentum]:
    return type(name, (base,), methods)
