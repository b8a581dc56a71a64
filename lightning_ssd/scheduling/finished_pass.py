"""The lesson of a scheduler: a pass whose backward is over."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from lightning_ssd.scheduling.clock import Clock, Stamp
from lightning_ssd.scheduling.overhead import Overhead
from lightning_ssd.scheduling.plan_cursor import PlanCursor
from lightning_ssd.scheduling.recorder import Recorder
from lightning_ssd.scheduling.stalls import stall_seconds

__all__ = ["FinishedPass"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedPass:
    """A pass whose backward is over."""

    signature: Hashable
    sizes: tuple[int, ...]
    cursor: PlanCursor
    recorder: Recorder | None
    refused: frozenset[str] = frozenset()
    """Names of blocks that cannot be recomputed exactly."""
    clock: Clock
    begin: Stamp
    end: Stamp
    level_bytes: int
    """All memory in use when it began, but saved tensors."""
    stalls: tuple[tuple[Stamp, Stamp], ...]
    """Begin and end of each wait for a transfer."""
    hook_s: float = 0.0
    """Time of the training thread inside the hooks, without these waits; with what recording took."""
    cpu_s: float = 0.0
    """That workers and page faults took from the computation meanwhile."""
    peak_bytes: int
    """Resident saved activations at the worst moment."""
    written_bytes: int
    read_bytes: int
    moved_bytes: int = 0
    """That went to a drive or to host memory."""
    highest_bytes: int = 0
    """All memory in use at the worst moment; 0 where no limit asks for it, or an earlier pass had as much."""

    def overhead(self) -> Overhead:
        """Return what moving took from the pass, by cause. What recording it took is none of it."""
        stall_s = sum(stall_seconds(self.clock, begin, end) for begin, end in self.stalls)
        hook_s = self.hook_s if self.recorder is None else self.recorder.hook_s(self.end)
        return Overhead(stall_s=stall_s, hook_s=hook_s, cpu_s=self.cpu_s)
