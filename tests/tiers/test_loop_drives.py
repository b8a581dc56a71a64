"""A training on file systems of its own, of which one goes in mid-run."""

import copy
import subprocess
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from lightning_ssd.errors import StorageError
from recipes.benchmarks.drives import loop_drives, take_away
from tests.support.opened import offloader_in

NUM_STEPS, GOES_IN = 4, 1
MIDDLE = 6
"""Number of a layer."""


@pytest.fixture
def drives(tmp_path):
    with ExitStack() as stack:
        try:
            found = stack.enter_context(loop_drives(tmp_path, 2, 256 << 20))
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"needs root, mkfs.ext4, losetup and mount for drives of its own: {error}")
        yield [directory for directory, _ in found]


class Training:
    """Steps of a model with its activations on drives, and of its copy without."""

    def __init__(self):
        torch.manual_seed(0)
        self.mine = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.GELU())))
        self.plain = copy.deepcopy(self.mine)
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (self.mine, self.plain)]

    def step(self, offloader, number, moment="", happens=lambda: None):
        """Train one step; in a moment of it something happens."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        batch = x = torch.randn(4096, 256, generator=torch.Generator().manual_seed(number))
        with offloader.saved_tensors():
            for index, layer in enumerate(self.mine):
                x = layer(x)
                if index == MIDDLE and moment == "forward":
                    happens()
                elif index == MIDDLE and moment == "backward":
                    x.register_hook(lambda gradient: happens())
            loss = x.square().mean()
        if moment == "between":
            offloader.flush()
            happens()
        loss.backward()
        offloader.end_backward()
        self.plain(batch).square().mean().backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def check(self):
        """Compare the weights."""
        for mine, plain in zip(self.mine.parameters(), self.plain.parameters(), strict=True):
            assert torch.equal(mine, plain)


def opened(drives):
    return offloader_in(drives, activations="offload", min_tensor_bytes=0)


def test_a_drive_that_goes_between_steps_costs_no_bit(drives):
    training = Training()
    with opened(drives) as offloader:
        for number in range(NUM_STEPS):
            if number == GOES_IN:
                take_away(drives[1])
            training.step(offloader, number)
    training.check()


@pytest.mark.parametrize("moment", ["forward", "between", "backward"])
def test_a_drive_that_goes_within_a_step_is_named_where_its_bytes_are_missed(moment, drives):
    """The step then ends before an update, and training goes on from there without that drive."""
    training, lost_bytes, error = Training(), 0, None

    def goes():
        nonlocal lost_bytes
        take_away(drives[1])
        tier = offloader._parts.tiers.ssd
        assert tier is not None
        lost_bytes = tier._arenas[1].used_bytes

    with ExitStack() as stack:
        offloader = stack.enter_context(opened(drives))
        for number in range(GOES_IN):
            training.step(offloader, number)
        try:
            training.step(offloader, GOES_IN, moment, goes)
        except StorageError as raised:
            error = str(raised)
            offloader.abort()
    training.check()
    assert error is None or str(drives[1]) in error
    if moment == "between":
        assert (error is not None) == (lost_bytes > 0)
    with opened(drives[:1]) as offloader:
        for number in range(GOES_IN + (error is None), NUM_STEPS):
            training.step(offloader, number)
    training.check()
