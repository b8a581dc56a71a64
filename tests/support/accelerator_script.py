"""Give PyTorch an accelerator that is written in Python, and look at what this package makes of it.

It is known to ``torch.accelerator`` and has streams and events that nobody can wait for, but neither memory nor
operators. A process has one such device for good, so that this runs in one of its own.
"""

import re
import sys

import pytest
import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.common.accelerators import (
    Accelerator,
    CudaAccelerator,
    accelerator_of,
    current_device,
    device_types,
    has_streams,
    is_capturing,
    what_is_missing,
    with_index,
)
from lightning_ssd.errors import ConfigError
from lightning_ssd.memory.readings import available_bytes, level_bytes, read_memory, reset_device_peak
from lightning_ssd.scheduling.clock import HostClock, clock_of
from lightning_ssd.strategies.batch_signature import signature_of
from tests.parity.models import perceptrons
from tests.support.helpers import DRAINED, assert_parity

_setup_privateuseone_for_python_backend("bare")  # PyTorch parses the name from here on
DEVICE = torch.device("bare", 0)


def look(directory):
    assert device_types() == ("cpu", "cuda", "bare")
    assert isinstance(accelerator_of(DEVICE), Accelerator)
    assert isinstance(accelerator_of(torch.device("cuda", 0)), CudaAccelerator)
    assert current_device() == DEVICE == with_index(torch.device("bare"))
    torch.accelerator.set_device_index(DEVICE)
    assert not is_capturing()
    assert (level_bytes(DEVICE), available_bytes(DEVICE)) == (0, None)
    assert (read_memory(DEVICE).device_bytes, read_memory(DEVICE).device_peak_bytes) == (None, None)
    assert not reset_device_peak(DEVICE)
    signature_of((), torch.nn.Linear(1, 1))
    use_streams(Accelerator(DEVICE))
    be_refused(directory)
    train_on_the_cpu(directory)


def use_streams(accelerator):
    with accelerator.as_current():
        stream = accelerator.new_stream()
        assert type(stream) is type(accelerator.current_stream()) is torch.Stream
        assert stream.device == DEVICE
        with accelerator.using(stream):
            event = accelerator.event()
            event.record(stream)
        accelerator.current_stream().wait_event(event)
    accelerator.empty_cache()


def be_refused(directory):
    missing = what_is_missing(DEVICE)
    assert missing.startswith("a trial of it failed (Could not run 'aten::empty"), missing
    assert not has_streams(DEVICE)
    assert isinstance(clock_of(DEVICE), HostClock)
    said = f"device='bare:0': nothing would be moved from there, because {missing}. Use another device ('cpu', 'cuda')"
    policy = OffloadPolicy(activations="offload")
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}"):
        Offloader(policy, hardware=HardwareProfile(paths=directory), device="bare").open()


def train_on_the_cpu(directory):
    """As if the accelerator were not there."""
    assert_parity(perceptrons(), directory, setups=[DRAINED])


if __name__ == "__main__":
    look(sys.argv[1])
