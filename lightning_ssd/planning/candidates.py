"""The plans that the planner chooses from: a family that depends on the trace alone, not on rates or budgets.

Storages are ranked by relieved time: how long each could be out. That is TERAIO's benefit / cost (arXiv 2506.06472,
section on tensor migration planning: relieved bytes x time, by transfer time): bytes and rate are the same on both
sides, so that the ranking holds for every machine. A candidate moves the best so many of them, or, for a slow drive,
only a part of these, spread evenly: what backward wants within a short time would have to be read long before, and
hold its memory while memory is at its peak. It gives those that have the least time to the host tier (which is the
faster one) and the others to the SSD tier, looks ahead through one of several windows, and recomputes a run of blocks:
earlier ones have the time to go to a drive and back, later ones have not. The last block gains nothing but the memory
that what follows it needs, so that it is recomputed last.

That the family is fixed is what makes the choice monotone: see ``bound.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_ssd.planning.lifetimes import Lifetimes, Units
from lightning_ssd.planning.placement import Placement
from lightning_ssd.planning.plan import Machine, PlanObjective, TierRates
from lightning_ssd.planning.recompute_trace import recomputable, recomputed
from lightning_ssd.planning.trace import Trace, TracedStorage

__all__ = ["Candidate", "RecomputeVariant", "family", "usable", "variants", "windows"]

_MAX_UNITS = 200
_MAX_STEPS = 32
_MAX_VARIANTS = 10
_HOST_SHARES = (0.0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
_DENSITIES = (1 / 2, 1 / 4, 1 / 8, 1 / 16)
_SPREAD_STEPS = 4


class RecomputeVariant:
    """The pass with certain blocks recomputed."""

    def __init__(self, trace: Trace, blocks: frozenset[int]) -> None:
        self.blocks = blocks
        self.trace, self.old = recomputed(trace, blocks)
        self.lives = Lifetimes(self.trace)
        self.units = Units.of(self.trace, max_units=_MAX_UNITS)
        self.unit_lives = Lifetimes(self.units.trace)
        self.ranking = _ranking(self.units.trace.storages)

    def expand(self, unit_placements: Sequence[Placement]) -> tuple[Placement, ...]:
        """Placements of units as those of storages."""
        placements = [Placement.KEEP] * len(self.trace.storages)
        for members, placement in zip(self.units.members, unit_placements, strict=True):
            for index in members:
                placements[index] = placement
        return tuple(placements)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to place the units of a variant."""

    variant: RecomputeVariant
    placements: tuple[Placement, ...]
    """One per unit."""
    ssd_bytes: int
    host_bytes: int
    windows: tuple[int, ...]
    """Bytes to look ahead that are worth a try, rising."""

    @property
    def moved_bytes(self) -> int:
        """To whatever tier."""
        return self.ssd_bytes + self.host_bytes


def usable(machine: Machine) -> Machine:
    """Without the tiers whose rates are unknown."""

    def known(rates: TierRates | None) -> TierRates | None:
        return rates if rates and rates.write_bytes_per_s > 0 and rates.read_bytes_per_s > 0 else None

    return replace(machine, ssd=known(machine.ssd), host=known(machine.host))


def variants(trace: Trace, goal: PlanObjective) -> list[RecomputeVariant]:
    """Nothing recomputed, then more and more blocks."""
    blocks = recomputable(trace) if goal.recompute else ()
    last = len(blocks) - 1
    runs = [frozenset[int]()]
    for step in range(1, _MAX_VARIANTS):
        runs.append(frozenset(blocks[last - round(max(last, 0) * step / (_MAX_VARIANTS - 1)) : max(last, 0)]))
    runs.append(frozenset(blocks))
    return [RecomputeVariant(trace, run) for run in dict.fromkeys(runs)]


def windows(sizes: Sequence[int]) -> tuple[int, ...]:
    """Windows for moved storages of these sizes: the largest, two of it (below that little overlaps), and up to all."""
    if not sizes:
        return (0, 0)
    steps, total = [max(sizes), 2 * max(sizes)], sum(sizes)
    while steps[-1] < total:
        steps.append(min(2 * steps[-1], total))
    return tuple(steps)


