"""On which path each subgroup of optimizer states lies.

A *path* is a directory, best one per drive. The idea is that of MLP-Offload (arXiv 2509.02480, section on the
performance model): counts per path in proportion to bandwidth. Done in another way here: any number of paths and any
ratio of rates (its published code has two paths and an integer), and bounded moves when rates change.

Arithmetic is exact (fractions), so that all processes with equal numbers decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from lightning_ssd.errors import ConfigError

__all__ = ["assign_paths", "half_duplex_rate", "rebalance_paths"]


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


def assign_paths(num: int, rates: Sequence[float]) -> tuple[int, ...]:
    """On which path each subgroup lies: counts by rate, and neighbours on different paths.

    Counts are in proportion to rates (MLP-Offload, arXiv 2509.02480, section on the performance model), whole by the
    largest remainder. In their order paths alternate by stride scheduling (Waldspurger and Weihl 1995, "Stride
    Scheduling", section 2): in each slot a path earns its share, and the one with most credit pays 1 for the slot. So
    all paths are busy all the time, whatever the direction of the visit.

    Args:
        num: of subgroups.
        rates: bytes per second of each path; all 0 (nothing known) means equal.

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
    """Move a few subgroups towards the counts of :func:`assign_paths`, if that is worth it.

    MLP-Offload revises its counts by observed bandwidth too (arXiv 2509.02480, section on the performance model). Here
    it happens a few at a time, and not for noise. Of the paths with too many the one that takes longest gives to
    the one that would be done first of those with too few: none becomes slower than the slowest of the wanted counts.

    Args:
        current: path of each subgroup.
        rates: as for :func:`assign_paths`, as known now.
        max_moves: most subgroups that change their path.
        hysteresis: nothing moves unless the wanted counts take less than ``1 - hysteresis`` times as long as those now.

    Returns:
        New path of each subgroup.

    Raises:
        ConfigError: as :func:`assign_paths`, and if ``current`` names no path or the others are out of bounds.
    """
    if max_moves < 0 or not 0 <= hysteresis < 1:
        raise ConfigError(f"{max_moves=!r}, {hysteresis=!r}; allowed: 0 or more moves, 0 <= hysteresis < 1")
    ideal = _counts(len(current), rates)
    unknown = {path for path in current if not 0 <= path < len(rates)}
    if unknown:
        raise ConfigError(f"current=... names paths {sorted(unknown)}; allowed: 0 to {len(rates) - 1}")
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
    """How many of ``num`` subgroups each path gets."""
    if num < 0 or not rates or any(not 0 <= rate < math.inf for rate in rates):
        raise ConfigError(f"{num} subgroups, {rates=!r}; allowed: 0 or more, one finite rate of at least 0 per path")
    return _largest_remainder(num, rates)


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
