"""Cut parameters into subgroups with a bounded number of bytes of states, and order the visits to them.

A *subgroup* is loaded, updated and written back as a whole; ``path_assignment.py`` assigns each to a path. As in
MLP-Offload (arXiv 2509.02480, section on design principles), subgroups are the unit of placement, and the order of
visits is reversed with each step. Unlike there, subgroups are even, instead of full ones and a rest.

Arithmetic is exact (fractions), because bounds must hold, and processes with equal numbers have to decide alike.
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
"""Cuts inside a parameter lie at multiples of this many elements, which aligns them for direct I/O and vector units."""

_SNAP = Fraction(1, 16)
"""Largest distance, as a part of the even share, at which a border between parameters is preferred to a cut inside one.
A cut costs additional calls and transfers."""


@dataclass(frozen=True, slots=True)
class Part:
    """A range of one parameter, in elements of its flat form."""

    parameter: int
    """Index of the parameter."""
    start: int
    """First element."""
    stop: int
    """One after the last element."""

    @property
    def num_elements(self) -> int:
        """Number of elements; 0 for an empty parameter."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ParameterSize:
    """The size of a parameter's state."""

    num_elements: int
    bytes_per_element: float
    """Bytes of state per element, all tensors together: 12 for a master copy and two moments in float32."""
    sliceable: bool
    """Whether its elements may be updated in separate calls; false if an update needs a norm or a matrix."""

    def __post_init__(self) -> None:
        if self.num_elements < 0:
            raise ConfigError(f"ParameterSize.num_elements={self.num_elements!r} is negative; give 0 or more")
        nbytes = self.bytes_per_element
        if not 0 <= nbytes < math.inf:
            raise ConfigError(f"ParameterSize.bytes_per_element={nbytes!r} is no size; give 0 or more bytes")


# -- cutting -----------------------------------------------------------------------------------------------------------


def make_subgroups(sizes: Sequence[ParameterSize], max_bytes: int) -> tuple[tuple[Part, ...], ...]:
    """Cut parameters, in their order, into the fewest subgroups of at most ``max_bytes``, all of about equal size.

    MLP-Offload's subgroups (arXiv 2509.02480, section on design principles) have a fixed number of elements. Here their
    number is the smallest possible. Then cut ``k`` of ``n`` is placed near ``k / n`` of the bytes: at the border of a
    parameter if one is near, else at a multiple of :data:`GRANULE` inside a sliceable parameter.

    Args:
        sizes: sizes of the parameters. A parameter without elements gets one empty part.
        max_bytes: limit of state per subgroup. It is raised to the largest granule of a sliceable parameter.

    Returns:
        The subgroups, with each element exactly once, in order; empty without parameters. A parameter that is not
        sliceable and larger than ``max_bytes`` is alone in its subgroup.

    Raises:
        ConfigError: if ``max_bytes`` is not above 0.
    """
    if max_bytes <= 0:
        raise ConfigError(f"make_subgroups(max_bytes={max_bytes!r}) leaves no room for states; give bytes above 0")
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
    """A place between two elements. Cuts compare by position."""

    at: Fraction
    """Bytes from the beginning of the run to it."""
    parameter: int
    """Index of the parameter with the element after it; at the end of the run, one after the last parameter."""
    element: int


