"""Optimizers built like those that people use, which do more than update each parameter by itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

Offload = Callable[[Optimizer], Optimizer]


class Momentum(Optimizer):
    """By hand, with places for what a class adds."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.prepare()

    def prepare(self) -> None:
        """What it has of its own."""

    def new_state(self, p: torch.Tensor) -> dict[str, Any]:
        return {"m": torch.zeros_like(p)}

    def update(self, p: torch.Tensor, state: dict[str, Any], rate: float) -> None:
        state["m"].mul_(0.9).add_(p.grad)
        p.sub_(state["m"], alpha=rate)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state.update(self.new_state(p))
                    self.update(p, state, group["lr"])
        return loss


class Lookahead(Optimizer):
    """As timm's: it owns the optimizer that it steps, has its groups, and keeps slow weights among its states."""

    def __init__(self, base: Optimizer) -> None:
        self._base = base
        self.param_groups, self.defaults, self.state = base.param_groups, base.defaults, defaultdict(dict)
        for group in self.param_groups:
            group.setdefault("lookahead_step", 0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = self._base.step(closure)
        for group in self.param_groups:
            group["lookahead_step"] += 1
            if group["lookahead_step"] % 2 == 0:
                for p in group["params"]:
                    if p.grad is not None:
                        state = self._base.state[p]
                        if "slow" not in state:
                            state["slow"] = p.detach().clone()
                        state["slow"].add_(p - state["slow"], alpha=0.5)
                        p.copy_(state["slow"])
        return loss

    def state_dict(self) -> dict[str, Any]:
        return self._base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._base.load_state_dict(state_dict)
        self.param_groups = self._base.param_groups


class ScheduleFree(Momentum):
    """Weights are those of training or of evaluation; to change them needs the states."""

    def prepare(self) -> None:
        for group in self.param_groups:
            group.update(k=0, train_mode=True)

    def new_state(self, p: torch.Tensor) -> dict[str, Any]:
        return {"z": p.detach().clone(), "sq": torch.zeros_like(p)}

    def _swap(self, weight: float, *, to_training: bool) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                if group.setdefault("train_mode", True) != to_training:
                    for p in group["params"]:
                        if "z" in self.state[p]:
                            p.lerp_(self.state[p]["z"], weight)
                    group["train_mode"] = to_training

    def eval(self) -> None:
        self._swap(1 - 1 / 0.9, to_training=False)

    def train(self) -> None:
        self._swap(1 - 0.9, to_training=True)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)

    def update(self, p: torch.Tensor, state: dict[str, Any], rate: float) -> None:
        state["sq"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
        direction = p.grad / (state["sq"].sqrt() + 1e-3)
        p.lerp_(state["z"], 0.25)
        p.sub_(direction, alpha=rate / 100)
        state["z"].sub_(direction, alpha=rate / 10)


class OwnList(Momentum):
    """Finds its parameters in a list of its own."""

    def prepare(self) -> None:
        self.mine = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for p in self.mine:
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1)


class DecaysAll(OwnList):
    """Uses it in the fifth step only."""

    def prepare(self) -> None:
        super().prepare()
        self.t = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.t += 1
        if self.t % 5 == 0:
            for p in self.mine:
                p.mul_(0.5)
        return Momentum.step(self, closure)


class Views(Momentum):
    """Two states in one buffer, which is emptied as a whole."""

    def new_state(self, p: torch.Tensor) -> dict[str, Any]:
        buffer = torch.zeros(2, *p.shape)
        return {"m": buffer[0], "n": buffer[1], "both": buffer}

    def update(self, p: torch.Tensor, state: dict[str, Any], rate: float) -> None:
        state["both"].mul_(0.9)
        state["n"].add_(p.grad.abs())
        state["m"].add_(p.grad)
        p.sub_(state["m"] / (1 + state["n"]), alpha=rate)


class TwoNames(Momentum):
    """One tensor, twice."""

    def new_state(self, p: torch.Tensor) -> dict[str, Any]:
        state = super().new_state(p)
        return {**state, "n": state["m"]}

    def update(self, p: torch.Tensor, state: dict[str, Any], rate: float) -> None:
        super().update(p, state, rate)
        state["n"].mul_(0.5)


class LateAlias(Momentum):
    """The second step finds two states, and makes one a view of the other."""

    def new_state(self, p: torch.Tensor) -> dict[str, Any]:
        return {"m": torch.zeros_like(p), "n": torch.zeros_like(p), "t": 0}

    def update(self, p: torch.Tensor, state: dict[str, Any], rate: float) -> None:
        state["t"] += 1
        if state["t"] == 2:
            state["n"] = state["m"].view_as(state["m"])
        state["n"].mul_(0.75)
        super().update(p, state, rate)


