"""What happened, one record each, appended from any thread and drained once.

Times are seconds of ``time.perf_counter``. The log is bounded: when nobody drains it, the oldest events go and
are counted, so that a run without a monitor costs a fixed amount of memory.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

__all__ = ["Event", "EventLog", "PlacementEvent", "StallEvent", "TransferEvent"]

Direction = Literal["write", "read"]
Placement = Literal["keep", "host", "ssd", "recompute"]


@dataclass(frozen=True, slots=True)
class TransferEvent:
    """One finished move between memory and a tier."""

    direction: Direction
    nbytes: int
    queued_s: float
    start_s: float
    end_s: float
    tier: str = "ssd"
    urgent: bool = False
    failed: bool = False


@dataclass(frozen=True, slots=True)
class StallEvent:
    """The training thread waited for a transfer."""

    nbytes: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class PlacementEvent:
    """A decision for one saved storage."""

    placement: Placement
    nbytes: int
    reason: str
    time_s: float


Event = TransferEvent | StallEvent | PlacementEvent


class EventLog:
    """Bounded, append-only, drained once. Safe from any thread without a lock: ``deque`` operations are atomic."""

    def __init__(self, *, max_events: int = 65_536) -> None:
        self._events: deque[Event] = deque(maxlen=max_events)
        self._num_appended = 0
        self._num_drained = 0

    def append(self, event: Event) -> None:
        """Add one event; the oldest goes when the log is full."""
        self._events.append(event)
        self._num_appended += 1

    def drain(self) -> list[Event]:
        """Return what came since the last call, oldest first, and forget it."""
        drained: list[Event] = []
        try:
            while True:
                drained.append(self._events.popleft())
        except IndexError:
            self._num_drained += len(drained)
            return drained

    @property
    def num_dropped(self) -> int:
        """Events that nobody drained in time (approximate while other threads append)."""
        return max(0, self._num_appended - self._num_drained - len(self._events))
