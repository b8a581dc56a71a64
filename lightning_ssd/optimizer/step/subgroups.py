"""Cut parameters into subgroups with a bounded number of bytes of states, and order the visits to them.

A *subgroup* is loaded, updated and written back as a whole. As in MLP-Offload (arXiv 2509.02480, section on design
principles), the order of visits is reversed with each step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["GRANULE", "ParameterSize", "Part", "make_subgroups", "visit_order"]

GRANULE = 65_536
"""Cuts inside a parameter lie at multiples of this many elements, which aligns them for direct I/O and vector units."""


class Part(NamedTuple):
    """A range of one parameter, in elements of its flat form."""

    parameter: int
    start: int
    stop: int
    """One after the last element."""

    @property
    def num_elements(self) -> int:
        """Number of elements; 0 for an empty parameter."""
        return self.stop - self.start


class ParameterSize(NamedTuple):
    """The size of a parameter's state."""

    num_elements: int
    bytes_per_element: int
    """Bytes of state per element, all tensors together: 12 for a master copy and two moments in float32."""
    sliceable: bool
    """Whether its elements may be updated in separate calls; false if an update needs a norm or a matrix."""


def make_subgroups(sizes: Sequence[ParameterSize], max_bytes: int) -> list[list[Part]]:
    """Cut parameters, in their order, into the fewest subgroups of at most ``max_bytes``, none larger than need be.

    MLP-Offload's subgroups (arXiv 2509.02480, section on design principles) have a fixed number of elements. Here their
    number is the smallest possible, and then their limit is: memory is taken by the largest one.

    Args:
        sizes: sizes of the parameters. A parameter without elements gets one empty part.
        max_bytes: limit of state per subgroup. It is raised to the largest granule of a sliceable parameter.

    Returns:
        The subgroups, with each element exactly once, in order; empty without parameters. A parameter that is not
        sliceable and larger than ``max_bytes`` is alone in its subgroup.
    """
    granules = (min(size.num_elements, GRANULE) * size.bytes_per_element for size in sizes if size.sliceable)
    least = max(granules, default=0)
    limits = range(least, max(max_bytes, least) + 1)
    fewest = len(_filled(sizes, limits[-1]))
    # The lower the limit, the more subgroups.
    return _filled(sizes, limits[bisect_left(limits, -fewest, key=lambda limit: -len(_filled(sizes, limit)))])


def _filled(sizes: Sequence[ParameterSize], limit: int) -> list[list[Part]]:
    """Fill one subgroup after the other up to ``limit`` bytes, which is no less than any granule."""
    groups: list[list[Part]] = []
    room = -1
    for index, (num_elements, nbytes, sliceable) in enumerate(sizes):
        start, stop = 0, -1
        while stop < num_elements:
            stop = num_elements
            if (stop - start) * nbytes > room:
                num_fitting = room // (GRANULE * nbytes) * GRANULE if sliceable and room > 0 else 0
                if not num_fitting and (not groups or groups[-1]):
                    groups.append([])
                    room, stop = limit, -1
                    continue
                stop = start + (num_fitting or num_elements)  # without a cut, it is alone in its subgroup
            groups[-1].append(Part(index, start, stop))
            room -= (stop - start) * nbytes
            start = stop
    return groups


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
