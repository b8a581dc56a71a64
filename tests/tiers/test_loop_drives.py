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
from lightning_ssd.errors import StorageError
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
    return model(torch.randn(256, 512, generator=torch.Generator().manual_seed(number))).square().mean()


@pytest.mark.parametrize("when", ["before", "within"])
def test_a_drive_that_goes_in_mid_run_costs_at_most_the_step_in_which_it_went(drives: list[Path], when: str) -> None:
    torch.manual_seed(0)
    mine = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.GELU())))
    plain = copy.deepcopy(mine)
    ours, theirs = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (mine, plain))
    policy = OffloadPolicy(activations="offload", min_tensor_bytes=0)
    offloader = Offloader(policy=policy, hardware=HardwareProfile(paths=drives)).open()
    failed: list[tuple[int, bool]] = []
    number = 0
    while number < NUM_STEPS:
        if number == GOES_IN and when == "before":
            take_away(drives[1])
        try:
            with offloader.saved_tensors():
                loss = loss_of(mine, number)
            if number == GOES_IN and when == "within" and not failed:
                offloader.flush()
                take_away(drives[1])
            loss.backward()
            offloader.end_backward()
        except StorageError as error:
            failed.append((number, str(drives[1]) in str(error)))
            ours.zero_grad()
            continue
        ours.step()
        ours.zero_grad()
        loss_of(plain, number).backward()
        theirs.step()
        theirs.zero_grad()
        number += 1
    assert failed == ([(GOES_IN, True)] if when == "within" else [])
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), plain.parameters(), strict=True))
    if failed:
        with pytest.raises(StorageError):
            offloader.close()
    else:
        offloader.close()
