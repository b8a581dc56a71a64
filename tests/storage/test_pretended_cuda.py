"""The current device of every thread, with two devices that are not there."""

from contextlib import nullcontext

import pytest
import torch

from lightning_ssd import Offloader
from tests.parity import models
from tests.support.helpers import Session, Training, assert_identical, outcome
from tests.support.opened import offloader_in
from tests.support.pretended_cuda import pretended_cuda

TRAINING = Training(models.Perceptrons, lambda step: {"x": models.floats(step, 16, 40)}, models.mean_square)


@pytest.fixture
def cuda():
    with pretended_cuda() as made:
        yield made


def copies_on(device):
    return Offloader()._environment(device, None).copies


def train_on(index, directory, cuda):
    device = torch.device("cuda", index)
    expected = outcome(TRAINING, Session())
    with cuda.entered(device):
        settings = {"activations": "offload", "min_tensor_bytes": 0, "host_memory": 0}
        with offloader_in(directory, **settings, _copies=copies_on(device)) as opened:
            assert_identical(outcome(TRAINING, Session(opened, drained=True)), expected)
            assert opened.stats.bytes_read > 0


@pytest.mark.parametrize("index", [0, 1])
def test_workers_use_the_device_that_is_trained_on(index, spill_dir, cuda):
    train_on(index, spill_dir, cuda)
    assert cuda.faults == []
    assert len(cuda.threads) > 1, "no worker has used the device"
    assert all(devices == {index} for devices in cuda.threads.values()), cuda.threads


def test_a_worker_that_stays_on_its_own_device_is_seen(spill_dir, cuda, monkeypatch):
    """On the first device nobody would notice; on the second one a context is set up where another process trains."""
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    train_on(1, spill_dir, cuda)
    assert any("a stream was made current of device 1 while 0 was current" in fault for fault in cuda.faults)
    assert any("an event was waited for of device 1 while 0 was current" in fault for fault in cuda.faults)
