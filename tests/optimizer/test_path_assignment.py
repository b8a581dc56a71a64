"""Spreading subgroups of optimizer states over paths."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ssd.errors import ConfigError
from lightning_ssd.optimizer.step.path_assignment import assign_paths, half_duplex_rate, rebalance_paths

laws = settings(derandomize=True, deadline=None, max_examples=150, database=None)
rate_lists = st.lists(
    st.one_of(st.just(0.0), st.floats(1e-3, 1e11), st.integers(1, 9).map(float)), min_size=1, max_size=6
)


class TestRate:
    def test_by_hand(self) -> None:
        assert half_duplex_rate(3.0, 6.0) == pytest.approx(2.0)
        assert half_duplex_rate(0.0, 6.0) == half_duplex_rate(6.0, 0.0) == half_duplex_rate(0.0, 0.0) == 0

    @given(st.floats(1, 1e12), st.floats(1, 1e12))
    @laws
    def test_it_is_the_time_for_both(self, write: float, read: float) -> None:
        rate = half_duplex_rate(write, read)
        assert 1 / rate == pytest.approx(1 / write + 1 / read)
        assert rate < min(write, read)

    @pytest.mark.parametrize("rates", [(-1.0, 1.0), (1.0, math.inf), (math.nan, 1.0)])
    def test_impossible_rates_are_refused(self, rates: tuple[float, float]) -> None:
        with pytest.raises(ConfigError, match="half_duplex_rate"):
            half_duplex_rate(*rates)


def counts_of(paths: tuple[int, ...], num_paths: int) -> list[int]:
    counter = Counter(paths)
    assert set(counter) <= set(range(num_paths))
    return [counter[path] for path in range(num_paths)]


def quotas(num: int, rates: list[float]) -> list[Fraction]:
    weights = [Fraction(rate) for rate in rates] if any(rates) else [Fraction(1)] * len(rates)
    return [num * weight / sum(weights) for weight in weights]


def slowest(counts: list[int], rates: list[float]) -> float:
    used = [
        (count, rate) for count, rate in zip(counts, rates if any(rates) else [1.0] * len(rates), strict=True) if count
    ]
    return max((count / rate if rate else math.inf for count, rate in used), default=0.0)


class TestAssign:
    def test_by_hand(self) -> None:
        assert assign_paths(5, [3.0, 2.0]) == (0, 1, 0, 1, 0)
        assert assign_paths(6, [2.0, 1.0, 0.0]) == (0, 1, 0, 0, 1, 0)
        assert assign_paths(4, [0.0, 0.0]) == (0, 1, 0, 1)
        assert assign_paths(0, [1.0]) == ()

    @given(st.integers(0, 200), rate_lists)
    @laws
    def test_counts_are_less_than_one_off(self, num: int, rates: list[float]) -> None:
        counts = counts_of(assign_paths(num, rates), len(rates))
        assert sum(counts) == num
        assert all(abs(count - quota) < 1 for count, quota in zip(counts, quotas(num, rates), strict=True))

    @given(st.integers(1, 120), rate_lists, st.data())
    @laws
    def test_each_window_has_about_its_share_of_each_path(
        self, num: int, rates: list[float], data: st.DataObject
    ) -> None:
        paths = assign_paths(num, rates)
        start = data.draw(st.integers(0, num))
        window = paths[start : data.draw(st.integers(start, num))]
        # A path is less than one slot ahead of its share, and behind by no more than the harmonic number of the paths.
        bound = 1 + sum(Fraction(1, k) for k in range(1, len(rates) + 1))
        for path, count in enumerate(counts_of(paths, len(rates))):
            assert abs(window.count(path) - Fraction(len(window) * count, num)) < bound

    @given(st.integers(1, 60), st.floats(1, 100), st.floats(1, 100))
    @laws
    def test_the_rarer_of_two_paths_has_no_neighbour(self, num: int, first: float, second: float) -> None:
        paths = assign_paths(num, [first, second])
        counts = counts_of(paths, 2)
        rarer = counts.index(min(counts))
        assert not any(left == right == rarer for left, right in pairwise(paths))

    def test_impossible_ones_are_refused(self) -> None:
        for rates in ([], [-1.0], [math.nan, 1.0], [math.inf]):
            with pytest.raises(ValueError, match="rates="):
                assign_paths(3, rates)
        with pytest.raises(ConfigError, match="-1 subgroups"):
            assign_paths(-1, [1.0])


class TestRebalance:
    def test_by_hand(self) -> None:
        # The second path has become three times as fast: 2 and 6 would be right.
        now = assign_paths(8, [1.0, 1.0])
        assert counts_of(now, 2) == [4, 4]
        some = rebalance_paths(now, [1.0, 3.0], max_moves=1)
        assert counts_of(some, 2) == [3, 5]
        assert counts_of(rebalance_paths(some, [1.0, 3.0], max_moves=9), 2) == [2, 6]

    def test_small_changes_of_rate_move_nothing(self) -> None:
        now = assign_paths(100, [1.0, 1.0])
        assert rebalance_paths(now, [1.0, 1.05], max_moves=9) == now
        assert rebalance_paths(now, [1.0, 1.05], max_moves=9, hysteresis=0.0) != now
        assert rebalance_paths(now, [1.0, 1.3], max_moves=9) != now

    def test_what_is_moved_keeps_its_distance(self) -> None:
        assert rebalance_paths((1, 0, 0, 0, 0, 0), [1.0, 1.0], max_moves=1) == (1, 0, 0, 0, 0, 1)
        assert rebalance_paths((1, 0, 0, 0, 0, 0, 1), [1.0, 1.0], max_moves=1) == (1, 0, 0, 1, 0, 0, 1)

    def test_a_path_that_fell_silent_is_left(self) -> None:
        assert rebalance_paths((0, 1, 0, 1), [1.0, 0.0], max_moves=9) == (0, 0, 0, 0)

    @given(st.integers(0, 40), rate_lists, rate_lists, st.integers(1, 40), st.sampled_from([0.0, 0.05, 0.5]))
    @laws
    def test_it_comes_to_rest_at_counts_as_good_as_wanted(
        self, num: int, before: list[float], rates: list[float], max_moves: int, hysteresis: float
    ) -> None:
        paths = assign_paths(num, (before * len(rates))[: len(rates)])
        ideal = counts_of(assign_paths(num, rates), len(rates))
        wanted_s = slowest(ideal, rates)
        for _ in range(num + 1):
            new = rebalance_paths(paths, rates, max_moves=max_moves, hysteresis=hysteresis)
            assert sum(a != b for a, b in zip(paths, new, strict=True)) <= max_moves
            counts = counts_of(new, len(rates))
            assert slowest(counts, rates) <= max(slowest(counts_of(paths, len(rates)), rates), wanted_s) * (1 + 1e-12)
            if new == paths:
                break
            paths = new
        else:
            pytest.fail("never at rest")
        assert counts == ideal or slowest(counts, rates) * (1 - hysteresis) <= wanted_s * (1 + 1e-12)

    @given(st.integers(0, 40), rate_lists, st.integers(0, 9))
    @laws
    def test_what_was_assigned_stays(self, num: int, rates: list[float], max_moves: int) -> None:
        paths = assign_paths(num, rates)
        assert rebalance_paths(paths, rates, max_moves=max_moves, hysteresis=0.0) == paths

    def test_without_moves_nothing_moves(self) -> None:
        assert rebalance_paths((0, 0, 0), [0.0, 1.0], max_moves=0) == (0, 0, 0)

    def test_impossible_ones_are_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"names paths \[-1, 2\] without a rate; give 0 to 1"):
            rebalance_paths((0, 2, -1), [1.0, 1.0], max_moves=1)
        with pytest.raises(ConfigError, match="max_moves=-1"):
            rebalance_paths((0,), [1.0], max_moves=-1)
        for hysteresis in (-0.1, 1.0, math.nan):
            with pytest.raises(ConfigError, match="hysteresis="):
                rebalance_paths((0,), [1.0], max_moves=1, hysteresis=hysteresis)
