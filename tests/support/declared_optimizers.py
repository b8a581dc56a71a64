"""An optimizer by hand, for tests of what a user declares."""

import torch
from torch.optim import Optimizer

MANY = ((128, 150),) * 6 + ((7,),)
"""More than a subgroup holds."""


class Momentum(Optimizer):
    """By hand, with places for what a class adds."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "count": 0})
        self.t = 0
        self.notes = {"past": []}
        self.beta = torch.ones(())
        self.prepare()

    def prepare(self):
        """What it has of its own."""

    def before(self):
        """Before the closure."""

    def begin(self):
        """Behind the closure."""

    def scale(self):
        """Of all gradients."""
        return 1.0

    def change(self, p, update):
        """For each parameter."""
        return update

    def update(self, p, state, rate, scale):
        momentum = state.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(p.grad / scale)
        p.sub_(self.change(p, momentum), alpha=rate)

    def without(self, p, group):
        """A parameter has no gradient."""

    @property
    def own(self):
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
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
                    self.update(p, self.state[p], group["lr"], scale)
        return loss


def kind(name, base=Momentum, **methods):
    return type(name, (base,), methods)
