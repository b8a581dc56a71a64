"""The memory that weights may stay in: how much is taken, and how much there is, on the host or on a device.

Who decides which weights wait is given a gauge, and knows no device. Weights that wait count as available wherever they
are: what they take to be used, they give back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_ssd.common.accelerators import accelerator_of
from lightning_ssd.memory.malloc import trim
from lightning_ssd.memory.readings import (
    anonymous_bytes,
    available_bytes,
    host_available_bytes,
    level_bytes,
)

__all__ = ["DeviceGauge", "Gauge"]

_CPU = torch.device("cpu")


class Gauge:
    """Memory of one process on the machine, or in the control group, read at the moment of each call.

    Args:
        num_sharing: processes of this run that share it.
    """

    device_type = "cpu"
    """Type of device of the tensors that lie in it."""

    def __init__(self, num_sharing: int = 1) -> None:
        self._num_sharing = num_sharing

    def count_out(self, passing_bytes: Callable[[], int]) -> None:
        """Never count as held the weights that wait, of which so many bytes are in memory to be used.

        Here they show files, and so are not held anyway.
        """

    def settle(self) -> None:
        """Give back what an allocator keeps unused, and would be read as held."""
        trim()

    def held_bytes(self) -> int:
        """Return what the process has taken: without weights that wait, and without memory that shows a file."""
        return anonymous_bytes()

    def fixed_bytes(self, shown_bytes: int) -> int:
        """Return what is resident besides, such as code.

        Args:
            shown_bytes: of weights that show a file, which are resident, too, and do not count.
        """
        return level_bytes(_CPU) - shown_bytes - anonymous_bytes()

    def available_bytes(self, cached_bytes: int) -> int | None:
        """Return the bytes that the process could still get; ``None``: unknown.

        Args:
            cached_bytes: of weights that wait in files, whose room in the page cache is there to be taken.
        """
        available = host_available_bytes(cached_bytes)
        return None if available is None else available // self._num_sharing


class DeviceGauge(Gauge):
    """Memory of a device, as the driver and PyTorch's allocator tell. What the allocator keeps is available.

    Args:
        device: it belongs to this process alone.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.device_type = device.type
        self._passing_bytes: Callable[[], int] = int

    def count_out(self, passing_bytes: Callable[[], int]) -> None:
        self._passing_bytes = passing_bytes

    def settle(self) -> None:
        """Do nothing, because the allocator tells what it keeps unused."""

    def held_bytes(self) -> int:
        return max(level_bytes(self._device) - self._passing_bytes(), 0)

    def fixed_bytes(self, shown_bytes: int) -> int:
        return 0

    def available_bytes(self, cached_bytes: int) -> int | None:
        accelerator = accelerator_of(self._device)
        # A capture may not be disturbed; an allocator without numbers would look as if it held nothing.
        if accelerator is not None and (accelerator.is_capturing() or not accelerator.memory_stats()):
            return None
        available = available_bytes(self._device)
        return None if available is None else available + self._passing_bytes()
