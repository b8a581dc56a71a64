"""Trainings on a device that PyTorch knows as one, and where the host cannot touch its memory.

Each runs in a process of its own, which a wrong access of the host ends.
"""

import json
import signal
import subprocess

import pytest
import torch

from tests.parity.models import FAMILIES
from tests.support.patience import PATIENCE_S
from tests.support.pretended_backend_script import PROGRAMS

pytestmark = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="PyTorch has one accelerator, and has one here"
)
EXHAUSTIVE = pytest.mark.exhaustive
DEFAULT = ("states-auto", "side-stream", "flipped-bits", "failing-writes")
MODELS = [name for name in FAMILIES if name != "lstm"]  # on a device PyTorch asks for an operator that no CPU has


def child(forks, directory, *names):
    command = [*forks, "-m", "tests.support.pretended_backend_script", str(directory), *names]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)


def seen(ended):
    """What the device has seen until the program ended, in whatever way."""
    return json.loads(ended.stdout.splitlines()[-1])


def assert_exact(forks, directory, *names):
    ended = child(forks, directory, *names)
    assert ended.returncode == 0, ended.stderr
    assert seen(ended)["faults"] == []
    assert seen(ended)["num_copies"] > 0


@pytest.mark.parametrize(
    "name", [name if name in DEFAULT else pytest.param(name, marks=EXHAUSTIVE) for name in PROGRAMS]
)
def test_training_is_exact(name, forks, spill_dir):
    assert_exact(forks, spill_dir, name)


@pytest.mark.parametrize("names", [MODELS[-1:], pytest.param(MODELS[:-1], marks=EXHAUSTIVE)], ids=["last", "others"])
def test_models_are_exact(names, forks, spill_dir):
    assert_exact(forks, spill_dir, *names)


# -- guards that are taken out; tests/storage/test_pretended.py has the others -----------------------------------------


@pytest.mark.parametrize(("mistake", "place"), [("host-mover", "copy_paths.py"), ("host-checksum", "checksum.py")])
def test_a_host_that_touches_memory_of_the_device_ends(mistake, place, forks, spill_dir):
    ended = child(forks, spill_dir, mistake)
    assert ended.returncode == -signal.SIGSEGV, ended.stderr
    thread = ended.stderr.partition("Current thread")[2].partition("Thread 0x")[0]
    assert place in thread, ended.stderr


def test_a_file_that_is_given_memory_of_the_device_fails(forks, spill_dir):
    ended = child(forks, spill_dir, "host-write")
    assert ended.returncode == 1
    assert "Bad address" in ended.stderr


def test_a_wait_that_is_left_out_is_seen(forks, spill_dir):
    faults = seen(child(forks, spill_dir, "no-wait-before-copies"))["faults"]
    assert any("uses memory before main has written it" in text for text in faults), set(faults)
