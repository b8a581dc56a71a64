"""Whole trainings on a pretended device: late copies, any order, poisoned memory, backward in a thread of its own."""

from dataclasses import replace

import pytest
import torch

from tests.optimizer import test_optimizer_faults as optimizer_faults
from tests.parity import models
from tests.parity import test_failures as failures
from tests.parity.models import FAMILIES
from tests.support.helpers import DRAINED, EAGER, PLANNED, Setup, Training, assert_parity
from tests.support.pairs import pairwise
from tests.support.pretended_training import everything_there, on, poisoned_memory, pretended_device


def rectifiers():
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.RReLU()) for _ in range(4)))


TRAININGS = FAMILIES | {
    "perceptrons": models.perceptrons,
    "checkpointed": lambda: models.checkpointed("alternate"),
    "rectified": lambda: Training(rectifiers, lambda step: {"x": models.floats(step, 16, 40)}, models.mean_square),
}
SETUPS = {"drained": DRAINED, "eager": EAGER, "verified": Setup(verify="full", drained=False), "planned": PLANNED}
SMALL = ("perceptrons", "checkpointed", "rectified")


@pairwise("name, setup, seed", SMALL, SETUPS, range(3))
def test_training_is_exact(name, setup, seed, spill_dir):
    """The bits of plain PyTorch, and no race on the way to them, in whatever order streams get on."""
    training = replace(TRAININGS[name](), steps=6 if setup == "planned" else 3)
    with pretended_device(seed=seed, lag_s=0.001 * (seed + 1)) as device:
        assert_parity(training, spill_dir, setups=[SETUPS[setup]], **on(device))
    assert device.faults == []
    assert device.num_copies > 0
    assert device.num_backwards > 0


def test_training_in_poisoned_host_memory_is_exact(spill_dir):
    """Without streams: reloads on a CPU go to memory of a pool."""
    with poisoned_memory() as poisoned:
        assert_parity(models.checkpointed("alternate"), spill_dir, setups=[DRAINED, EAGER])
        assert_parity(FAMILIES["convolutions-channels-last"](), spill_dir, setups=[DRAINED])
    assert poisoned, "no memory came back"


# -- tests that know nothing of devices --------------------------------------------------------------------------------


@pytest.fixture
def device():
    with everything_there() as made:
        yield made


def test_faults_of_activations(spill_dir, device):
    failures.test_writes_fail_for_a_while(spill_dir / "writes")
    failures.test_a_failed_read_is_tried_again(spill_dir / "reads")
    failures.test_training_goes_on_after_a_failed_read(spill_dir / "read twice")
    failures.test_a_bit_flips_once(spill_dir / "bits")
    assert device.num_copies > 0


@pytest.mark.usefixtures("small_subgroups")
def test_faults_of_states(spill_dir, device):
    optimizer_faults.test_memory_returns_when_the_drive_does(spill_dir / "writes")
    optimizer_faults.test_a_read_that_fails_once_is_tried_again(spill_dir / "reads")
    assert device.num_copies > 0
