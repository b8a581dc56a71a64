"""Two processes with gloo: each has its own offloader, and all ranks hold the same weights as without one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.parity.models import Perceptrons, floats
from tests.support.helpers import DRAINED, EAGER, Session, assert_identical, assert_released, moved, open_offloader
from tests.support.processes import run_script

NUM_PROCESSES = 2


def train(session: Session, rank: int) -> tuple[list[Tensor], list[Tensor]]:
    """Three steps of two micro-batches, the first of each without synchronising gradients."""
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(Perceptrons(num_blocks=3), nn.BatchNorm1d(40)), bucket_cap_mb=1)
    session.register(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        with model.no_sync():
            _pass(session, model, 10 * step + rank, losses)
        _pass(session, model, 100 + 10 * step + rank, losses)
        optimizer.step()
        optimizer.zero_grad()
    return losses, [parameter.detach().clone() for parameter in model.parameters()]


def _pass(session: Session, model: nn.Module, seed: int, losses: list[Tensor]) -> None:
    with session.saved():
        loss = model(floats(seed, 13, 40)).square().mean()
    session.drain()
    loss.backward()
    session.end()
    losses.append(loss.detach())


def worker(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=NUM_PROCESSES)
    expected: Any = train(Session(), rank)
    for setup in (DRAINED, EAGER):
        # One directory for all: ranks on one machine share drives.
        with open_offloader(Path(directory), setup) as offloader:
            assert_identical(train(Session(offloader, drained=setup.drained), rank), expected)
            assert_released(offloader)
            assert moved(offloader.stats) > 0
            assert not setup.drained or offloader.stats.bytes_read > 0
    for weight in expected[1]:
        others = [torch.empty_like(weight) for _ in range(NUM_PROCESSES)]
        dist.all_gather(others, weight)
        assert torch.equal(others[0], others[1])
    dist.destroy_process_group()


def test_two_processes(tmp_path: Path, forks: list[str]) -> None:
    run_script("tests.parity.test_distributed", str(tmp_path), begin=forks)


if __name__ == "__main__":
    torch.multiprocessing.start_processes(worker, (sys.argv[1],), NUM_PROCESSES, start_method="fork")
