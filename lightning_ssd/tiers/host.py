"""The host tier: bounded host memory that takes what the drives cannot take in time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_ssd.common.interrupts import deferring_interrupts
from lightning_ssd.memory.host_budget import HostMemoryBudget
from lightning_ssd.storage.backend import DEFAULT_CHUNK_BYTES, DEFAULT_WORKERS
from lightning_ssd.storage.extents import Extent
from lightning_ssd.telemetry.events import EventLog
from lightning_ssd.tiers.base import Part
from lightning_ssd.tiers.checksum import Sampler
from lightning_ssd.tiers.copy_paths import ArenaMover
from lightning_ssd.tiers.host_arena import HostArena
from lightning_ssd.tiers.streams import CopyEngine
from lightning_ssd.tiers.tier import Tier

__all__ = ["HostTier"]

_DEVICE_CHUNK_BYTES = 64 << 20
"""A bus moves so much in about a millisecond, and each copy takes Python a part of that."""


class HostTier(Tier):
    """Host memory: locked for a CUDA device and reached by streams of our own, plain where there is none.

    A write claims its extent when it is submitted, so that the caller knows at once whether there is room. A write that
    its owner took back keeps its extent until a worker gets to it.

    Locking takes longer than many a step. Memory for activations is locked ahead, and what has not been locked yet is
    no room: no write waits for it, and no plan counts on it.

    There are no checksums here (``verify``): this is memory, as that of the tensors which are kept.

    Args:
        room: most memory to take, in bytes; or a budget that others take from, too. It is taken as it is needed and
            given back at :meth:`close`.
        copies: between the device and the host.
        pin: lock the memory for CUDA; each part once, when it is first used.
        ahead: or in a thread of its own, for this device, when :meth:`lock_ahead` asks; there is no other memory then.
        events: gets one event per move.
        chunk_bytes: largest single copy, so that urgent reads can overtake others there; default: what takes a few
            milliseconds at most.
        num_workers: workers per direction.

    Raises:
        MemoryError: the process may not have that many addresses.
    """

    name = "host"

    def __init__(
        self,
        room: int | HostMemoryBudget,
        copies: CopyEngine,
        *,
        pin: bool,
        ahead: torch.device | None = None,
        events: EventLog,
        chunk_bytes: int | None = None,
        num_workers: int = DEFAULT_WORKERS,
    ) -> None:
        self.copies = copies
        self.arena = HostArena(room, pin=pin, ahead=ahead)
        super().__init__(
            ArenaMover(self.arena, copies),
            [self.arena],
            events=events,
            sampler=Sampler("off"),
            chunk_bytes=chunk_bytes or (_DEVICE_CHUNK_BYTES if copies.is_asynchronous else DEFAULT_CHUNK_BYTES),
            num_workers=num_workers,
        )

    @property
    def capacity_bytes(self) -> int:
        """Most memory that it may have, or ahead what is locked. Falls as others take from its budget, and where the
        system gives no more.
        """
        return self.arena.capacity_bytes

    def lock_ahead(self, nbytes: int) -> None:
        """Have at least so much memory, if it is locked ahead; see :meth:`HostArena.lock_ahead`."""
        self.arena.lock_ahead(nbytes)

    @property
    def memory_bytes(self) -> int:
        """Memory that it has taken."""
        return self.arena.size_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes that are stored or reserved."""
        return self.arena.used_bytes

    def claim_all(self, sizes: Sequence[int], claimed: list[list[Part] | None]) -> None:
        with deferring_interrupts():
            for nbytes in sizes:
                extent = self.arena.allocate(nbytes)
                claimed.append(None if extent is None else [Part(0, nbytes, 0, extent)])

    @property
    def uncut_bytes(self) -> int:
        return 0

    def cut(self, start: int, nbytes: int, extent: Extent | None = None) -> list[tuple[int, int]]:
        if extent is None:
            return super().cut(start, nbytes)
        return [(begin, length) for begin, _, length in self.arena.pieces(extent, nbytes, self._chunk_bytes)]
