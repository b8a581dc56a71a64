"""The files of offloaded optimizer states: one tier over all directories."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from lightning_ssd.common.formatting import format_sizes
from lightning_ssd.common.interrupts import deferring_interrupts
from lightning_ssd.common.status_line import StatusLine
from lightning_ssd.memory.host_budget import BudgetShare
from lightning_ssd.tiers.base import Progress
from lightning_ssd.tiers.host import HostTier
from lightning_ssd.tiers.ssd import SsdTier
from lightning_ssd.tiers.streams import CopyEngine

__all__ = ["StateFiles"]


class StateFiles:
    """The drives and the host memory that one optimizer uses.

    Args:
        tier: its files hold all bytes that are written.
        device: device on which states are updated.
        copies: makes copies between that device and the host.
        block_bytes: unit of moves.
        first: subgroup that the first step begins with.
        host: a cache in host memory, if the device has memory of its own.
        share: share of the budget of host memory for states that stay in memory, if the device has none of its own.
        resources: closes the tiers and their resources.
    """

    def __init__(
        self,
        tier: SsdTier,
        *,
        device: torch.device,
        copies: CopyEngine,
        block_bytes: int,
        first: int = 0,
        host: HostTier | None = None,
        share: BudgetShare | None = None,
        resources: ExitStack,
    ) -> None:
        self.tier = tier
        self.device = device
        self.copies = copies
        self.block_bytes = block_bytes
        self.first = first
        self.host = host
        self.share = share
        self._resources = resources
        self._last: Progress | None = None

    def reserve(self, nbytes: int) -> None:
        """Reserve the space on the drives before the first step needs it.

        Args:
            nbytes: of the states, with their spare room.

        Raises:
            OutOfSpaceError: all directories together have no room. Earlier reservations stay, and no state is lost.
        """
        doing = f"Reserving {format_sizes(nbytes)[0]} of disk space for optimizer states"
        with StatusLine(doing, delay_s=0), deferring_interrupts():
            self.tier.reserve(nbytes, "optimizer states")

    def progress(self) -> Progress:
        """Return the counters of the drives."""
        return self._last or self.tier.progress()

    def close(self) -> None:
        """End moves and threads, and close the files. Idempotent."""
        self._last = self.progress()
        self._resources.close()
