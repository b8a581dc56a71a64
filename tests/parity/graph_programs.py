"""Programs that use graphs in unusual ways, for ``test_graphs.py``."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tests.parity.models import Perceptrons, floats
from tests.support.helpers import meaning_of


def network(session, *, num_blocks=3, dropout=0.1):
    torch.manual_seed(7)
    model = Perceptrons(num_blocks=num_blocks, dropout=dropout)
    session.register(model)
    return model


def gradients(model):
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]


def of_network(train):
    """A program that gives the gradients of a small network, and what ``train`` gives."""

    @wraps(train)
    def program(session):
        model = network(session)
        more = train(session, model)
        return gradients(model), more

    return program


def forward(session, model, step=0):
    with session.saved():
        return model(floats(step, 60, 40)).square().mean()


@of_network
def retained(session, model):
    """Three backwards through one graph, with other work in between."""
    loss = forward(session, model)
    for repeat in range(3):
        session.backward(loss, retain_graph=repeat < 2)
        forward(session, model, repeat)


@of_network
def double_backward(session, model):
    """The gradient's own graph is packed inside backward."""
    x = floats(0, 60, 40).requires_grad_()
    with session.saved():
        y = torch.tanh(model(x)).sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        penalty = (slope.norm(dim=-1) - 1).square().mean()
    session.backward(y + penalty)
    return x.grad


@of_network
def double_backward_outside(session, model):
    """As above, with the first backward after forward's context."""
    x = floats(0, 60, 40).requires_grad_()
    with session.saved():
        y = torch.tanh(model(x)).sum()
    session.drain()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    session.end()
    slope.square().sum().backward()
    session.end()
    return x.grad


