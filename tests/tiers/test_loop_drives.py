"""A training on file systems of its own, of which one goes in mid-run."""

from __future__ import annotations

import copy
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from recipes.benchmarks.drives import loop_drives, take_away

NUM_STEPS, GOES_IN = 5, 2


@pytest.fixture
def drives(tmp_path: Path) -> Iterator[list[Path]]:
    with ExitStack() as stack:
        try:
            found = stack.enter_context(loop_drives(tmp_path, 2, 256 << 20))
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"needs root, mkfs.ext4, losetup and mount for drives of its own: {error}")
        yield [directory for directory, _ in found]


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    return model(torch.randn(4096, 512, generator=torch.Generator().manual_seed(number))).square().mean()


def test_a_drive_that_goes_between_steps_costs_no_bit(drives: list[Path]) -> None:
    torch.manual_seed(0)
    mine = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.GELU())))
    plain = copy.deepcopy(mine)
    ours, theirs = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (mine, plain))
    policy = OffloadPolicy(activations="offload", min_tensor_bytes=0)
    with Offloader(policy=policy, hardware=HardwareProfile(paths=drives)) as offloader:
        for number in range(NUM_STEPS):
            if number == GOES_IN:
                take_away(drives[1])
            with offloader.saved_tensors():
                loss = loss_of(mine, number)
            loss.backward()
            offloader.end_backward()
            loss_of(plain, number).backward()
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), plain.parameters(), strict=True))