class _Run:
    """Parameters ``first`` to ``stop`` as one sequence of bytes that may be cut at some places."""

    def __init__(self, sizes: Sequence[ParameterSize], first: int, stop: int) -> None:
        self.sizes, self.first = sizes, first
        nbytes = (sizes[i].num_elements * Fraction(sizes[i].bytes_per_element) for i in range(first, stop))
        self.borders = list(accumulate(nbytes, initial=Fraction(0)))
        self.nbytes = self.borders[-1]

    def _granule(self, cut: _Cut) -> Fraction:
        return GRANULE * Fraction(self.sizes[cut.parameter].bytes_per_element)

    def border(self, at: Fraction) -> _Cut:
        """Return the last border of parameters at or before ``at``. Parameters without bytes there lie before it."""
        index = bisect_right(self.borders, at) - 1
        return _Cut(self.borders[index], self.first + index, 0)

    def before(self, at: Fraction) -> _Cut:
        """Return the last possible cut at or before ``at``."""
        at = min(at, self.nbytes)
        start = self.border(at)
        if start.at == at or not self.sizes[start.parameter].sliceable:
            return start
        step = self._granule(start)
        count = (at - start.at) // step
        return _Cut(start.at + count * step, start.parameter, count * GRANULE)

    def next_border(self, cut: _Cut) -> _Cut:
        """Return the border of parameters after ``cut``."""
        return self.border(self.borders[min(cut.parameter - self.first + 1, len(self.borders) - 1)])

    def after(self, cut: _Cut) -> _Cut:
        """Return the next possible cut after ``cut``."""
        border = self.next_border(cut)
        if cut.at == border.at or not self.sizes[cut.parameter].sliceable:
            return border
        inside = _Cut(cut.at + self._granule(cut), cut.parameter, cut.element + GRANULE)
        return inside if inside.at < border.at else border

    def from_(self, at: Fraction) -> _Cut:
        """Return the first possible cut at or after ``at``."""
        cut = self.before(max(at, Fraction(0)))
        return cut if cut.at >= at else self.after(cut)


def _cut_run(sizes: Sequence[ParameterSize], first: int, stop: int, limit: Fraction) -> Iterator[tuple[Part, ...]]:
    """Yield the subgroups of a run of parameters, none of which is too large for a subgroup."""
    if first == stop:
        return
    run = _Run(sizes, first, stop)
    earliest = _earliest_cuts(run, limit)
    count = len(earliest) - 1
    last = _Cut(Fraction(0), first, 0)
    for k in range(1, count + 1):
        # After the earliest cut, the rest fits into the remaining subgroups. Their number is no smaller than needed, so
        # that the earliest cut is also after the last one.
        high = run.before(last.at + limit)
        cut = _nearest(run, k * run.nbytes / count, earliest[k], high, run.nbytes / count * _SNAP)
        yield _parts(sizes, last, cut if k < count else _Cut(run.nbytes, stop, 0))
        last = cut


def _earliest_cuts(run: _Run, limit: Fraction) -> list[_Cut]:
    """Return cuts 0 to n if the fewest subgroups are filled from the end. Each is the earliest possible one."""
    cuts = [run.before(run.nbytes)]
    while cuts[-1].at > 0 or len(cuts) == 1:
        cuts.append(run.from_(cuts[-1].at - limit))
    return cuts[::-1]


def _nearest(run: _Run, target: Fraction, low: _Cut, high: _Cut, snap: Fraction) -> _Cut:
    """Return the best cut from ``low`` to ``high``: the nearest border within ``snap`` of ``target``, else any cut."""

    def off(cut: _Cut) -> Fraction:
        return abs(cut.at - target)

    before = run.border(target)
    borders = [cut for cut in (before, run.next_border(before)) if off(cut) <= snap and low.at <= cut.at <= high.at]
    if borders:
        return min(borders, key=off)
    return min(max(min(run.before(target), run.from_(target), key=off), low), high)


def _parts(sizes: Sequence[ParameterSize], start: _Cut, stop: _Cut) -> tuple[Part, ...]:
    """Return the parts between two cuts."""
    parts = []
    for parameter in range(start.parameter, stop.parameter + (stop.element > 0)):
        begin = start.element if parameter == start.parameter else 0
        end = stop.element if parameter == stop.parameter else sizes[parameter].num_elements
        parts.append(Part(parameter, begin, end))
    return tuple(parts)


# -- order -------------------------------------------------------------------------------------------------------------


def visit_order(num: int, step: int, first: int = 0) -> list[int]:
    """Return the order in which a step visits its subgroups: ascending in even steps, descending in odd ones.

    The subgroups that a step visited last may still be in memory. So the next step begins with them: MLP-Offload's
    cache-friendly order (arXiv 2509.02480, section on design principles).

    Args:
        num: number of subgroups.
        step: number of the step, from 0.
        first: subgroup that even steps begin with; after the last one they continue with 0. Processes that share drives
            have different ones, so that they do not all begin with the same path.
    """
    order = [(first + index) % num for index in range(num)]
    return order if step % 2 == 0 else order[::-1]
