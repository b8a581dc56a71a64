"""Programs of one graph: what it saves comes back as it was, and so do the gradients of its leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.support.helpers import Session

Program = Callable[[Session], Any]


def leaf(*shape: int) -> Tensor:
    """Random numbers that want a gradient."""
    return torch.rand(shape or (40, 50)).requires_grad_()


def graph(
    build: Callable[..., Tensor],
    *leaves: Callable[[], Tensor],
    backwards: int = 1,
    look: Callable[[Any], Any] = lambda grad: grad,
) -> Program:
    """Build a loss from leaves; give their gradients.

    Args:
        build: takes the leaves; the sum of what it gives is the loss.
        leaves: make them; none: one of :func:`leaf`.
        backwards: through the same graph.
        look: what is to be compared of a gradient.
    """

    def program(session: Session) -> Any:
        made = [make() for make in leaves or (leaf,)]
        with session.saved():
            loss = build(*made).sum()
        session.drain()
        for number in range(backwards):
            loss.backward(retain_graph=number < backwards - 1)
        session.end()
        return [look(each.grad) for each in made]

    return program


class Shows(torch.autograd.Function):
    """Saves ``tensors`` in forward and shows in backward what came back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, show: Callable[[tuple[Tensor, ...]], None], *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.show, ctx.num_inputs = show, 2 + len(tensors)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.show(ctx.saved_tensors)
        return grad, *[None] * (ctx.num_inputs - 1)


def held(make: Callable[[], tuple[Tensor, ...]], look: Callable[[Tensor], Any]) -> Program:
    """Save tensors, let go of them, and look at what comes back."""

    def program(session: Session) -> Any:
        seen: list[Any] = []
        x = torch.ones(3, requires_grad=True)
        with session.saved():
            y = Shows.apply(x, lambda saved: seen.extend((type(t).__name__, look(t)) for t in saved), *make())
        session.backward(y.sum())
        return seen

    return program
