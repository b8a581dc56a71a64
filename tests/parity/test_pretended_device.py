"""Whole trainings on a pretended device: late copies, any order, poisoned memory, backward in a thread of its own."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.optimizer import test_optimizer_faults as optimizer_faults
from tests.parity import models
from tests.parity import test_failures as failures
from tests.parity.models import FAMILIES
from tests.support.helpers import DRAINED, EAGER, PLANNED, Setup, Training, assert_parity, open_offloader
from tests.support.pairs import pairwise
from tests.support.pretended import PretendedDevice
from tests.support.pretended_training import everything_there, on, poisoned_memory, pretended_device


def rectifiers() -> torch.nn.Module:
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
def test_training_is_exact(name: str, setup: str, seed: int, spill_dir: Path) -> None:
    """The bits of plain PyTorch, and no race on the way to them, in whatever order streams get on."""
    training = replace(TRAININGS[name](), steps=6 if setup == "planned" else 3)
    with pretended_device(seed=seed, lag_s=0.001 * (seed + 1)) as device:
        assert_parity(training, spill_dir, setups=[SETUPS[setup]], **on(device))
    assert device.faults == []
    assert device.num_copies > 0
    assert device.num_backwards > 0


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "lstm" else pytest.mark.exhaustive) for name in FAMILIES]
)
def test_model_is_exact(name: str, spill_dir: Path) -> None:
    with pretended_device() as device:
        assert_parity(replace(FAMILIES[name](), steps=2), spill_dir, setups=[DRAINED], **on(device))
    assert device.faults == []


def test_training_in_poisoned_host_memory_is_exact(spill_dir: Path) -> None:
    """Without streams: reloads on a CPU go to memory of a pool."""
    with poisoned_memory() as poisoned:
        assert_parity(models.checkpointed("alternate"), spill_dir, setups=[DRAINED, EAGER])
        assert_parity(FAMILIES["convolutions-channels-last"](), spill_dir, setups=[DRAINED])
    assert poisoned, "no memory came back"


def test_backward_has_a_thread_of_its_own(spill_dir: Path) -> None:
    threads: list[str] = []
    x = torch.ones(4096, requires_grad=True)
    with pretended_device() as device, open_offloader(spill_dir, DRAINED, **on(device)) as offloader:
        with offloader.saved_tensors():
            y = x.exp()
            y.register_hook(lambda gradient: threads.append(threading.current_thread().name))
            loss = y.sum()
        loss.backward()
    assert threads == ["pretended-autograd"]


# -- tests that know nothing of devices --------------------------------------------------------------------------------

# Not those that edit what is being copied (test_inplace.py: the copy is thrown away, but the race is there), not those
# that train in threads of their own (test_graphs.py), of whose operations the device is not told, and not those of the
# store of states by itself, which move what no device has.
SUITES = (
    "parity/test_failures.py",
    "parity/test_functions.py",
    "parity/test_lifetime.py",
    "parity/test_lightning_checkpoints.py",
    "parity/test_lightning_features.py",
    "parity/test_optimizer_states.py",
    "parity/test_training_modes.py",
    "optimizer/test_master_weights.py",
    "optimizer/test_optimizer.py",
    "optimizer/test_optimizer_faults.py",
    "optimizer/test_optimizer_live_states.py",
    "optimizer/test_optimizer_oddities.py",
    "optimizer/test_optimizer_programs.py",
)


@pytest.fixture
def device() -> Iterator[PretendedDevice]:
    with everything_there() as made:
        yield made


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("suite", SUITES)
def test_a_whole_suite(suite: str, seed: int) -> None:
    options = ["-n", "0", "-q", "-p", "tests.support.pretended_plugin", "--pretended-seed", str(seed)]
    # The first counts objects, of which the device keeps those that it has been told of; the second uses host memory.
    options += ["-k", "not fifty_steps and not random_training"]
    command = [sys.executable, "-m", "pytest", *options, f"tests/{suite}"]
    child = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stdout


def test_faults_of_activations(spill_dir: Path, device: PretendedDevice) -> None:
    failures.test_writes_fail_for_a_while(spill_dir / "writes")
    failures.test_a_failed_read_is_tried_again(spill_dir / "reads")
    failures.test_training_goes_on_after_a_failed_read(spill_dir / "read twice")
    failures.test_a_bit_flips_once(spill_dir / "bits")
    assert device.num_copies > 0


@pytest.mark.usefixtures("small_subgroups")
def test_faults_of_states(spill_dir: Path, device: PretendedDevice) -> None:
    optimizer_faults.test_memory_returns_when_the_drive_does(spill_dir / "writes")
    optimizer_faults.test_a_read_that_fails_once_is_tried_again(spill_dir / "reads")
    assert device.num_copies > 0
