"""Optimizers that are more than a step, for random programs. ``tests/optimizer/test_contract.py`` has more kinds."""

from collections import defaultdict

import torch
from torch.optim import Optimizer

from tests.support.declared_optimizers import Momentum


class Lookahead(Optimizer):
    """As timm's: it owns the optimizer that it steps, has its groups, and keeps slow weights among its states."""

    def __init__(self, base):
        self._base = base
        self.param_groups, self.defaults, self.state = base.param_groups, base.defaults, defaultdict(dict)
        for group in self.param_groups:
            group.setdefault("lookahead_step", 0)

    @torch.no_grad()
    def step(self, closure=None):
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

    def state_dict(self):
        return self._base.state_dict()

    def load_state_dict(self, state_dict):
        self._base.load_state_dict(state_dict)
        self.param_groups = self._base.param_groups


class OwnList(Momentum):
    """Finds its parameters in a list of its own."""

    def prepare(self):
        self.mine = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.mine:
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1)


class Views(Momentum):
    """Two states in one buffer, which is emptied as a whole."""

    def update(self, p, state, rate, scale):
        if not state:
            buffer = torch.zeros(2, *p.shape)
            state.update(m=buffer[0], n=buffer[1], both=buffer)
        state["both"].mul_(0.9)
        state["n"].add_(p.grad.abs())
        state["m"].add_(p.grad)
        p.sub_(state["m"] / (1 + state["n"]), alpha=rate)


class TwoNames(Momentum):
    """One tensor, twice."""

    def update(self, p, state, rate, scale):
        super().update(p, state, rate, scale)
        state.setdefault("n", state["m"]).mul_(0.5)


class KeepsGradient(Momentum):
    """A state that shows the gradient, which the next backward writes to."""

    def update(self, p, state, rate, scale):
        p.sub_(state.setdefault("last", p.grad), alpha=rate)
        super().update(p, state, rate, scale)


class OneForAll(Momentum):
    """All parameters share a state."""

    def prepare(self):
        self.common = {"t": torch.zeros(())}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p] = self.common
                    self.state[p]["t"].add_(1)
                    p.sub_(p.grad, alpha=float(1 / self.state[p]["t"]))


class ReturnsText(Momentum):
    """The same each time."""

    def step(self, closure=None):
        return "done", super().step(closure)


class OwnLoad(Momentum):
    """Counts how often it was loaded."""

    def prepare(self):
        self.num_loads = 0

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.num_loads += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / (1 + self.num_loads)


Momentum([torch.zeros(1)])  # PyTorch wraps the step of each class that has instances, to run hooks around it


def _adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


KINDS = {
    "adamw": lambda p, offload: offload(_adamw(p)),
    "sgd": lambda p, offload: offload(torch.optim.SGD(p, lr=1e-2, momentum=0.9)),
    "owning": lambda p, offload: offload(Lookahead(_adamw(p))),
    "around": lambda p, offload: Lookahead(offload(_adamw(p))),
    **{
        kind.__name__: lambda p, offload, kind=kind: offload(kind(p))
        for kind in (Momentum, OwnList, Views, TwoNames, KeepsGradient, OneForAll, ReturnsText, OwnLoad)
    },
}
