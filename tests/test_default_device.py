"""Default device and modes are the user's: what we make in the host's memory is made there all the same."""

from contextlib import nullcontext

import pytest
import torch

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from tests.support.helpers import Session, Training, assert_identical

WIDTH, BATCH = 128, 512


@pytest.fixture
def elsewhere():
    """Tensors are made on a device with no memory, where nobody says another one; a GPU stands there with users."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def network():
    layers = [torch.nn.Linear(WIDTH, WIDTH, device="cpu") for _ in range(3)]
    for number, layer in enumerate(layers):
        layer.weight.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(number))
        layer.bias.data.zero_()
    return torch.nn.Sequential(*layers)


def batch(step):
    return {"x": torch.randn(BATCH, WIDTH, device="cpu", generator=torch.Generator().manual_seed(step))}


TRAINING = Training(network, batch, lambda model, batch: model(batch["x"]).tanh().square().mean())


class InMode(Session):
    """Opens its offloader, and closes it, in a mode."""

    def __init__(self, offloader, mode):
        super().__init__(offloader, settled=True)
        self.mode = mode

    def register(self, module):
        with self.mode():
            self.offloader.open(module)

    def optimizer(self, made):
        with self.mode():
            self.offloaded = super().optimizer(made)
        return self.offloaded

    def close(self):
        with self.mode():
            self.offloader.close()


def check(spill_dir, mode=nullcontext):
    policy = OffloadPolicy(
        activations="auto", activation_budget=2 * BATCH * WIDTH * 4, min_tensor_bytes=0, optimizer_states="offload"
    )
    session = InMode(Offloader(policy=policy, hardware=HardwareProfile(paths=spill_dir, host_memory=0)), mode)
    assert_identical(TRAINING(session), expected := TRAINING(Session()))
    assert session.offloader.unusable is None, "the drive was measured with memory of another device"
    assert session.offloader.stats.bytes_written > 0
    assert session.offloader.optimizer_stats[0].num_steps == 3
    session.close()
    states = session.offloaded.state_dict()["state"]
    assert_identical(states, expected["optimizer"])
    assert not any(value.is_inference() for state in states.values() for value in state.values())


def test_moving_does_not_depend_on_it(spill_dir, elsewhere):
    check(spill_dir)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_nor_on_the_mode_in_which_it_is_opened_and_closed(mode, spill_dir):
    check(spill_dir, mode)
