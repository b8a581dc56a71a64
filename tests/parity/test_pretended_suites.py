"""Tests that know nothing of devices, run once more on a pretended one: some of them here, whole files exhaustively."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.optimizer import test_optimizer_faults as optimizer_faults
from tests.parity import test_failures as failures
from tests.parity import test_optimizer_states as optimizer_states
from tests.parity.states_on_ssd import MARKS
from tests.support.pretended import PretendedDevice
from tests.support.pretended_training import everything_there

# Not those that edit what is being copied (test_inplace.py: the copy is thrown away, but the race is there), not those
# that train in threads of their own (test_graphs.py), of whose operations the device is not told, and not those of the
# store of states by itself, which move what no device has.
SUITES = (
    "parity/test_failures.py",
    "parity/test_functions.py",
    "parity/test_lifetime.py",
    "parity/test_lightning_optimizers.py",
    "parity/test_optimizer_state_checkpoints.py",
    "parity/test_optimizer_states.py",
    "parity/test_training_modes.py",
    "optimizer/test_master_weights.py",
    "optimizer/test_optimizer.py",
    "optimizer/test_optimizer_faults.py",
    "optimizer/test_optimizer_live_states.py",
    "optimizer/test_optimizer_oddities.py",
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
    options += ["-k", "not fifty_steps"]  # which counts objects: the device keeps those that it has been told of
    command = [sys.executable, "-m", "pytest", *options, f"tests/{suite}"]
    child = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stdout


@pytest.mark.parametrize("test", [failures.test_writes_fail_for_a_while, failures.test_a_failed_read_is_tried_again])
def test_faults_of_activations(test: Callable[[Path], None], spill_dir: Path, device: PretendedDevice) -> None:
    test(spill_dir)
    assert device.num_copies > 0


@pytest.mark.usefixtures("small_subgroups")
@pytest.mark.parametrize(
    "test",
    [
        optimizer_faults.test_memory_returns_when_the_drive_does,
        optimizer_faults.test_a_read_that_fails_once_is_tried_again,
        optimizer_faults.test_the_inner_optimizer_may_be_stepped_and_loaded,
    ],
)
def test_faults_of_states(test: Callable[[Path], None], spill_dir: Path, device: PretendedDevice) -> None:
    test(spill_dir)
    assert device.num_copies > 0


class TestLightning:
    pytestmark = MARKS

    def test_states(self, spill_dir: Path, device: PretendedDevice) -> None:
        optimizer_states.test_bits_of_plain_training(optimizer_states.Fused, {}, spill_dir)
        assert device.num_copies > 0
