"""Default device and modes are the user's: what we make in the host's memory is made there all the same."""

from contextlib import nullcontext

import pytest
import torch

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from tests.support.optimizer_pairs import assert_same_states

WIDTH, BATCH = 128, 512


@pytest.fixture
def elsewhere():
    """Tensors are made on a device with no memory, where nobody says another one; a GPU stands there with users."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def weights(offloader, mode=nullcontext):
    """Train; return weights and states. An offloader is opened in this mode, and closed in it."""
    generator = torch.Generator().manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH, device="cpu") for _ in range(3)]
    for layer in layers:
        layer.weight.data.normal_(0, 0.1, generator=generator)
        layer.bias.data.zero_()
    network, batch = torch.nn.Sequential(*layers), torch.randn(BATCH, WIDTH, device="cpu", generator=generator)
    optimizer = torch.optim.AdamW(network.parameters())
    if offloader is not None:
        with mode():
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
    if offloader is not None:
        assert offloader.unusable is None, "the drive was measured with memory of another device"
        assert offloader.stats.bytes_written > 0
        assert offloader.optimizer_stats[0].num_steps == 3
        with mode():
            offloader.close()
    return [parameter.detach() for parameter in network.parameters()], optimizer.state_dict()


def check(spill_dir, mode=nullcontext):
    policy = OffloadPolicy(
        activations="auto", activation_budget=2 * BATCH * WIDTH * 4, min_tensor_bytes=0, optimizer_states="offload"
    )
    offloader = Offloader(policy=policy, hardware=HardwareProfile(paths=spill_dir, host_memory=0))
    (got, states), (expected, expected_states) = weights(offloader, mode), weights(None)
    assert all(map(torch.equal, got, expected))
    assert_same_states(states, expected_states)
    values = [value for state in states["state"].values() for value in state.values()]
    assert not any(value.is_inference() for value in values)


def test_moving_does_not_depend_on_it(spill_dir, elsewhere):
    check(spill_dir)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_nor_on_the_mode_in_which_it_is_opened_and_closed(mode, spill_dir):
    check(spill_dir, mode)
