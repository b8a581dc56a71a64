"""The events of a pass in order, ready to be played many times; and groups of storages, to keep a search short."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_ssd.planning.trace import Trace, TracedStorage

__all__ = ["FREE", "LATE_FREE", "PACK", "RELEASE", "UNPACK", "Lifetimes", "Units"]


# Events of a storage. At one and the same time, lower ones come first. Plain integers, because they are compared a
# million times.
FREE, RELEASE, PACK, UNPACK, LATE_FREE = range(5)
# RELEASE: its last use outside of autograd is over.
# LATE_FREE: freed at the very moment in which it was packed or wanted.


class Lifetimes:
    """A trace as one list of events, sorted by the stall-free clock.

    Raises:
        ValueError: the trace's ``order`` does not name exactly those storages that are wanted back, each once.
    """

    __slots__ = ("end_s", "events", "is_released", "is_simple", "moved_bytes", "order", "position", "sizes")

    def __init__(self, trace: Trace) -> None:
        storages = trace.storages
        wanted = [i for i, s in enumerate(storages) if s.wanted_s is not None]
        if sorted(trace.order) != wanted:
            raise ValueError(
                f"Trace.order={trace.order!r}; give the indices of the {len(wanted)} storages with a wanted_s, "
                "each once, in the order of first unpack"
            )
        self.end_s, self.moved_bytes = trace.end_s, trace.moved_bytes
        self.sizes = [s.nbytes for s in storages]
        self.order = list(trace.order)
        self.position = [-1] * len(storages)
        for position, index in enumerate(trace.order):
            self.position[index] = position
        # Autograd alone holds it from the very moment in which it is packed.
        self.is_released = [s.last_used_s <= s.packed_s for s in storages]
        self.events = self._events(storages)
        kinds = [kind for _, kind, _ in self.events]
        turn = kinds.index(UNPACK) if UNPACK in kinds else len(kinds)
        # Nothing is saved any more once backward has begun: not so where it recomputes, or where a pass has several.
        self.is_simple = PACK not in kinds[turn:]

    def _events(self, storages: Sequence[TracedStorage]) -> list[tuple[float, int, int]]:
        """(time, kind, index), sorted."""
        events = []
        for i, s in enumerate(storages):
            last = max(s.packed_s, s.packed_s if s.wanted_s is None else s.wanted_s)
            events.append((s.packed_s, PACK, i, i))
            if s.wanted_s is not None:
                events.append((max(s.wanted_s, s.packed_s), UNPACK, self.position[i], i))
            if s.packed_s < s.last_used_s < s.freed_s:
                events.append((s.last_used_s, RELEASE, i, i))
            events.append((max(s.freed_s, last), FREE if s.freed_s > last else LATE_FREE, i, i))
        events.sort()
        return [(time, kind, index) for time, kind, _, index in events]


@dataclass(frozen=True, slots=True)
class Units:
    """Storages in groups that are decided about together."""

    trace: Trace
    """Each group as one storage, which lives as long as any of them and is wanted as soon as any of them."""
    members: tuple[tuple[int, ...], ...]
    """Indices of the storages in each group."""

    @staticmethod
    def of(trace: Trace, *, max_units: int) -> Units:
        """Group storages that are neighbours in pack order, where there are more than ``max_units``.

        A group holds only storages of one sort: movable or not, wanted or not, held by others until forward is over or
        not. The last are autocast's copies of weights, one beside nearly every activation: what they are merged with
        could not leave before they can. There may be a few more than ``max_units`` groups.
        """
        storages = trace.storages
        if len(storages) <= max_units:
            return Units(trace, tuple((i,) for i in range(len(storages))))
        # By bytes, so that a group weighs little; and by number, so that many small ones do not live for ever as one.
        share = 2 * sum(s.nbytes for s in storages) / max_units
        count = -(-8 * len(storages) // max_units)
        groups: list[list[int]] = []
        open_groups: dict[tuple[bool, bool, bool], list[int]] = {}
        held: dict[tuple[bool, bool, bool], int] = {}
        for i, s in enumerate(storages):
            sort = (s.movable, s.wanted_s is None, s.last_used_s >= trace.forward_end_s)
            group = open_groups.get(sort)
            if group is None or held[sort] + s.nbytes > share or len(group) >= count:
                group = open_groups[sort] = []
                groups.append(group)
                held[sort] = 0
            group.append(i)
            held[sort] += s.nbytes
        merged = sorted(((_merged([storages[i] for i in g]), tuple(g)) for g in groups), key=lambda m: m[0].packed_s)
        united = tuple(storage for storage, _ in merged)
        wants = sorted((s.wanted_s, i) for i, s in enumerate(united) if s.wanted_s is not None)
        return Units(
            replace(trace, storages=united, order=tuple(i for _, i in wants)), tuple(members for _, members in merged)
        )


def _merged(storages: Sequence[TracedStorage]) -> TracedStorage:
    wants = [s.wanted_s for s in storages if s.wanted_s is not None]
    return TracedStorage(
        nbytes=sum(s.nbytes for s in storages),
        packed_s=min(s.packed_s for s in storages),
        last_used_s=max(s.last_used_s for s in storages),
        wanted_s=min(wants) if wants else None,
        freed_s=max(s.freed_s for s in storages),
        block=storages[0].block,
        movable=storages[0].movable,
    )
