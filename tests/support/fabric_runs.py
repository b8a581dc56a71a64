"""Steps with a Fabric, and what its strategy may have left behind."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import torch
from lightning.fabric import Fabric

from tests.support.leftovers import open_files
from tests.support.loops import batches, loss_of
from tests.support.patience import PATIENCE_S


def assert_nothing_left(directory: Path) -> None:
    """Threads, descriptors, files."""
    deadline_s = time.monotonic() + PATIENCE_S
    while running := [t.name for t in threading.enumerate() if t.name.startswith("lightning_ssd")]:
        assert time.monotonic() < deadline_s, running
        time.sleep(0.01)
    assert open_files(directory) == []
    assert list(directory.glob("lightning_ssd*")) == []


def more_steps(fabric: Fabric, model, optimizer, *, seed: int) -> dict[str, object]:
    torch.manual_seed(seed)
    losses = []
    for tokens in batches(2, seed=seed):
        loss = loss_of(model(tokens), tokens)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {"losses": losses, "weights": [p.detach().clone() for p in model.parameters()]}