def third_derivative(session):
    x = floats(0, 64, 64).requires_grad_()
    with session.saved():
        y = (x.sin() * x.exp()).sum()
        for _ in range(3):
            session.drain()
            (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.detach()


def losses_with_shared_trunk(session):
    model, heads = network(session), nn.ModuleList(nn.Linear(40, 5) for _ in range(3))
    session.register(heads)
    with session.saved():
        trunk = model(floats(0, 60, 40))
        losses = [head(trunk).square().mean() for head in heads]
    session.drain()
    for number, loss in enumerate(losses):
        loss.backward(retain_graph=number < 2)
        session.end()
    return gradients(model), gradients(heads)


def partial_backward(session):
    """Gradients of one part of the graph only; the rest is dropped unread."""
    model = network(session)
    with session.saved():
        hidden = model(floats(0, 60, 40))
        loss = (hidden.sin() * hidden.cos()).sum()
    session.drain()
    (gradient,) = torch.autograd.grad(loss, hidden)
    session.end()
    return gradient


@of_network
def backward_twice_without_retaining(session, model):
    """Plain PyTorch's error about a freed graph."""
    loss = forward(session, model)
    session.backward(loss)
    loss.backward()


@of_network
def many_graphs_alive(session, model):
    """Eight graphs at once, backward in a scrambled order, half of them dropped."""
    losses = [forward(session, model, step) for step in range(8)]
    session.drain()
    for number in (5, 0, 7, 2):
        loss, losses[number] = losses[number], None
        loss.backward()
        session.end()


@of_network
def backward_inside_the_context(session, model):
    with session.saved():
        loss = model(floats(0, 60, 40)).square().mean()
        session.drain()
        loss.backward()
    session.end()


def evaluation_between(session):
    model, results = network(session), []
    with session.saved():
        loss = model(floats(0, 60, 40)).square().mean()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                results.append(model(floats(1, 6, 40)).clone())
    session.backward(loss)
    return results, gradients(model)


@of_network
def step_borders_in_odd_places(session, model):
    """`end_backward` before, inside, twice, and not at all."""
    session.end()
    for step in range(4):
        loss = forward(session, model, step)
        session.end()
        session.drain()
        loss.backward()
        if step % 2:
            session.end()
            session.end()


def _in_thread(work):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@of_network
def all_in_another_thread(session, model):
    loss = _in_thread(lambda: forward(session, model))
    session.drain()
    _in_thread(loss.backward)
    _in_thread(session.end)


def threads_at_once(session):
    """Four threads train four models through one offloader."""

    def train(number):
        model = networks[number]
        for step in range(5):
            loss = forward(session, model, step + 10 * number)
            session.backward(loss)
        return gradients(model)

    networks = [network(session, num_blocks=1 + number, dropout=0.0) for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(train, range(4)))


class Boom(Exception):
    """Raised on purpose."""


@of_network
def exception_in_forward(session, model):
    def half_a_forward(model, step):
        with session.saved():
            model(floats(step, 60, 40)).sin()
            raise Boom

    for step in range(3):
        with pytest.raises(Boom):
            half_a_forward(model, step)
        session.backward(forward(session, model, step))


@of_network
def exception_in_backward(session, model):

    def explode(grad):
        raise Boom

    for step in range(3):
        with session.saved():
            hidden = model(floats(step, 60, 40))
            half = hidden.sin().sum()
        hidden.register_hook(explode)
        session.drain()
        with pytest.raises(Boom):
            half.backward()
        del hidden, half
        if step % 2:
            session.end()
        model.zero_grad()
        session.backward(forward(session, model, step))


def gradients_that_are_saved_tensors(session):
    """Backward hands a saved tensor on as the gradient; the gradient is then edited, and backward runs again."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            return (x * y).sum()

        @staticmethod
        def backward(ctx, _):
            x, y = ctx.saved_tensors
            return y, x

    a, b = (floats(step, 60, 40).requires_grad_() for step in range(2))
    with session.saved():
        loss = Product.apply(a * 1, b * 1)
    session.backward(loss, retain_graph=True)
    first = [a.grad.clone(), b.grad.clone()] if a.grad is not None and b.grad is not None else []
    for leaf in (a, b):
        if leaf.grad is not None:
            leaf.grad.mul_(3)
    try:
        loss.backward()
    except RuntimeError as error:
        return first, meaning_of(str(error))
    return first, a.grad, b.grad


class GivesSaved(torch.autograd.Function):
    """Its backward returns what it has saved, as fused losses do that compute gradients in forward."""

    @staticmethod
    def forward(ctx, gradient, *leaves):
        ctx.save_for_backward(*[gradient] * len(leaves))
        return sum((leaf * gradient).sum() for leaf in leaves)

    @staticmethod
    def backward(ctx, *_):
        return None, *ctx.saved_tensors


def gives_saved(session, leaves, num_steps, *, at_once):
    """``at_once``: one function for all leaves; else one for each, with the same gradient."""
    for step in range(num_steps):
        with session.saved():
            gradient = floats(step, 60, 40)
            groups = [leaves] if at_once else [[leaf] for leaf in leaves]
            loss = sum(GivesSaved.apply(gradient, *group) for group in groups)
            del gradient
        session.drain()
        loss.backward()
        session.end()


def leaves_of_one_gradient(session, *, at_once):
    """It becomes the gradient of two leaves, which have memory of their own all the same."""
    leaves = [nn.Parameter(floats(number, 60, 40)) for number in range(2)]
    gives_saved(session, leaves, 2, at_once=at_once)
    nn.utils.clip_grad_norm_(leaves, 1.0)
    return [leaf.grad for leaf in leaves]


def batch_that_is_the_gradient(session, between=lambda leaf: leaf):
    """Clearing the gradient leaves the batch alone; ``between``: through what hands a gradient on as it is."""
    leaf, batch = nn.Parameter(floats(0, 60, 40)), floats(1, 60, 40)
    with session.saved():
        loss = GivesSaved.apply(batch, between(leaf))
    session.backward(loss)
    leaf.grad.zero_()
    return batch


class GivesNone(torch.autograd.Function):
    """The first input gets no gradient, when the others get theirs."""

    @staticmethod
    def forward(ctx, leaf, x):
        return x.sum()

    @staticmethod
    def backward(ctx, gradient):
        return None, gradient.expand(60, 40)


class SavesExp(torch.autograd.Function):
    """Asks for what it has saved, as any Function does."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y * 1

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * y


class GivesSavedAfter(torch.autograd.Function):
    """Has a graph of its own, whose backward runs before it returns what it has saved."""

    @staticmethod
    def forward(ctx, gradient, *leaves):
        with torch.enable_grad():
            ctx.inner = leaves[0].detach().requires_grad_()
            ctx.outer = SavesExp.apply(ctx.inner.sin()).sum()
        ctx.save_for_backward(gradient)
        return sum((leaf * gradient).sum() for leaf in leaves)

    @staticmethod
    def backward(ctx, *_):
        (gradient,) = ctx.saved_tensors
        torch.autograd.grad(ctx.outer, ctx.inner)
        return None, *[gradient] * (len(ctx.needs_input_grad) - 1)


def _through_a_sum(batch, leaves):
    between = leaves[0] + leaves[1]
    return GivesSaved.apply(batch, between, SavesExp.apply(leaves[2]))


def _of_a_leaf_that_waits(batch, leaves):
    late = GivesNone.apply(leaves[0], leaves[1].exp())
    other = SavesExp.apply(leaves[2])
    return GivesSaved.apply(batch, leaves[0], other) + late + other.sum()


def _after_another_backward(batch, leaves):
    return GivesSavedAfter.apply(batch, *leaves)


def batch_that_is_the_gradient_when_others_have_run(session, forward):
    """Between a Function and the leaves that get what it was given, other nodes ask for their saved tensors."""
    leaves = [nn.Parameter(floats(number, 60, 40)) for number in range(3)]
    batch = floats(3, 60, 40)
    with session.saved():
        loss = forward(batch, leaves)
    session.backward(loss)
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    for number, gradient in enumerate(gradients):
        gradient.mul_(number + 2)
    return batch, gradients


def retained_gradient_that_is_edited(session):
    """What is done to the gradient leaves the graph alone, which has another backward to come."""
    leaf = nn.Parameter(floats(0, 60, 40))
    with session.saved():
        loss = GivesSaved.apply(floats(1, 60, 40), leaf)
    session.drain()
    found = []
    for repeat in range(3):
        loss.backward(retain_graph=repeat < 2)
        session.end()
        found.append(leaf.grad.clone())
        leaf.grad.mul_(0.5) if repeat else leaf.grad.data.mul_(0.5)
    return found


# -- contexts that are nested, repeated and mixed ----------------------------------------------------------------------


@of_network
def nested_contexts(session, model):
    with session.saved():
        hidden = model(floats(0, 60, 40))
        with session.saved():
            hidden = hidden.sin() * hidden
            with session.saved():
                pass
        loss = (hidden.exp() * hidden).sum()
    session.backward(loss)


def own_hooks(kind, side):
    """The user's hooks inside and outside of ours; whichever is innermost acts."""

    def negate(tensor):
        return -tensor

    def program(session):
        model = network(session)
        x = floats(0, 60, 40).requires_grad_()
        hooks = save_on_cpu() if kind == "cpu" else saved_tensors_hooks(negate, negate)
        if side == "inside":
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
def one_context_used_twice(session, model):
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
def context_inside_a_checkpoint(session, model):
    """Recomputation in backward enters our context anew."""

    def inner(x):
        with session.saved():
            return model(x).sin()

    x = floats(0, 60, 40).requires_grad_()
    loss = (checkpoint(inner, x, use_reentrant=False).cos() * x).sum()
    session.backward(loss)
    return x.grad


def batched_function(session):
    """`vmap` calls operations on tensors that are not what they seem."""
    weight = floats(0, 40, 40).requires_grad_()
    with session.saved():
        y = torch.vmap(lambda row: (row @ weight).sin() * row)(floats(1, 60, 40) * 2)
        loss = y.exp().sum()
    session.backward(loss)
    return weight.grad


PROGRAMS = {
    program.__name__: program
    for program in (
        retained,
        double_backward,
        double_backward_outside,
        third_derivative,
        losses_with_shared_trunk,
        partial_backward,
        backward_twice_without_retaining,
        many_graphs_alive,
        backward_inside_the_context,
        evaluation_between,
        step_borders_in_odd_places,
        all_in_another_thread,
        threads_at_once,
        exception_in_forward,
        exception_in_backward,
        gradients_that_are_saved_tensors,
        batch_that_is_the_gradient,
        retained_gradient_that_is_edited,
        nested_contexts,
        one_context_used_twice,
        context_inside_a_checkpoint,
        batched_function,
    )
} | {
    "batch_that_is_the_gradient_behind_sums": partial(batch_that_is_the_gradient, between=lambda leaf: 1 + leaf + 1),
    **{
        f"batch_that_is_the_gradient{forward.__name__}": partial(
            batch_that_is_the_gradient_when_others_have_run, forward=forward
        )
        for forward in (_through_a_sum, _of_a_leaf_that_waits, _after_another_backward)
    },
    "leaves_of_one_gradient": partial(leaves_of_one_gradient, at_once=True),
    "leaves_of_one_gradient_by_two_functions": partial(leaves_of_one_gradient, at_once=False),
    **{
        f"own_hooks_{kind} {side}": own_hooks(kind, side)
        for kind in ("cpu", "negate")
        for side in ("inside", "outside")
    },
}