class KeepsParameter(Momentum):
    """A state that shows the parameter itself."""

    def new_state(self, p: torch.Tensor) -> dict[str, Any]:
        return {**super().new_state(p), "weight": p.detach()}

    def update(self, p: torch.Tensor, state: dict[str, Any], rate: float) -> None:
        super().update(p, state, rate)
        state["weight"].mul_(0.75)


class KeepsGradient(Momentum):
    """A state that shows the gradient, which the next backward writes to."""

    def update(self, p: torch.Tensor, state: dict[str, Any], rate: float) -> None:
        p.sub_(state.setdefault("last", p.grad), alpha=rate)
        super().update(p, state, rate)


class OneForAll(Momentum):
    """All parameters share a state."""

    def prepare(self) -> None:
        self.common: dict[str, Any] = {"t": torch.zeros(())}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p] = self.common
                    self.state[p]["t"].add_(1)
                    p.sub_(p.grad, alpha=float(1 / self.state[p]["t"]))


class FlatBuffer(Momentum):
    """States of all parameters in one buffer, side by side."""

    def prepare(self) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        buffer = torch.zeros(sum(p.numel() for p in parameters))
        for p, part in zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True):
            self.state[p]["m"] = part.view_as(p)


class HoldsStates(Momentum):
    """Knows its states' tensors from an attribute, too, and changes them there."""

    def prepare(self) -> None:
        self.known: dict[torch.Tensor, torch.Tensor] = {}

    def update(self, p: torch.Tensor, state: dict[str, Any], rate: float) -> None:
        self.known.setdefault(p, state["m"]).mul_(0.5)
        super().update(p, state, rate)


class LooksLater(HoldsStates):
    """Looks at its states in another way from the third update on."""

    def new_state(self, p: torch.Tensor) -> dict[str, Any]:
        return {**super().new_state(p), "t": 0}

    def update(self, p: torch.Tensor, state: dict[str, Any], rate: float) -> None:
        state["t"] += 1
        if state["t"] >= 3:
            if p not in self.known:
                self.known[p] = state["m"].detach()
            self.known[p].mul_(0.5)
        Momentum.update(self, p, state, rate)


class LooksWhenLoaded(HoldsStates):
    """Looks at the states that a load has brought."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.known = {p: each["m"].detach() for p, each in self.state.items() if "m" in each}

    def update(self, p: torch.Tensor, state: dict[str, Any], rate: float) -> None:
        if p in self.known:
            self.known[p].mul_(0.5)
        Momentum.update(self, p, state, rate)


class ReturnsNorm(Momentum):
    """As some do, for logging."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        super().step(closure)
        return sum(float(p.grad.norm()) for g in self.param_groups for p in g["params"] if p.grad is not None)


class ReturnsText(Momentum):
    """The same each time."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return "done", super().step(closure)


class ReturnsNothing(Momentum):
    """Not even the loss."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)


class Clips(Momentum):
    """By the norm of all gradients, which shows nowhere."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).norm() if gradients else 1.0
        for gradient in gradients:
            gradient.div_(norm)
        return super().step(closure)


class EvaluatesTwice(Momentum):
    """As SAM does."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        return loss if closure is None else closure() + loss


class OwnLoad(Momentum):
    """Counts how often it was loaded."""

    def prepare(self) -> None:
        self.num_loads = 0

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.num_loads += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / (1 + self.num_loads)


Momentum([torch.zeros(1)])  # PyTorch wraps the step of each class that has instances, to run hooks around it


def _adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


KINDS: dict[str, Callable[[Any, Offload], Optimizer]] = {
    "adamw": lambda p, offload: offload(_adamw(p)),
    "sgd": lambda p, offload: offload(torch.optim.SGD(p, lr=1e-2, momentum=0.9)),
    "owning": lambda p, offload: offload(Lookahead(_adamw(p))),
    "around": lambda p, offload: Lookahead(offload(_adamw(p))),
    **{
        kind.__name__: lambda p, offload, kind=kind: offload(kind(p))  # type: ignore[misc]
        for kind in (
            *(Momentum, ScheduleFree, OwnList, DecaysAll, Views, TwoNames, LateAlias, KeepsParameter, KeepsGradient),
            *(OneForAll, FlatBuffer, HoldsStates, ReturnsNorm, ReturnsText, ReturnsNothing, Clips, EvaluatesTwice),
            *(OwnLoad, LooksLater, LooksWhenLoaded),
        )
    },
}
