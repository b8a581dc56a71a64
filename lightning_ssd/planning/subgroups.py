"""Optimizer states in subgroups of bounded bytes: how parameters are cut, on which path each one lies, who comes first.

A *subgroup* is what is brought up, updated and written back at once; a *path* is a directory, best one per drive. The
ideas are those of MLP-Offload (arXiv 2509.02480, sections on design principles and on the performance model):
subgroups as the unit of placement, counts per path in proportion to bandwidth, and an order that turns round with each
step. Done in another way here: any number of paths and any ratio of rates (its published code has two paths and an
integer), even subgroups instead of full ones and a rest, and bounded moves when rates change.

Arithmetic is exact (fractions), so that a bound is a bound, and all processes with equal numbers decide alike.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

from lightning_ssd.errors import ConfigError

__all__ = ["GRANULE", "ParameterSize", "Part"]
__all__ += ["half_duplex_rate", "make_subgroups", "respread", "spread", "visit_order"]

GRANULE = 65_536
"""Cuts inside a parameter lie at multiples of so many elements: aligned for direct I/O and for vector units."""

_SNAP = Fraction(1, 16)
"""A border between parameters is taken instead of a cut inside one if it is no further off than this part of the even
share: each cut costs calls and transfers of their own."""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of one parameter, in elements of its flat form."""

    parameter: int
    """Index of the parameter."""
    start: int
    """First element."""
    stop: int
    """One after the last element."""

    @property
    def num_elements(self) -> int:
        """How many elements; 0 for an empty parameter."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ParameterSize:
    """How much state a parameter has."""

    num_elements: int
    bytes_per_element: float
    """Of state, all tensors together: 12 for a master copy and two moments in float32."""
    sliceable: bool
    """Whether its elements may be updated in separate calls. Not so where an update needs a norm or a matrix."""

    def __post_init__(self) -> None:
        if self.num_elements < 0:
            raise ConfigError(f"ParameterSize.num_elements={self.num_elements!r}; allowed: 0 or more")
        if not 0 <= self.bytes_per_element < math.inf:
            raise ConfigError(f"ParameterSize.bytes_per_element={self.bytes_per_element!r}; allowed: 0 or more bytes")


# -- cutting -----------------------------------------------------------------------------------------------------------


def make_subgroups(sizes: Sequence[ParameterSize], max_bytes: int) -> tuple[tuple[Part, ...], ...]:
    """Cut parameters, in their order, into the fewest subgroups of at most ``max_bytes``, all about equal.

    Subgroups as in MLP-Offload (arXiv 2509.02480, section on design principles), there of a fixed number of elements.
    The number is what filling each one to the brim needs. Then cut ``k`` of ``n`` goes next to ``k / n`` of the bytes:
    to the border of a parameter if one is near, else to a multiple of :data:`GRANULE` inside a sliceable parameter.

    Args:
        sizes: of the parameters. One without elements gets one empty part.
        max_bytes: of state per subgroup. One that is smaller than a granule of a sliceable parameter counts as that.

    Returns:
        Each element exactly once, in order. A parameter that is not sliceable and larger than ``max_bytes`` is alone
        in its subgroup. Nothing without parameters.

    Raises:
        ConfigError: if ``max_bytes`` is not above 0.
    """
    if max_bytes <= 0:
        raise ConfigError(f"make_subgroups(max_bytes={max_bytes!r}); allowed: bytes above 0")
    nbytes = [size.num_elements * Fraction(size.bytes_per_element) for size in sizes]
    granules = (min(size.num_elements, GRANULE) * Fraction(size.bytes_per_element) for size in sizes if size.sliceable)
    limit = max(Fraction(max_bytes), max(granules, default=Fraction(0)))
    groups: list[tuple[Part, ...]] = []
    first = 0
    for index, size in enumerate(sizes):
        if nbytes[index] > limit and not size.sliceable:
            groups += _cut_run(sizes, first, index, limit)
            groups.append((Part(index, 0, size.num_elements),))
            first = index + 1
    groups += _cut_run(sizes, first, len(sizes), limit)
    return tuple(groups)


class _Cut(NamedTuple):
    """A place between two elements. Compares by position."""

    at: Fraction
    """Bytes before it, from the begin of the run."""
    parameter: int
    """The parameter of the element after it; one after the last at the end of the run."""
    element: int


class _Run:
    """Parameters ``first`` to ``stop`` as one line of bytes that may be cut at some places."""

    def __init__(self, sizes: Sequence[ParameterSize], first: int, stop: int) -> None:
        self.sizes, self.first = sizes, first
        nbytes = (sizes[i].num_elements * Fraction(sizes[i].bytes_per_element) for i in range(first, stop))
        self.borders = list(accumulate(nbytes, initial=Fraction(0)))
        self.nbytes = self.borders[-1]

    def _granule(self, cut: _Cut) -> Fraction:
        return GRANULE * Fraction(self.sizes[cut.parameter].bytes_per_element)

    def border(self, at: Fraction) -> _Cut:
        """The last border of parameters at or before ``at``. Parameters without bytes there lie before it."""
        index = bisect_right(self.borders, at) - 1
        return _Cut(self.borders[index], self.first + index, 0)

    def before(self, at: Fraction) -> _Cut:
        """The last place to cut at or before ``at``."""
        at = min(at, self.nbytes)
        start = self.border(at)
        if start.at == at or not self.sizes[start.parameter].sliceable:
            return start
        step = self._granule(start)
        count = (at - start.at) // step
        return _Cut(start.at + count * step, start.parameter, count * GRANULE)

    def next_border(self, cut: _Cut) -> _Cut:
        """The border of parameters after ``cut``."""
        return self.border(self.borders[min(cut.parameter - self.first + 1, len(self.borders) - 1)])

    def after(self, cut: _Cut) -> _Cut:
        """The place to cut that follows ``cut``."""
        border = self.next_border(cut)
        if cut.at == border.at or not self.sizes[cut.parameter].sliceable:
            return border
        inside = _Cut(cut.at + self._granule(cut), cut.parameter, cut.element + GRANULE)
        return inside if inside.at < border.at else border

    def from_(self, at: Fraction) -> _Cut:
        """The first place to cut at or after ``at``."""
        cut = self.before(max(at, Fraction(0)))
        return cut if cut.at >= at else self.after(cut)


def _cut_run(sizes: Sequence[ParameterSize], first: int, stop: int, limit: Fraction) -> Iterator[tuple[Part, ...]]:
    """Subgroups of parameters none of which is too large for one."""
    if first == stop:
        return
    run = _Run(sizes, first, stop)
    earliest = _earliest_cuts(run, limit)
    count = len(earliest) - 1
    last = _Cut(Fraction(0), first, 0)
    for k in range(1, count + 1):
        # Behind the earliest the rest fits into the subgroups that are left. As there are no fewer than needed, the
        # earliest is behind the last one too.
        high = run.before(last.at + limit)
        cut = _nearest(run, k * run.nbytes / count, earliest[k], high, run.nbytes / count * _SNAP)
        yield _parts(sizes, last, cut if k < count else _Cut(run.nbytes, stop, 0))
        last = cut


def _earliest_cuts(run: _Run, limit: Fraction) -> list[_Cut]:
    """Where cuts 0 to n lie if the fewest subgroups are filled from the end: no cut can lie before its one here."""
    cuts = [run.before(run.nbytes)]
    while cuts[-1].at > 0 or len(cuts) == 1:
        cuts.append(run.from_(cuts[-1].at - limit))
    return cuts[::-1]


def _nearest(run: _Run, target: Fraction, low: _Cut, high: _Cut, snap: Fraction) -> _Cut:
    """The best place from ``low`` to ``high``: the border nearest to ``target`` within ``snap``, else any nearest."""

    def off(cut: _Cut) -> Fraction:
        return abs(cut.at - target)

    before = run.border(target)
    borders = [cut for cut in (before, run.next_border(before)) if off(cut) <= snap and low.at <= cut.at <= high.at]
    if borders:
        return min(borders, key=off)
    return min(max(min(run.before(target), run.from_(target), key=off), low), high)


def _parts(sizes: Sequence[ParameterSize], start: _Cut, stop: _Cut) -> tuple[Part, ...]:
    """What lies between two cuts."""
    parts = []
    for parameter in range(start.parameter, stop.parameter + (stop.element > 0)):
        begin = start.element if parameter == start.parameter else 0
        end = stop.element if parameter == stop.parameter else sizes[parameter].num_elements
        parts.append(Part(parameter, begin, end))
    return tuple(parts)


# -- order -------------------------------------------------------------------------------------------------------------


def visit_order(num: int, step: int, first: int = 0) -> list[int]:
    """In which order a step visits its subgroups: up in even steps, down in odd ones.

    What one step had last, and what may thus still be in memory, is first in the next one: MLP-Offload's
    cache-friendly order (arXiv 2509.02480, section on design principles).

    Args:
        num: of subgroups.
        step: number of the step, from 0.
        first: where even steps begin; from the end they go on at the beginning. Different for processes that share
            drives, so that they do not ask the same path for their first subgroups.
    """
    order = [(first + index) % num for index in range(num)]
    return order if step % 2 == 0 else order[::-1]


# -- paths -------------------------------------------------------------------------------------------------------------


def half_duplex_rate(write_bytes_per_s: float, read_bytes_per_s: float) -> float:
    """Bytes of state per second that a path reads *and* writes back, both taking turns: ``1 / (1/R + 1/W)``.

    Each byte of a subgroup goes both ways once per step, so that this is the bandwidth by which to spread them
    (MLP-Offload, arXiv 2509.02480, section on the performance model).

    Args:
        write_bytes_per_s: 0 if unknown.
        read_bytes_per_s: likewise.

    Returns:
        0 if one of them is 0.

    Raises:
        ConfigError: if one is negative or not finite.
    """
    rates = write_bytes_per_s, read_bytes_per_s
    if any(not 0 <= rate < math.inf for rate in rates):
        raise ConfigError(f"half_duplex_rate{rates}; allowed: bytes per second, 0 or more")
    return 1 / (1 / read_bytes_per_s + 1 / write_bytes_per_s) if all(rates) else 0.0


def spread(num: int, rates: Sequence[float], caps: Sequence[int | None] | None = None) -> tuple[int, ...]:
    """On which path each subgroup lies: counts by rate, and neighbours on different paths.

    Counts are in proportion to rates (MLP-Offload, arXiv 2509.02480, section on the performance model), whole by the
    largest remainder. In their order paths alternate by stride scheduling (Waldspurger and Weihl 1995, "Stride
    Scheduling", section 2): in each slot a path earns its share, and the one with most credit pays 1 for the slot. So
    all paths are busy all the time, whatever the direction of the visit.

    Args:
        num: of subgroups.
        rates: bytes per second of each path; all 0 (nothing known) means equal.
        caps: most subgroups per path, ``None``: no limit. What is too much for one goes to the others by their rates.

    Returns:
        Index of the path, per subgroup.

    Raises:
        ConfigError: a ``ValueError``; if there is no path, a rate or cap is impossible, or caps hold less than ``num``.
    """
    counts = _counts(num, rates, caps)
    credit = [0] * len(counts)
    order = []
    for _ in range(num):
        credit = [have + count for have, count in zip(credit, counts, strict=True)]
        path = max(range(len(credit)), key=lambda j: (credit[j], -j))
        credit[path] -= num
        order.append(path)
    return tuple(order)


def respread(
    current: Sequence[int],
    rates: Sequence[float],
    caps: Sequence[int | None] | None = None,
    *,
    max_moves: int,
    hysteresis: float = 0.05,
) -> tuple[int, ...]:
    """Move a few subgroups towards the counts of :func:`spread`, if that is worth it.

    MLP-Offload revises its counts by observed bandwidth too (arXiv 2509.02480, section on the performance model). Here
    it happens a few at a time, and not for noise. Of the paths with too many the one that takes longest gives to
    the one that would be done first of those with too few: none becomes slower than the slowest of the wanted counts.

    Args:
        current: path of each subgroup.
        rates: as for :func:`spread`, as known now.
        caps: likewise. Where more than that lie on a path, moves are worth it whatever the time.
        max_moves: most subgroups that change their path.
        hysteresis: nothing moves unless the wanted counts take less than ``1 - hysteresis`` times as long as those now.

    Returns:
        New path of each subgroup.

    Raises:
        ConfigError: as :func:`spread`, and if ``current`` names no path or the others are out of bounds.
    """
    if max_moves < 0 or not 0 <= hysteresis < 1:
        raise ConfigError(f"respread({max_moves=!r}, {hysteresis=!r}); allowed: 0 or more moves, 0 <= hysteresis < 1")
    ideal = _counts(len(current), rates, caps)
    unknown = {path for path in current if not 0 <= path < len(rates)}
    if unknown:
        raise ConfigError(f"respread(current=...) names paths {sorted(unknown)}; allowed: 0 to {len(rates) - 1}")
    paths = list(current)
    counts = [paths.count(path) for path in range(len(rates))]
    speeds = _speeds(rates)
    limits = [None] * len(rates) if caps is None else caps
    fits = all(cap is None or count <= cap for count, cap in zip(counts, limits, strict=True))
    if fits and not _time(ideal, speeds) < (1 - Fraction(hysteresis)) * _time(counts, speeds):
        return tuple(paths)
    for _ in range(max_moves):
        if counts == ideal:
            break
        source, target = _next_move(counts, ideal, speeds)
        paths[_loneliest(paths, source, target)] = target
        counts[source] -= 1
        counts[target] += 1
    return tuple(paths)


def _counts(num: int, rates: Sequence[float], caps: Sequence[int | None] | None) -> list[int]:
    """How many of ``num`` subgroups each path gets."""
    if num < 0 or not rates or any(not 0 <= rate < math.inf for rate in rates):
        raise ConfigError(f"{num} subgroups, {rates=!r}; allowed: 0 or more, one finite rate of at least 0 per path")
    limits = [None] * len(rates) if caps is None else list(caps)
    if len(limits) != len(rates) or any(cap is not None and cap < 0 for cap in limits):
        raise ConfigError(f"{caps=!r}; allowed: None or 0 and more, one for each of the {len(rates)} paths")
    known = [cap for cap in limits if cap is not None]
    if len(known) == len(limits) and sum(known) < num:
        raise ConfigError(f"{caps=!r} hold {sum(known)} subgroups, {num} are needed; free space, or name more paths")
    counts = [0] * len(rates)
    open_paths, left = list(range(len(rates))), num
    while open_paths:
        shares = _largest_remainder(left, [rates[j] for j in open_paths])
        for j, share in zip(open_paths, shares, strict=True):
            cap = limits[j]
            counts[j] = share if cap is None else min(share, cap)
        full = [j for j, share in zip(open_paths, shares, strict=True) if counts[j] < share]
        if not full:
            break
        left -= sum(counts[j] for j in full)
        open_paths = [j for j in open_paths if j not in full]
    return counts


def _largest_remainder(num: int, rates: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to ``rates`` that add up to ``num``, each less than 1 off."""
    weights = _speeds(rates)
    quotas = [num * weight / sum(weights) for weight in weights]
    counts = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda j: (counts[j] - quotas[j], j))
    for j in by_remainder[: num - sum(counts)]:
        counts[j] += 1
    return counts


