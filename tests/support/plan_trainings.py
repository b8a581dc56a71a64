"""Small trainings that follow plans, and drives that fail below them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ssd import Offloader
from lightning_ssd.storage.backend import Backend
from tests.parity.models import Perceptrons, floats
from tests.support.faults import FaultyBackend
from tests.support.helpers import (
    Session,
    Setup,
    open_offloader,
)

WIDTH, ROWS, BLOCKS = 64, 256, 4  # an activation of 64 KiB, or thrice that
SMALLEST, MIDDLE_BYTES, LARGE = 600_000, 900_000, 1_500_000  # of 2.2 MB that one pass saves


def make_model(blocks: int = BLOCKS, width: int = WIDTH) -> nn.Module:
    torch.manual_seed(3)
    return Perceptrons(width=width, num_blocks=blocks)


def loss_of(model: nn.Module, step: int, rows: int = ROWS, width: int = WIDTH) -> Tensor:
    return model(floats(step, rows, width)).square().mean()


def gradients(*modules: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for module in modules for p in module.parameters()]


Between = Callable[[int, Session], bool | None]


def trains(steps: int, between: Between = lambda step, session: None) -> Callable[[Session], Any]:
    """A plain training; ``between`` is called after each step, and ends it by returning true."""

    def program(session: Session) -> Any:
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
def faulty(directory: Path, setup: Setup, **faults: Any) -> Iterator[tuple[Offloader, FaultyBackend]]:
    """An offloader on a drive with faults."""
    made: list[FaultyBackend] = []

    def wrap(backend: Backend) -> Backend:
        made.append(FaultyBackend(backend, **faults))
        return made[-1]

    with open_offloader(directory, setup, _wrap_backend=wrap) as offloader:
        yield offloader, made[0]


def num_writes(offloader: Offloader) -> int:
    assert offloader._cache is not None
    return len(offloader._cache.accounting.writes)
