"""Programs of one graph: what it saves comes back as it was, and so do the gradients of its leaves."""

import torch


def leaf(*shape):
    """Random numbers that want a gradient."""
    return torch.rand(shape or (40, 50)).requires_grad_()


def graph(build, *leaves, backwards=1, look=lambda grad: grad):
    """Build a loss from leaves; give their gradients.

    Args:
        build: takes the leaves; the sum of what it gives is the loss.
        leaves: make them; none: one of :func:`leaf`.
        backwards: through the same graph.
        look: what is to be compared of a gradient.
    """

    def program(session):
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
    def forward(ctx, x, show, *tensors):
        ctx.save_for_backward(*tensors)
        ctx.show, ctx.num_inputs = show, 2 + len(tensors)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.show(ctx.saved_tensors)
        return grad, *[None] * (ctx.num_inputs - 1)


def held(make, look):
    """Save tensors, let go of them, and look at what comes back."""

    def program(session):
        seen = []
        x = torch.ones(3, requires_grad=True)
        with session.saved():
            y = Shows.apply(x, lambda saved: seen.extend((type(t).__name__, look(t)) for t in saved), *make())
        session.backward(y.sum())
        return seen

    return program
