"""Assign each subgroup of optimizer states to a path.

A *path* is a directory, best one per drive. As in MLP-Offload (arXiv 2509.02480, section on the performance model), the
counts per path are in proportion to bandwidth. Unlike its published code, which has two paths and an integer ratio, any
number of paths and any ratio of rates will do. When rates change, only a few subgroups move.

Arithmetic is exact (fractions), because processes with equal numbers have to decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from lightning_ssd.errors import ConfigError

__all__ = ["assign_paths", "half_duplex_rate", "rebalance_paths"]


def half_duplex_rate(write_bytes_per_s: float, read_bytes_per_s: float) -> float:
    """Return the bytes of state per second that a path reads *and* writes back, in turns: ``1 / (1/R + 1/W)``.

    Each byte of a subgroup is read once and written once per step, so that subgroups are spread by this bandwidth
    (MLP-Offload, arXiv 2509.02480, section on the performance model).

    Args:
        write_bytes_per_s: rate of writes; 0 if unknown.
        read_bytes_per_s: rate of reads; 0 if unknown.

    Returns:
        0 if one of them is 0.

    Raises:
        ConfigError: if one is negative or not finite.
    """
    rates = write_bytes_per_s, read_bytes_per_s
    if any(not 0 <= rate < math.inf for rate in rates):
        raise ConfigError(f"half_duplex_rate{rates} is impossible; give finite bytes per second, 0 if unknown")
    return 1 / (1 / read_bytes_per_s + 1 / write_bytes_per_s) if all(rates) else 0.0


def assign_paths(num: int, rates: Sequence[float]) -> tuple[int, ...]:
    """Return the path of each subgroup: counts by rate, and neighbours on different paths.

    Counts are in proportion to rates (MLP-Offload, arXiv 2509.02480, section on the performance model), rounded by the
    largest remainder. Paths alternate by stride scheduling (Waldspurger and Weihl 1995, "Stride Scheduling", section
    2): in each slot every path earns its share, and the path with the most credit pays 1 for the slot. So all paths are
    busy all the time, in both directions of the visit.

    Args:
        num: number of subgroups.
        rates: bytes per second of each path; all 0 (unknown) means equal rates.

    Returns:
        Index of the path, per subgroup.

    Raises:
        ConfigError: a ``ValueError``; if there is no path, or a rate is impossible.
    """
    counts = _counts(num, rates)
    credit = [0] * len(counts)
    order = []
    for _ in range(num):
        credit = [have + count for have, count in zip(credit, counts, strict=True)]
        path = max(range(len(credit)), key=lambda j: (credit[j], -j))
        credit[path] -= num
        order.append(path)
    return tuple(order)


def rebalance_paths(
    current: Sequence[int],
    rates: Sequence[float],
    *,
    max_moves: int,
    hysteresis: float = 0.05,
) -> tuple[int, ...]:
    """Move a few subgroups towards the counts of :func:`assign_paths`, if that saves enough time.

    MLP-Offload revises its counts by observed bandwidth, too (arXiv 2509.02480, section on the performance model). Here
    only a few subgroups move at a time, and none for noise. The slowest of the paths with too many subgroups gives one
    to the path with too few that would be done first. So no path becomes slower than the slowest at the wanted counts.

    Args:
        current: path of each subgroup.
        rates: present rates, as for :func:`assign_paths`.
        max_moves: largest number of subgroups that change their path.
        hysteresis: no subgroup moves unless the wanted counts take less than ``1 - hysteresis`` of the present time.

    Returns:
        New path of each subgroup.

    Raises:
        ConfigError: as :func:`assign_paths`, and if ``current`` names no path or the others are out of bounds.
    """
    if max_moves < 0 or not 0 <= hysteresis < 1:
        raise ConfigError(f"{max_moves=!r}, {hysteresis=!r}: give 0 or more moves, and 0 <= hysteresis < 1")
    ideal = _counts(len(current), rates)
    unknown = {path for path in current if not 0 <= path < len(rates)}
    if unknown:
        raise ConfigError(f"current=... names paths {sorted(unknown)} without a rate; give 0 to {len(rates) - 1}")
    paths = list(current)
    counts = [paths.count(path) for path in range(len(rates))]
    speeds = _speeds(rates)
    if not _time(ideal, speeds) < (1 - Fraction(hysteresis)) * _time(counts, speeds):
        return tuple(paths)
    for _ in range(max_moves):
        if counts == ideal:
            break
        source, target = _next_move(counts, ideal, speeds)
        paths[_loneliest(paths, source, target)] = target
        counts[source] -= 1
        counts[target] += 1
    return tuple(paths)


def _counts(num: int, rates: Sequence[float]) -> list[int]:
    """Return how many of ``num`` subgroups each path gets."""
    if num < 0 or not rates or any(not 0 <= rate < math.inf for rate in rates):
        raise ConfigError(
            f"{num} subgroups cannot be spread by {rates=!r}; give 0 or more subgroups, and a finite rate of at least "
            "0 for each path"
        )
    return _largest_remainder(num, rates)


def _largest_remainder(num: int, rates: Sequence[float]) -> list[int]:
    """Return whole numbers in proportion to ``rates`` that add up to ``num``, each with an error of less than 1."""
    weights = _speeds(rates)
    quotas = [num * weight / sum(weights) for weight in weights]
    counts = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda j: (counts[j] - quotas[j], j))
    for j in by_remainder[: num - sum(counts)]:
        counts[j] += 1
    return counts


def _speeds(rates: Sequence[float]) -> list[Fraction]:
    """Return the rates; all 1 if none is known."""
    return [Fraction(rate) for rate in rates] if any(rates) else [Fraction(1)] * len(rates)


def _time(counts: Sequence[int], speeds: Sequence[Fraction]) -> Fraction | float:
    """Return how long the slowest path takes, in units of one subgroup's bytes."""
    return max(_path_time(count, speed) for count, speed in zip(counts, speeds, strict=True))


def _path_time(count: int, speed: Fraction) -> Fraction | float:
    if count == 0:
        return 0.0
    return count / speed if speed else math.inf


def _next_move(counts: Sequence[int], ideal: Sequence[int], speeds: Sequence[Fraction]) -> tuple[int, int]:
    """Return the path that gives a subgroup, and the path that gets it."""
    over = [j for j in range(len(counts)) if counts[j] > ideal[j]]
    under = [j for j in range(len(counts)) if counts[j] < ideal[j]]
    source = max(over, key=lambda j: (_path_time(counts[j], speeds[j]), -j))
    return source, min(under, key=lambda j: (_path_time(counts[j] + 1, speeds[j]), j))


def _loneliest(paths: Sequence[int], source: int, target: int) -> int:
    """Return the subgroup on ``source`` that is furthest from those on ``target``, so that paths stay interleaved."""
    distance = [len(paths)] * len(paths)
    for indices in (range(len(paths)), range(len(paths) - 1, -1, -1)):
        gap = len(paths)
        for i in indices:
            gap = 0 if paths[i] == target else gap + 1
            distance[i] = min(distance[i], gap)
    return max((i for i, path in enumerate(paths) if path == source), key=lambda i: (distance[i], -i))
