"""What a scheduler learns from: a pass whose backward is over."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from lightning_ssd.scheduling.clock import Clock, Stamp
from lightning_ssd.scheduling.plan_cursor import PlanCursor
from lightning_ssd.scheduling.recorder import Recorder

__all__ = ["FinishedPass", "PlainPass"]


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
    peak_bytes: int
    """Resident saved activations at the worst moment."""
    written_bytes: int
    read_bytes: int
    highest_bytes: int = 0
    """All memory in use at the worst moment; 0 where nobody asks, or something before the pass had as much."""


class PlainPass(NamedTuple):
    """A pass whose backward is over, and that ran without hooks: all that is known is that it kept everything."""

    signature: Hashable
    clock: Clock
    begin: Stamp
    end: Stamp
    is_timed: bool
    """It alone ran between its begin and its end."""
