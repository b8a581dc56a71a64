"""``torch.set_default_device`` is the user's: what we make in the host's memory is made there all the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy

WIDTH, BATCH = 128, 512


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """Tensors are made on a device with no memory, where nobody says another one; a GPU stands there with users."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def weights(offloader: Offloader | None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH, device="cpu") for _ in range(3)]
    for layer in layers:
        layer.weight.data.normal_(0, 0.1, generator=generator)
        layer.bias.data.zero_()
    network, batch = torch.nn.Sequential(*layers), torch.randn(BATCH, WIDTH, device="cpu", generator=generator)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(network.parameters())
    if offloader is not None:
        offloader.open(network)
        optimizer = offloader.offload_optimizer(optimizer)
    for _ in range(3):
        if offloader is None:
            loss = network(batch).tanh().square().mean()
        else:
            with offloader.saved_tensors():
                loss = network(batch).tanh().square().mean()
        optimizer.zero_grad()
        loss.backward()
        if offloader is not None:
            offloader.end_backward()
            offloader.wait_for_plan()
        optimizer.step()
    return [parameter.detach() for parameter in network.parameters()]


def test_moving_does_not_depend_on_it(spill_dir: Path, elsewhere: None) -> None:
    policy = OffloadPolicy(
        activations="auto", activation_budget=2 * BATCH * WIDTH * 4, min_tensor_bytes=0, optimizer_states="offload"
    )
    with Offloader(policy=policy, hardware=HardwareProfile(paths=spill_dir, host_memory=0)) as offloader:
        got = weights(offloader)
        assert offloader.unusable is None, "the drive was measured with memory of another device"
        assert offloader.stats.bytes_written > 0
        assert offloader.optimizer_stats[0].num_steps == 3
    for one, other in zip(got, weights(None), strict=True):
        assert torch.equal(one, other)
