"""The files that optimizer states wait in: one tier per directory, and how fast each has turned out to be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

from lightning_ssd.slots import SlotMover
from lightning_ssd.storage.probe import Rates
from lightning_ssd.storage.streams import Mark
from lightning_ssd.storage.tiers import Progress, SsdTier
from lightning_ssd.tier_meter import TierMeter

__all__ = ["StateFiles"]


class StateFiles:
    """What one optimizer needs of the machine.

    Args:
        tiers: one per directory; all move bytes by ``mover``.
        mover: puts what is read into chosen memory.
        probes: measure the directories, where there are several.
        device: where states are updated.
        mark: a point in the device's work that writes begin behind.
        block_bytes: granularity of what moves.
        resources: closes the tiers and what they stand on.
    """

    def __init__(
        self,
        tiers: Sequence[SsdTier],
        mover: SlotMover,
        probes: Sequence[Callable[[], Rates]],
        *,
        device: torch.device,
        mark: Callable[[], Mark | None],
        block_bytes: int,
        resources: ExitStack,
    ) -> None:
        self.tiers = tuple(tiers)
        self.mover = mover
        self.device = device
        self.mark = mark
        self.block_bytes = block_bytes
        self._meters = [TierMeter(tier, probe) for tier, probe in zip(tiers, probes, strict=True)]
        self._resources = resources
        self._last: list[Progress] | None = None

    def rates(self) -> list[tuple[float, float]]:
        """Write and read rate of each directory in bytes per second; one alone need not be measured."""
        if len(self.tiers) == 1:
            return [(1.0, 1.0)]
        found = [meter.machine().ssd for meter in self._meters]
        return [(0.0, 0.0) if rates is None else (rates.write_bytes_per_s, rates.read_bytes_per_s) for rates in found]

    def progress(self) -> list[Progress]:
        """Of each directory."""
        return self._last or [tier.progress() for tier in self.tiers]

    def close(self) -> None:
        """End moves and threads, and close the files. Idempotent."""
        self._last = self.progress()
        self._resources.close()
