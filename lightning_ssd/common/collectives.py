"""Let the processes of a run agree on values, and count the collectives that they have begun."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

__all__ = ["AllReduceMin", "MeetingCount", "have_same"]

AllReduceMin = Callable[[Sequence[float]], list[float]]
"""The smallest of each number over all processes. Every process calls it at the same point, and waits for the others.
"""


def have_same(names: Iterable[str], agree: AllReduceMin) -> bool:
    """Return whether all processes have the same names. Every process gets the same answer."""
    digest = zlib.crc32("\n".join(sorted(names)).encode())
    smallest, negative_largest = agree([digest, -digest])
    return smallest == -negative_largest


class MeetingCount:
    """Tells whether this process has begun a collective with others since this was made."""

    def __init__(self) -> None:
        self._before = _num_collectives()

    @property
    def has_grown(self) -> bool:
        """Whether a collective has begun. ``True`` if unknown, because some backends do not count them."""
        now = _num_collectives()
        return now is None or now != self._before


def _num_collectives() -> int | None:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0
    groups: Iterable[Any] = torch.distributed.distributed_c10d._world.pg_map  # the number is in no stub
    try:
        return sum(int(group._get_sequence_number_for_group()) for group in groups if group.size() > 1)
    except RuntimeError:  # of backends that have no such number
        return None
