"""Where the bytes of a saved storage are.

::

    pack --> KEPT --> QUEUED --> WRITING --> LEAVING --> ON_DISK --> READING --> RELOADED
                         |          |           ^                                    |
                         '----.-----'           '---------- dropped again -----------'
                              v
                          TAKEN_BACK

Besides, LEAVING and ON_DISK lead to RELOADED where the memory is found alive, QUEUED leads back to KEPT where the tier
has no room, and READING back to ON_DISK where the read fails. From each of them FREED follows, when the lease dies.
"""

from __future__ import annotations

import enum

__all__ = [
    "AWAY",
    "FREED",
    "KEPT",
    "LEAVING",
    "ON_DISK",
    "QUEUED",
    "READING",
    "READY",
    "RELOADED",
    "TAKEN_BACK",
    "WRITING",
    "State",
]


class State(enum.Enum):
    """The accounting lock guards every change. Which tier has a copy follows from the state; see ``SavedStorage``."""

    KEPT = "kept"  # in memory, and never sent anywhere
    QUEUED = "queued"  # in memory, a write is queued
    WRITING = "writing"  # in memory, a worker writes it
    TAKEN_BACK = "taken back"  # in memory, and to stay: it was wanted before its write had ended, or that has failed
    LEAVING = "leaving"  # a tier has it, we hold no memory; it counts until the program holds it no more, either
    ON_DISK = "on disk"  # a tier has it, and nothing counts
    READING = "reading"  # a tier has it, a worker fills new memory
    RELOADED = "reloaded"  # a tier has it, and it is in memory once more
    FREED = "freed"  # the graph let go


# By themselves, since each saved storage meets them: Python 3.11 finds a member slowly through its class.
KEPT, QUEUED, WRITING, TAKEN_BACK, LEAVING, ON_DISK, READING, RELOADED, FREED = State
# Tuples: a set would call Python for the hash of an enum's member.
READY = (KEPT, TAKEN_BACK, RELOADED)
"""In memory, and it stays there."""
AWAY = (LEAVING, ON_DISK)
"""On a tier alone, as far as we are concerned."""
