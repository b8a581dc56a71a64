"""Programs that edit a saved tensor in place, for ``test_inplace.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.helpers import Session, meaning_of

Program = Callable[[Session], Any]


def leaf(*shape: int) -> Tensor:
    return torch.rand(shape or (40, 50)).requires_grad_()


def finish(session: Session, loss: Tensor, *leaves: Tensor) -> list[Tensor | None]:
    session.drain()
    loss.sum().backward()
    session.end()
    return [leaf.grad for leaf in leaves]


def saved_input(session: Session) -> Any:
    a = leaf()
    with session.saved():
        x = a * 2
        y = x.sin()
    x.detach().add_(1)
    return finish(session, y, a)


def saved_input_view_lives(session: Session) -> Any:
    """On disk, its Python object gone; only a view knows about the edit."""
    a = leaf()
    with session.saved():
        x = a * 2
        y = x.sin()
    view = x.detach()[3:5]
    del x
    session.drain()
    view.zero_()
    del view
    return finish(session, y, a)


def saved_input_edited_under_grad(session: Session) -> Any:
    a = leaf()
    with session.saved():
        x = a * 2
        y = x.sin()
        x.mul_(3)
    return finish(session, y + x, a)


def saved_output(session: Session) -> Any:
    a = leaf()
    with session.saved():
        y = a.exp()
    y.detach().add_(1)
    return finish(session, y, a)


def saved_output_after_drain(session: Session) -> Any:
    a = leaf()
    with session.saved():
        y = a.exp()
        z = y * 2
    session.drain()
    with torch.no_grad():
        y += 1
    del y
    return finish(session, z, a)


def saved_output_edited_twice(session: Session) -> Any:
    a = leaf()
    with session.saved():
        y = torch.sigmoid(a)
        z = y * 2
    y.detach().add_(1).mul_(2)
    return finish(session, z, a)


def chunk_outputs(session: Session) -> Any:
    a = leaf()
    with session.saved():
        q, k, v = (a.repeat(1, 3) * 2).chunk(3, dim=-1)
        y = q * k + v.sin()
    with torch.no_grad():
        v.add_(1)
    return finish(session, y, a)


def chunk_of_constants(session: Session) -> Any:
    a = leaf()
    q, k, v = torch.rand(40, 150).chunk(3, dim=-1)
    with session.saved():
        y = a * q + a * k + a * v
    k.add_(1)
    return finish(session, y, a)


def base_of_views(session: Session) -> Any:
    a = leaf()
    with session.saved():
        base = a.repeat(1, 3) * 2
        y = base[:, :50] * base[:, 50:100]
    base.detach()[:, 149].zero_()  # bytes that no saved view covers, yet one version counter
    return finish(session, y, a)


def non_leaf_constant(session: Session) -> Any:
    a, mask = leaf(), torch.rand(40, 50) > 0.5
    with session.saved():
        y = torch.where(mask, a, a * 2)
    mask.logical_not_()
    return finish(session, y, a)


def parameter_before_backward(session: Session) -> Any:
    layer, x = nn.Linear(50, 30), leaf()
    session.register(layer)
    with session.saved():
        y = layer(x)
    with torch.no_grad():
        layer.weight.add_(1)
    return finish(session, y, x)


def buffer_before_backward(session: Session) -> Any:
    layer, x = nn.BatchNorm1d(50, affine=True), leaf()
    session.register(layer)
    layer.eval()
    with session.saved():
        y = layer(x)
    layer(x)
    assert layer.running_mean is not None
    layer.running_mean.add_(1)
    return finish(session, y, x)


def leaf_input(session: Session) -> Any:
    a = leaf()
    with session.saved():
        y = a.sin()
    with torch.no_grad():
        a.add_(1)
    return finish(session, y, a)


def second_version_saved_too(session: Session) -> Any:
    """Both versions are saved; the graph of the second is intact, that of the first is not."""
    a = leaf()
    base = torch.rand(40, 50)
    with session.saved():
        first = (a * base).sum()
        base.add_(1)
        second = (a * base).sum()
    good = finish(session, second, a)
    assert good[0] is not None
    try:
        finish(session, first, a)
    except RuntimeError as error:
        return good[0].clone(), meaning_of(str(error))
    return good


def edit_between_two_backwards(session: Session) -> Any:
    a = leaf()
    with session.saved():
        x = a * 2
        y = x.sin().sum()
    session.drain()
    y.backward(retain_graph=True)
    session.end()
    x.detach().add_(1)
    return finish(session, y, a)


def edit_by_out_argument(session: Session) -> Any:
    a = leaf()
    base = torch.rand(40, 50)
    with session.saved():
        y = a * base
    torch.add(base, 1, out=base)
    return finish(session, y, a)


def edit_by_copy_into_slice(session: Session) -> Any:
    a = leaf()
    with session.saved():
        x = a * 2
        y = x @ x.t()
    x.detach()[0].copy_(torch.ones(50))
    return finish(session, y, a)


def edit_inside_backward(session: Session) -> Any:
    """A hook edits, during backward, a tensor that is unpacked later."""
    a = leaf()
    with session.saved():
        x = a * 2
        y = x.sin()
        z = y.cos()
    alias = x.detach()

    def edit(_: Tensor) -> None:
        alias.add_(1)

    y.register_hook(edit)
    return finish(session, z, a)


def saved_by_a_node_of_the_same_kind(session: Session) -> Any:
    """The saved input was made by a node with the same name as the one that saved it; the edit gives it a new one."""
    a = leaf()
    with session.saved():
        x = a.sin()
        y = x.sin()
        x.mul_(3)
    return finish(session, y + x, a)


def view_edited_under_grad(session: Session) -> Any:
    a = leaf()
    with session.saved():
        x = a * 2
        y = x.sin()
        x[3].mul_(3)
    return finish(session, y + x, a)


def dead_view_of_edited_base(session: Session) -> Any:
    a = leaf()
    with session.saved():
        x = a * 2
        y = x[3:].t().sin()
    x.detach().add_(1)
    return finish(session, y, a)


def dead_chunk_of_edited_base(session: Session) -> Any:
    a = leaf()
    with session.saved():
        x = a * 2
        y = x.chunk(2)[1].sin()
    x.detach().add_(1)
    return finish(session, y, a)


def edit_of_the_original_before_double_backward(session: Session) -> Any:
    """The first backward saves what it was given; that is still the same tensor for PyTorch."""
    a = leaf()
    with session.saved():
        x = a * 2
        y = x.sin().sum()
    session.drain()
    with session.saved():
        (slope,) = torch.autograd.grad(y, a, create_graph=True)
    session.drain()
    x.detach().add_(1)
    return finish(session, slope, a)


class Spoils(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x.detach().mul_(grad)


def backward_edits_what_it_was_given(session: Session) -> Any:
    a = leaf()
    with session.saved():
        y = Spoils.apply(a * 2).sum()
    session.drain()
    y.backward(retain_graph=True)
    return finish(session, y, a)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * x
        ctx.save_for_backward(x, y, x + 1)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, _, _ = ctx.saved_tensors
        return grad * 2 * x


def custom_function_input(session: Session) -> Any:
    a = leaf()
    with session.saved():
        x = a * 2
        y = Square.apply(x)
    x.detach().add_(1)
    return finish(session, y, a)


def custom_function_output(session: Session) -> Any:
    a = leaf()
    with session.saved():
        y = Square.apply(a * 2)
    y.detach().add_(1)
    return finish(session, y, a)


def checkpointed_input(session: Session) -> Any:
    a = leaf()
    with session.saved():
        x = a * 2
        y = checkpoint(lambda t: t.sin().cos(), x, use_reentrant=False)
    x.detach().add_(1)
    return finish(session, y, a)


def rest_of_training_goes_on(session: Session) -> Any:
    """After such an error the next step is exact."""
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved_input(session)
    a = leaf()
    with session.saved():
        y = (a * 2).sin().exp()
    return finish(session, y, a)


RAISING: list[Program] = [
    saved_input,
    saved_input_view_lives,
    saved_input_edited_under_grad,
    saved_output,
    saved_output_after_drain,
    saved_output_edited_twice,
    chunk_of_constants,
    base_of_views,
    non_leaf_constant,
    parameter_before_backward,
    buffer_before_backward,
    leaf_input,
    edit_between_two_backwards,
    edit_by_out_argument,
    edit_by_copy_into_slice,
    edit_inside_backward,
    custom_function_input,
    custom_function_output,
    saved_by_a_node_of_the_same_kind,
    view_edited_under_grad,
    dead_view_of_edited_base,
    edit_of_the_original_before_double_backward,
    backward_edits_what_it_was_given,
]
SEVERAL = [chunk_outputs, dead_chunk_of_edited_base]  # these PyTorch refuses with another text
