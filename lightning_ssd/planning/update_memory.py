"""How much of optimizer states that wait on drives an update has in memory: a few subgroups of them at a time."""

from __future__ import annotations

__all__ = ["NUM_SLOTS", "subgroup_bytes", "update_bytes"]

NUM_SLOTS = 4
"""Subgroups in memory at a time, per directory: one is updated while others come and go. They are updated in order, so
that those of a fast directory wait in memory for one of a slow directory."""
_NUM_SUBGROUPS = 64
"""Also per directory, so that the same share of all is in memory."""
_MIN_SUBGROUP_BYTES, _MAX_SUBGROUP_BYTES = 4 << 20, 256 << 20
_MAX_SLOTS_BYTES = 2 << 30
"""Most bytes of the slots of all directories together."""


def subgroup_bytes(state_bytes: int, num_directories: int) -> int:
    """Return how large subgroups are that make up states of so many bytes, which go to so many directories."""
    most = min(_MAX_SUBGROUP_BYTES, _MAX_SLOTS_BYTES // (NUM_SLOTS * num_directories))
    return min(max(state_bytes // (_NUM_SUBGROUPS * num_directories), _MIN_SUBGROUP_BYTES), most)


def update_bytes(state_bytes: int, num_directories: int) -> int:
    """Return how much of these states is in memory during an update.

    Subgroups that cannot be as small as asked, since one tensor's states are not cut, take more.
    """
    return min(NUM_SLOTS * num_directories * subgroup_bytes(state_bytes, num_directories), state_bytes)
