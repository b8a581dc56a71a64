"""Which weights stay in memory, where only as many wait on a drive as memory lacks. Numbers only.

What is assumed:

* A unit that waits is read for each of its uses. Its read begins when the unit that waits before it is used, and so has
  the compute of the units that stay in between to hide behind. Hence units that wait are spread evenly.
* Units take time in proportion to nothing that is known here: they are counted, not weighed, when they are spread. The
  blocks of a model are equal, and most of it.
* Backward visits the units in the reverse order, for which an even spread is even, too.
* A frozen unit costs reads alone; a trained one is written after each update as well. So no trained unit waits while a
  frozen one stays.
* As soon as one waits, two may be in memory to be used: the present one and the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["MemoryOutlook", "ResidencyUnit", "choose_residents", "window_bytes"]

_USABLE_SHARE = 0.9
"""Share of all memory that plans may use: allocators waste some, and other processes grow."""
_UNKNOWN_SHARE = 0.5
"""Share of what is left, for saved activations and temporaries of which nothing is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResidencyUnit:
    """Weights that wait or stay together."""

    weight_bytes: int
    gradient_bytes: int = 0
    """Bytes of gradients that wait if the weights do, and stay if they stay; 0 for those that do either anyway."""
    is_trained: bool = False

    @property
    def nbytes(self) -> int:
        """Memory that it takes if it stays."""
        return self.weight_bytes + self.gradient_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryOutlook:
    """The memory of one process, and what needs it besides weights that may wait."""

    held_bytes: int
    """Taken by the process, without memory that shows a file."""
    available_bytes: int | None
    """Bytes that it could still get; ``None``: unknown."""
    budget_bytes: int | None = None
    """Bytes that the user lets it take, without memory that shows a file; ``None``: as much as there is."""
    weight_bytes: int = 0
    """Bytes of weights that may wait, of those held."""
    coming_bytes: int = 0
    """Gradients and optimizer states that will be held, and are not yet."""
    activation_bytes: int | None = None
    """Bytes that saved activations may take; ``None``: unknown."""

    @property
    def usable_bytes(self) -> int | None:
        """Bytes that the process may take in all; ``None``: unknown."""
        there = None if self.available_bytes is None else int(_USABLE_SHARE * (self.held_bytes + self.available_bytes))
        known = [nbytes for nbytes in (there, self.budget_bytes) if nbytes is not None]
        return min(known, default=None)

    @property
    def room_bytes(self) -> int | None:
        """For weights that may wait, and what stays with them; ``None``: unknown."""
        usable = self.usable_bytes
        if usable is None:
            return None
        others = max(self.held_bytes - self.weight_bytes, 0)  # weights that were never touched are not held
        left = max(usable - others - self.coming_bytes, 0)
        activations = int(_UNKNOWN_SHARE * left) if self.activation_bytes is None else self.activation_bytes
        return max(left - activations, 0)

    @property
    def is_short(self) -> bool:
        """Whether more is held than weights may be left to hold before it is known what else will be needed."""
        usable = self.usable_bytes
        return usable is None or self.held_bytes > (1 - _UNKNOWN_SHARE) * usable


def window_bytes(units: Iterable[tuple[int, bool]]) -> int:
    """Return what a process has in memory at a time of units that wait, at most: the present one, and the next.

    Args:
        units: of each its size, and whether it comes to memory before its use begins (else to the page cache).
    """
    present = sorted(units, reverse=True)
    ahead = next((unit for unit in present if unit[1]), None)
    if ahead is not None:
        present.remove(ahead)
    return (present[0][0] if present else 0) + (0 if ahead is None else ahead[0])


def choose_residents(
    units: Sequence[ResidencyUnit], *, room_bytes: int | None, in_flight_bytes: int
) -> tuple[bool, ...]:
    """For each unit, whether it stays in memory.

    All stay where there is room for all. Else the frozen ones wait first, and of these (then of the trained ones) the
    fewest whose even spread frees enough. With more room never less stays, in bytes. What stays never takes more than
    the room, less what is in flight; where that is more than the room, nothing stays.

    Args:
        units: in the order of their use.
        room_bytes: memory for all of them; ``None``: unknown, nothing stays.
        in_flight_bytes: what units take that wait and are in memory to be used.
    """
    if room_bytes is None:
        return (False,) * len(units)
    total = sum(unit.nbytes for unit in units)
    if total <= room_bytes:
        return (True,) * len(units)
    stays = [True] * len(units)
    lacking = total - (room_bytes - in_flight_bytes)
    for is_trained in (False, True):
        kind = [index for index, unit in enumerate(units) if unit.is_trained is is_trained]
        for place in _spread([units[index].nbytes for index in kind], lacking):
            stays[kind[place]] = False
        lacking -= sum(units[index].nbytes for index in kind if not stays[index])
    return tuple(stays)


def _spread(sizes: Sequence[int], lacking_bytes: int) -> Sequence[int]:
    """The fewest places, evenly spread, that together have what is lacking; all if they have not."""
    fewest = max(-(-lacking_bytes // max(sizes, default=1)), 0)
    for number in range(fewest, len(sizes)):
        places = [(2 * one + 1) * len(sizes) // (2 * number) for one in range(number)]
        if sum(sizes[place] for place in places) >= lacking_bytes:
            return places
    return range(len(sizes))