def _speeds(rates: Sequence[float]) -> list[Fraction]:
    """The rates; all 1 where nothing is known."""
    return [Fraction(rate) for rate in rates] if any(rates) else [Fraction(1)] * len(rates)


def _time(counts: Sequence[int], speeds: Sequence[Fraction]) -> Fraction | float:
    """How long the slowest path takes, in units of one subgroup's bytes."""
    return max(_path_time(count, speed) for count, speed in zip(counts, speeds, strict=True))


def _path_time(count: int, speed: Fraction) -> Fraction | float:
    if count == 0:
        return 0.0
    return count / speed if speed else math.inf


def _next_move(counts: Sequence[int], ideal: Sequence[int], speeds: Sequence[Fraction]) -> tuple[int, int]:
    """From which path one subgroup goes, and to which."""
    over = [j for j in range(len(counts)) if counts[j] > ideal[j]]
    under = [j for j in range(len(counts)) if counts[j] < ideal[j]]
    source = max(over, key=lambda j: (_path_time(counts[j], speeds[j]), -j))
    return source, min(under, key=lambda j: (_path_time(counts[j] + 1, speeds[j]), j))


def _loneliest(paths: Sequence[int], source: int, target: int) -> int:
    """The subgroup on ``source`` that is furthest from those on ``target``, so that these stay interleaved."""
    distance = [len(paths)] * len(paths)
    for indices in (range(len(paths)), range(len(paths) - 1, -1, -1)):
        gap = len(paths)
        for i in indices:
            gap = 0 if paths[i] == target else gap + 1
            distance[i] = min(distance[i], gap)
    return max((i for i, path in enumerate(paths) if path == source), key=lambda i: (distance[i], -i))
