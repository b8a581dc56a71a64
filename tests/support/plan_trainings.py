"""Small trainings that follow plans, and drives that fail below them."""

from contextlib import contextmanager

import torch

from tests.parity.models import Perceptrons, floats
from tests.support.faults import FaultyBackend
from tests.support.helpers import open_offloader

WIDTH, ROWS, BLOCKS = 64, 256, 4  # an activation of 64 KiB, or thrice that
SMALLEST, MIDDLE_BYTES, LARGE = 600_000, 900_000, 1_500_000  # of 2.2 MB that one pass saves


def make_model(blocks=BLOCKS, width=WIDTH):
    torch.manual_seed(3)
    return Perceptrons(width=width, num_blocks=blocks)


def loss_of(model, step, rows=ROWS, width=WIDTH):
    return model(floats(step, rows, width)).square().mean()


def gradients(*modules):
    return [None if p.grad is None else p.grad.clone() for module in modules for p in module.parameters()]


def trains(steps, between=lambda step, session: None):
    """A plain training; ``between`` is called after each step, and ends it by returning true."""

    def program(session):
        model = make_model()
        session.register(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(steps):
            with session.saved():
                loss = loss_of(model, step)
            session.drain()
            loss.backward()
            session.end()
            losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            if between(step, session):
                break
        return losses, [p.detach().clone() for p in model.parameters()]

    return program


@contextmanager
def faulty(directory, setup, **faults):
    """An offloader on a drive with faults."""
    made = []

    def wrap(backend):
        made.append(FaultyBackend(backend, **faults))
        return made[-1]

    with open_offloader(directory, setup, _wrap_backend=wrap) as offloader:
        yield offloader, made[0]


def num_writes(offloader):
    return len(offloader._cache.accounting.writes)