def family(variant: RecomputeVariant, machine: Machine, goal: PlanObjective) -> Iterator[Candidate]:
    """The candidates of a variant that the tiers and the goal have room for; keeping all is the first."""
    storages = variant.units.trace.storages
    total = sum(storages[i].nbytes for i in variant.ranking)
    seen = set()
    for moved in _moves(variant):
        for share in _HOST_SHARES:
            candidate = _candidate(variant, moved, share * total)
            if candidate.placements not in seen and _has_room(candidate, machine, goal):
                seen.add(candidate.placements)
                yield candidate


def _moves(variant: RecomputeVariant) -> Iterator[tuple[int, ...]]:
    """Which units to move, best first."""
    sizes = [s.nbytes for s in variant.units.trace.storages]
    for count in _counts([sizes[i] for i in variant.ranking], _MAX_STEPS):
        yield variant.ranking[:count]
    for count in _counts([sizes[i] for i in variant.ranking], _SPREAD_STEPS):
        for density in _DENSITIES:
            yield _spread(variant.ranking[:count], sizes, density)


def _spread(ranked: Sequence[int], sizes: Sequence[int], density: float) -> tuple[int, ...]:
    """So large a part of the bytes, evenly over the pack order."""
    chosen, due = set(), 0.0
    for index in sorted(ranked):
        due += density * sizes[index]
        if due >= sizes[index]:
            due -= sizes[index]
            chosen.add(index)
    return tuple(index for index in ranked if index in chosen)


def _candidate(variant: RecomputeVariant, moved: Sequence[int], max_host_bytes: float) -> Candidate:
    storages = variant.units.trace.storages
    placements = [Placement.KEEP] * len(storages)
    ssd_bytes = host_bytes = 0
    for index in reversed(moved):
        nbytes = storages[index].nbytes
        if not ssd_bytes and host_bytes + nbytes <= max_host_bytes:
            placements[index] = Placement.HOST
            host_bytes += nbytes
        else:
            placements[index] = Placement.SSD
            ssd_bytes += nbytes
    return Candidate(variant, tuple(placements), ssd_bytes, host_bytes, windows([storages[i].nbytes for i in moved]))


def _has_room(candidate: Candidate, machine: Machine, goal: PlanObjective) -> bool:
    """All that is moved counts, although the first may be free again before the last comes: pessimistic and simple."""
    if goal.written_bytes is not None and candidate.ssd_bytes > goal.written_bytes:
        return False
    return _fits(candidate.ssd_bytes, machine.ssd) and _fits(candidate.host_bytes, machine.host)


def _fits(nbytes: int, rates: TierRates | None) -> bool:
    if rates is None:
        return not nbytes
    return rates.capacity_bytes is None or nbytes <= rates.capacity_bytes


def _ranking(storages: Sequence[TracedStorage]) -> tuple[int, ...]:
    """Those that can be out, best first; such that are never wanted back last: they delay no other."""

    def relieved_s(storage: TracedStorage) -> float:
        return (storage.freed_s if storage.wanted_s is None else storage.wanted_s) - storage.last_used_s

    movable = [i for i, s in enumerate(storages) if s.movable and s.nbytes and relieved_s(s) > 0]
    return tuple(sorted(movable, key=lambda i: (storages[i].wanted_s is None, -relieved_s(storages[i]), i)))


def _counts(sizes: Sequence[int], num_steps: int) -> list[int]:
    """How many of the ranking to move: every number, or where there are many, in steps of equal bytes."""
    if len(sizes) <= num_steps:
        return list(range(len(sizes) + 1))
    counts, held, total = [0], 0, sum(sizes)
    for count, nbytes in enumerate(sizes, start=1):
        held += nbytes
        if held * num_steps >= len(counts) * total or count == len(sizes):
            counts.append(count)
    return counts
