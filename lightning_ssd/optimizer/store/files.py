"""The files of offloaded optimizer states: one tier over all directories."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch

from lightning_ssd.common.formatting import format_sizes
from lightning_ssd.common.interrupts import deferring_interrupts
from lightning_ssd.common.status_line import StatusLine
from lightning_ssd.memory.host_budget import BudgetShare
from lightning_ssd.tiers.host import HostTier
from lightning_ssd.tiers.ssd import SsdTier
from lightning_ssd.tiers.streams import CopyEngine

__all__ = ["StateFiles"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StateFiles:
    """The drives and the host memory that one optimizer uses."""

    tier: SsdTier
    """Its files hold all bytes that are written."""
    device: torch.device
    """Device on which states are updated."""
    copies: CopyEngine
    """Makes copies between that device and the host."""
    block_bytes: int
    """Unit of moves."""
    first: int
    """Subgroup that the first step begins with."""
    host: HostTier | None
    """A cache in host memory, if the device has memory of its own."""
    share: BudgetShare | None
    """Share of the budget of host memory for states that stay in memory, if the device has none of its own."""
    resources: ExitStack
    """Closes the tiers and their resources."""

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

    def close(self) -> None:
        """End moves and threads, and close the files. Idempotent."""
        self.resources.close()
