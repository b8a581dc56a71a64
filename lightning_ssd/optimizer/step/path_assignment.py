"""Assign each subgroup of optimizer states to a path.

A *path* is a directory, best one per drive. As in MLP-Offload (arXiv 2509.02480, section on the performance model), the
counts per path are in proportion to bandwidth. Unlike its published code, which has two paths and an integer ratio, any
number of paths and any ratio of rates will do. When rates change, only a few subgroups move.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["assign_paths", "half_duplex_rate", "rebalance_paths"]

_HYSTERESIS = 0.05
"""Share of the slowest path's time that a move has to save; less is noise of the rates."""


def half_duplex_rate(write_bytes_per_s: float, read_bytes_per_s: float) -> float:
    """Return the bytes of state per second that a path reads *and* writes back, in turns; 0 if a rate is unknown (0).

    Each byte of a subgroup is read once and written once per step, so that subgroups are spread by this bandwidth
    (MLP-Offload, arXiv 2509.02480, section on the performance model).
    """
    rates = write_bytes_per_s, read_bytes_per_s
    return 1 / (1 / read_bytes_per_s + 1 / write_bytes_per_s) if all(rates) else 0.0


def assign_paths(num: int, rates: Sequence[float]) -> tuple[int, ...]:
    """Return the path of each of ``num`` subgroups: all paths end as early as they can, and neighbours are apart.

    Each subgroup goes to the path that would be done with it first. No other counts take less time. Paths alternate as
    in stride scheduling (Waldspurger and Weihl 1995), so that all are busy all the time, in both directions of visits.

    Args:
        num: number of subgroups.
        rates: bytes per second of each path; all 0 (unknown) means equal rates.
    """
    counts = [0] * len(rates)
    order = []
    for _ in range(num):
        path = _next_path(counts, rates)
        counts[path] += 1
        order.append(path)
    return tuple(order)


def rebalance_paths(current: Sequence[int], rates: Sequence[float], *, max_moves: int) -> tuple[int, ...]:
    """Return new paths, with at most ``max_moves`` subgroups moved from the slowest paths to others.

    MLP-Offload revises its counts by observed bandwidth, too (arXiv 2509.02480, section on the performance model). Here
    only a few subgroups move at a time, and none unless it saves 5 % of the slowest path's time. Of these, the one that
    is furthest from the new path's others moves, so that paths stay interleaved.

    Args:
        current: path of each subgroup.
        rates: present rates, as for :func:`assign_paths`.
        max_moves: largest number of subgroups that change their path.
    """
    paths = list(current)
    for _ in range(max_moves if paths else 0):
        counts = [paths.count(path) for path in range(len(rates))]
        source = max(set(paths), key=lambda path: (_time(counts[path], path, rates), -path))
        target = _next_path(counts, rates)
        slowest = _time(counts[source], source, rates)
        if not _time(counts[target] + 1, target, rates) < (1 - _HYSTERESIS) * slowest:
            break
        others = [number for number, path in enumerate(paths) if path == target]
        movable = [number for number, path in enumerate(paths) if path == source]
        paths[max(movable, key=lambda number: min((abs(number - o) for o in others), default=0))] = target
    return tuple(paths)


def _next_path(counts: Sequence[int], rates: Sequence[float]) -> int:
    """Return the path that would be done first with one more subgroup; the first one of several."""
    return min(range(len(rates)), key=lambda path: _time(counts[path] + 1, path, rates))


def _time(count: int, path: int, rates: Sequence[float]) -> float:
    """Return how long a path takes for ``count`` subgroups, in units of one subgroup's bytes."""
    if not any(rates):
        return count
    return count / rates[path] if rates[path] else math.inf
