"""The files of offloaded optimizer states: one tier per directory, with measured rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

import torch

from lightning_ssd.common.formatting import format_sizes
from lightning_ssd.common.interrupts import deferring_interrupts
from lightning_ssd.common.status_line import StatusLine
from lightning_ssd.errors import OutOfSpaceError
from lightning_ssd.memory.host_budget import BudgetShare
from lightning_ssd.storage.drive_probe import Rates
from lightning_ssd.tiers.bandwidth_meter import BandwidthMeter
from lightning_ssd.tiers.base import Progress
from lightning_ssd.tiers.host import HostTier
from lightning_ssd.tiers.ssd import SsdTier
from lightning_ssd.tiers.streams import CopyEngine

__all__ = ["StateFiles"]


class StateFiles:
    """The drives and the host memory that one optimizer uses.

    Args:
        tiers: one per directory; their files hold all bytes that are written.
        probes: measure the rates of the directories, if there are several.
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
        tiers: Sequence[SsdTier],
        probes: Sequence[Callable[[], Rates]],
        *,
        device: torch.device,
        copies: CopyEngine,
        block_bytes: int,
        first: int = 0,
        host: HostTier | None = None,
        share: BudgetShare | None = None,
        resources: ExitStack,
    ) -> None:
        self.tiers = tuple(tiers)
        self.device = device
        self.copies = copies
        self.block_bytes = block_bytes
        self.first = first
        self.host = host
        self.share = share
        self._meters = [BandwidthMeter(tier, probe) for tier, probe in zip(tiers, probes, strict=True)]
        self._resources = resources
        self._last: list[Progress] | None = None

    def rates(self) -> list[tuple[float, float]]:
        """Return the write and read rate of each directory in bytes per second. A single one is not measured."""
        if len(self.tiers) == 1:
            return [(1.0, 1.0)]
        found = [meter.machine().ssd for meter in self._meters]
        return [(0.0, 0.0) if rates is None else (rates.write_bytes_per_s, rates.read_bytes_per_s) for rates in found]

    def reserve(self, needs: Sequence[int]) -> None:
        """Reserve the space on the drives before the first step needs it.

        If one directory has too little room, the rest is reserved in the others, which get the writes that it refuses.

        Args:
            needs: bytes in each directory.

        Raises:
            OutOfSpaceError: all directories together have no room. Earlier reservations stay, and no state is lost.
        """
        doing = f"Reserving {format_sizes(sum(needs))[0]} of disk space for optimizer states"
        with StatusLine(doing, delay_s=0), deferring_interrupts():
            self._reserve(needs)

    def _reserve(self, needs: Sequence[int]) -> None:
        missing, first = 0, None
        for tier, need in zip(self.tiers, needs, strict=True):
            try:
                tier.reserve(need)
            except OutOfSpaceError as error:
                missing += need - tier.disk_bytes
                first = first or error
        for tier in self.tiers:
            if missing == 0:
                return
            with suppress(OutOfSpaceError):
                tier.reserve(tier.disk_bytes + missing)
                missing = 0
        if missing and first is not None:
            raise OutOfSpaceError(
                first.errno, f"optimizer states need {sum(needs):,} bytes; {missing:,} of them have no place: {first}"
            ) from first

    def progress(self) -> list[Progress]:
        """Return the counters of each directory."""
        return self._last or [tier.progress() for tier in self.tiers]

    def close(self) -> None:
        """End moves and threads, and close the files. Idempotent."""
        self._last = self.progress()
        self._resources.close()
