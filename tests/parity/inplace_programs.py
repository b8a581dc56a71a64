"""Programs that edit a saved tensor in place, for ``test_inplace.py``."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.parity.saved_programs import leaf
from tests.support.helpers import meaning_of


def finish(session, loss, *leaves):
    session.backward(loss.sum())
    return [leaf.grad for leaf in leaves]


def edited(forward, edit=lambda seen: None, *, when_drained=False):
    """Of a forward, which gives what is to be edited before backward, unless it has edited by itself."""

    def program(session):
        a = leaf()
        with session.saved():
            loss, seen = forward(a)
        if when_drained:
            session.drain()
        with torch.no_grad():
            edit(seen)
        del seen
        return finish(session, loss, a)

    return program


def add_one(x):
    x.add_(1)


def saved_input(a):
    x = a * 2
    return x.sin(), x.detach()


def edited_under_grad(a):
    x = a * 2
    y = x.sin()
    x.mul_(3)
    return y + x, None


def view_edited_under_grad(a):
    x = a * 2
    y = x.sin()
    x[3].mul_(3)
    return y + x, None


def saved_by_a_node_of_the_same_kind(a):
    """The saved input was made by a node with the same name as the one that saved it; the edit gives it a new one."""
    x = a.sin()
    y = x.sin()
    x.mul_(3)
    return y + x, None


def saved_output(a):
    y = a.exp()
    return y * 2, y


def chunk_outputs(a):
    q, k, v = (a.repeat(1, 3) * 2).chunk(3, dim=-1)
    return q * k + v.sin(), v


def chunk_of_constants(a):
    q, k, v = torch.rand(40, 150).chunk(3, dim=-1)
    return a * q + a * k + a * v, k


def base_of_views(a):
    base = a.repeat(1, 3) * 2
    return base[:, :50] * base[:, 50:100], base.detach()


def constant_mask(a):
    mask = torch.rand(40, 50) > 0.5
    return torch.where(mask, a, a * 2), mask


def constant(a):
    base = torch.rand(40, 50)
    return a * base, base


def product_with_itself(a):
    x = a * 2
    return x @ x.t(), x.detach()


def edited_by_a_hook(a):
    """During backward, and unpacked later."""
    x = a * 2
    y = x.sin()
    alias = x.detach()
    y.register_hook(lambda _: add_one(alias))
    return y.cos(), None


def dead_view(a):
    x = a * 2
    return x[3:].t().sin(), x.detach()


def dead_chunk(a):
    x = a * 2
    return x.chunk(2)[1].sin(), x.detach()


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x * x
        ctx.save_for_backward(x, y, x + 1)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, _, _ = ctx.saved_tensors
        return grad * 2 * x


def custom_function(a):
    x = a * 2
    y = Square.apply(x)
    return y, (x.detach(), y)


def checkpointed(a):
    x = a * 2
    return checkpoint(lambda t: t.sin().cos(), x, use_reentrant=False), x.detach()


# -- what is more than a forward and an edit ---------------------------------------------------------------------------


def parameter_before_backward(session):
    layer, x = nn.Linear(50, 30), leaf()
    session.register(layer)
    with session.saved():
        y = layer(x)
    with torch.no_grad():
        layer.weight.add_(1)
    return finish(session, y, x)


def buffer_before_backward(session):
    layer, x = nn.BatchNorm1d(50, affine=True), leaf()
    session.register(layer)
    layer.eval()
    with session.saved():
        y = layer(x)
    layer.running_mean.add_(1)
    return finish(session, y, x)


def edit_between_two_backwards(session):
    a = leaf()
    with session.saved():
        x = a * 2
        y = x.sin().sum()
    session.backward(y, retain_graph=True)
    x.detach().add_(1)
    return finish(session, y, a)


def edit_before_double_backward(session):
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
    """Edits what it is given back."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return x.detach().mul_(grad)


def backward_edits_what_it_was_given(session):
    a = leaf()
    with session.saved():
        y = Spoils.apply(a * 2).sum()
    session.drain()
    y.backward(retain_graph=True)
    return finish(session, y, a)


def second_version_saved_too(session):
    """Both versions are saved; the graph of the second is intact, that of the first is not."""
    a = leaf()
    base = torch.rand(40, 50)
    with session.saved():
        first = (a * base).sum()
        base.add_(1)
        second = (a * base).sum()
    good = finish(session, second, a)
    try:
        finish(session, first, a)
    except RuntimeError as error:
        return good[0].clone(), meaning_of(str(error))
    return good


def rest_of_training_goes_on(session):
    """After such an error the next step is exact."""
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        RAISING["saved input"](session)
    a = leaf()
    with session.saved():
        y = (a * 2).sin().exp()
    return finish(session, y, a)


RAISING = {
    "saved input": edited(saved_input, add_one),
    "view of a saved input that is on disk": edited(saved_input, lambda x: x[3:5].zero_(), when_drained=True),
    "saved input under grad": edited(edited_under_grad),
    "saved output": edited(lambda a: (y := a.exp(), y.detach()), add_one),
    "saved output that is on disk": edited(saved_output, add_one, when_drained=True),
    "saved output, twice": edited(lambda a: ((y := a.sigmoid()) * 2, y.detach()), lambda y: y.add_(1).mul_(2)),
    "chunk of constants": edited(chunk_of_constants, add_one),
    # Bytes that no saved view covers, yet one version counter.
    "base of views": edited(base_of_views, lambda base: base[:, 149].zero_()),
    "constant": edited(constant_mask, Tensor.logical_not_),
    "parameter": parameter_before_backward,
    "buffer": buffer_before_backward,
    "leaf": edited(lambda a: (a.sin(), a), add_one),
    "between two backwards": edit_between_two_backwards,
    "by an out argument": edited(constant, lambda base: torch.add(base, 1, out=base)),
    "by a copy into a slice": edited(product_with_itself, lambda x: x[0].copy_(torch.ones(50))),
    "inside of backward": edited(edited_by_a_hook),
    "input of a custom function": edited(custom_function, lambda seen: seen[0].add_(1)),
    "output of a custom function": edited(custom_function, lambda seen: seen[1].add_(1)),
    "node of the same kind": edited(saved_by_a_node_of_the_same_kind),
    "view under grad": edited(view_edited_under_grad),
    "base of a dead view": edited(dead_view, add_one),
    "before double backward": edit_before_double_backward,
    "what backward was given": backward_edits_what_it_was_given,
}
SEVERAL = {"chunk outputs": edited(chunk_outputs, add_one), "dead chunk": edited(dead_chunk, add_one)}
"""These PyTorch refuses with another text."""
DECIDED = {
    "second version saved, too": second_version_saved_too,
    "checkpointed input": edited(checkpointed, add_one),
    "the rest of training goes on": rest_of_training_goes_on,
}
"""Plain PyTorch decides what of these is legal."""
