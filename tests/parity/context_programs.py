"""Programs that nest, repeat and mix contexts, for ``test_graphs.py``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tests.parity.graph_programs import Program, gradients, network, of_network
from tests.parity.models import floats
from tests.support.helpers import Session


@of_network
def nested_contexts(session: Session, model: nn.Module) -> None:
    with session.saved():
        hidden = model(floats(0, 60, 40))
        with session.saved():
            hidden = hidden.sin() * hidden
            with session.saved():
                pass
        loss = (hidden.exp() * hidden).sum()
    session.backward(loss)


def own_hooks(where: str) -> Program:
    """The user's hooks inside and outside of ours; whichever is innermost acts."""

    def negate(tensor: Tensor) -> Tensor:
        return -tensor

    def program(session: Session) -> Any:
        model = network(session)
        x = floats(0, 60, 40).requires_grad_()
        hooks = save_on_cpu() if where.startswith("cpu") else saved_tensors_hooks(negate, negate)
        if where.endswith("inside"):
            with session.saved():
                hidden = model(x)
                with hooks:
                    hidden = hidden.sin() * hidden
                loss = (hidden.exp() * hidden).sum()
        else:
            with hooks:
                hidden = model(x).sin()
                with session.saved():
                    hidden = hidden.cos() * hidden
                loss = (hidden.exp() * hidden).sum()
        session.backward(loss)
        return gradients(model), x.grad

    return program


@of_network
def one_context_used_twice(session: Session, model: nn.Module) -> None:
    context = session.saved()
    losses = []
    for step in range(2):
        with context:
            losses.append(model(floats(step, 60, 40)).square().mean())
    session.drain()
    for loss in losses:
        loss.backward()
        session.end()


@of_network
def context_inside_a_checkpoint(session: Session, model: nn.Module) -> Any:
    """Recomputation in backward enters our context anew."""

    def inner(x: Tensor) -> Tensor:
        with session.saved():
            return model(x).sin()

    x = floats(0, 60, 40).requires_grad_()
    loss = (checkpoint(inner, x, use_reentrant=False).cos() * x).sum()
    session.backward(loss)
    return x.grad


def batched_function(session: Session) -> Any:
    """`vmap` calls operations on tensors that are not what they seem."""
    weight = floats(0, 40, 40).requires_grad_()
    with session.saved():
        y = torch.vmap(lambda row: (row @ weight).sin() * row)(floats(1, 60, 40) * 2)
        loss = y.exp().sum()
    session.backward(loss)
    return weight.grad


PROGRAMS: dict[str, Program] = {
    program.__name__: program
    for program in (nested_contexts, one_context_used_twice, context_inside_a_checkpoint, batched_function)
} | {
    f"own_hooks_{where}": own_hooks(where) for where in ("cpu inside", "cpu outside", "negate inside", "negate outside")
}
