"""Records of transfers and stalls, appended from any thread and drained once.

Times are seconds of ``time.perf_counter``. The log is bounded: when no caller drains it, the oldest events
go, so that a run without a monitor costs a fixed amount of memory.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

__all__ = ["Event", "EventLog", "StallEvent", "TransferEvent"]

Direction = Literal["write", "read"]


@dataclass(frozen=True, slots=True)
class TransferEvent:
    """One finished move between memory and a tier."""

    direction: Direction
    nbytes: int
    start_s: float
    end_s: float
    tier: str = "ssd"
    failed: bool = False
    drive: int | None = None
    """Number of the directory among those of its tier; ``None``: it has but one."""


@dataclass(frozen=True, slots=True)
class StallEvent:
    """The training thread waited for a transfer."""

    nbytes: int
    start_s: float
    end_s: float


Event = TransferEvent | StallEvent


class EventLog:
    """Bounded, append-only, drained once. Safe from any thread without a lock: ``deque`` operations are atomic."""

    def __init__(self, *, max_events: int = 65_536) -> None:
        self._events: deque[Event] = deque(maxlen=max_events)

    def append(self, event: Event) -> None:
        """Add one event; the oldest goes when the log is full."""
        self._events.append(event)

    def peek(self) -> list[Event]:
        """Return what :meth:`drain` would, and keep it."""
        return list(self._events)

    def drain(self) -> list[Event]:
        """Return what came since the last call, oldest first, and forget it."""
        drained: list[Event] = []
        try:
            while True:
                drained.append(self._events.popleft())
        except IndexError:
            return drained
