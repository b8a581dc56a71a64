"""Where an offloader works: the machine, the directories in it, and with whom both are shared."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from lightning_ssd.common.collectives import AllReduceMin
from lightning_ssd.common.validation import refuse_misread
from lightning_ssd.config import HardwareProfile
from lightning_ssd.errors import ConfigError
from lightning_ssd.memory.host_budget import HostMemoryBudget
from lightning_ssd.memory.readings import host_available_bytes
from lightning_ssd.storage.backend import Backend
from lightning_ssd.storage.drive_probe import Rates
from lightning_ssd.telemetry.events import EventLog
from lightning_ssd.tiers.streams import CopyEngine

__all__ = ["PATHS_VARIABLE", "Environment", "chosen_paths", "host_budget_for"]

PATHS_VARIABLE = "LIGHTNING_SSD_PATHS"
_HOST_SHARE = 4
"""One part in so many of the host's available memory is for the host tier of a device."""


def host_budget_for(device: torch.device, hardware: HardwareProfile, num_processes: int) -> HostMemoryBudget:
    """Measure the host memory that activations and optimizers take together.

    Args:
        device: of the tensors. "auto" is nothing for a CPU.
        hardware: says how much.
        num_processes: of this run on this machine.
    """
    nbytes = hardware.host_memory_nbytes
    if nbytes is None:
        available = host_available_bytes() or 0 if _is_discrete(device) else 0
        nbytes = available // (_HOST_SHARE * num_processes)
    return HostMemoryBudget(nbytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """For the tensors of one device."""

    hardware: HardwareProfile
    device: torch.device
    copies: CopyEngine
    """Between device and host."""
    events: EventLog
    """Where transfers and waiting are noted."""
    default_directory: str | os.PathLike[str] | None
    """Where the user has named none."""
    agree: AllReduceMin | None
    """With the other processes of the run; ``None``: there are none."""
    is_sharded: bool
    """Whether processes have shards of the model (FSDP2), or each has all of it (``DistributedDataParallel``)."""
    num_local_processes: int
    """Processes of this run on this machine."""
    local_rank: int
    """The number of this process among them."""
    host_budget: HostMemoryBudget
    """The budget of host memory, which all devices share."""
    wrap_backend: Callable[[Backend], Backend] | None

    @property
    def is_replicated(self) -> bool:
        """Whether other processes have the same model, and meet for its gradients."""
        return self.agree is not None and not self.is_sharded

    @property
    def paths(self) -> list[Path]:
        """The user's directories."""
        return chosen_paths(self.hardware, self.default_directory)

    @property
    def expected_rates(self) -> Rates:
        """Rates of all directories that the user expects, for one process that shares them; 0: unknown."""
        share = len(self.paths) / self.num_local_processes
        write, read = self.hardware.rates
        return Rates(share * (write or 0), share * (read or 0))

    @property
    def is_discrete(self) -> bool:
        """Whether what waits in the host's memory has left the device's."""
        return _is_discrete(self.device)


def chosen_paths(hardware: HardwareProfile, default_directory: str | os.PathLike[str] | None) -> list[Path]:
    """The user's directories: from the profile, else the environment, else the default."""
    paths: Sequence[str | os.PathLike[str]] = tuple(cast(Sequence[str], hardware.paths))
    if not paths:
        paths = [path for path in os.environ.get(PATHS_VARIABLE, "").split(os.pathsep) if path]
        refuse_misread(f"${PATHS_VARIABLE}", paths, "directories separated by ':'")
    paths = paths or [default_directory or tempfile.gettempdir()]
    try:
        return [Path(path).expanduser().absolute() for path in paths]
    except (RuntimeError, OSError) as error:  # an unknown ~user; a working directory that has been removed
        raise ConfigError(
            f"directories {[os.fspath(path) for path in paths]} lead nowhere: {error}. Write paths that begin with /"
        ) from error


def _is_discrete(device: torch.device) -> bool:
    return device.type != "cpu"
