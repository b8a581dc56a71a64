"""Optimizer states in subgroups of bounded bytes: how parameters are cut, and who comes first.

A *subgroup* is what is brought up, updated and written back at once; ``path_assignment.py`` says where each lies. The
idea is that of MLP-Offload (arXiv 2509.02480, section on design principles): subgroups as the unit of placement, and
an order that turns round with each step. Done in another way here: even subgroups instead of full ones and a rest.

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

__all__ = ["GRANULE", "ParameterSize", "Part", "make_subgroups", "visit_order"]

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
