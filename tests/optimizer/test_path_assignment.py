"""Spreading subgroups of optimizer states over paths."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def counts_of(paths: tuple[int, ...], num_paths: int) -> list[int]:
    assert set(paths) <= set(range(num_paths))
    return [paths.count(path) for path in range(num_paths)]


def slowest(counts: list[int], rates: list[float]) -> float:
    used = [
        (count, rate) for count, rate in zip(counts, rates if any(rates) else [1.0] * len(rates), strict=True) if count
    ]
    return max((count / rate if rate else math.inf for count, rate in used), default=0.0)


class TestAssign:
    def test_by_hand(self) -> None:
        assert assign_paths(5, [3.0, 2.0]) == (0, 1, 0, 0, 1)
        assert assign_paths(6, [2.0, 1.0, 0.0]) == (0, 0, 1, 0, 0, 1)
        assert assign_paths(4, [0.0, 0.0]) == (0, 1, 0, 1)
        assert assign_paths(0, [1.0]) == ()

    @given(st.integers(0, 200), rate_lists)
    @laws
    def test_no_path_has_so_many_that_another_one_would_be_done_sooner(self, num: int, rates: list[float]) -> None:
        """So no other counts take less time: some path would have to take one more."""
        counts = counts_of(assign_paths(num, rates), len(rates))
        assert sum(counts) == num
        known = rates if any(rates) else [1.0] * len(rates)
        with_one_more = [(count + 1) / rate if rate else math.inf for count, rate in zip(counts, known, strict=True)]
        assert slowest(counts, rates) <= min(with_one_more) or num == 0

    @given(st.integers(1, 120), rate_lists, st.data())
    @laws
    def test_each_window_has_about_its_share_of_each_path(
        self, num: int, rates: list[float], data: st.DataObject
    ) -> None:
        paths = assign_paths(num, rates)
        start = data.draw(st.integers(0, num))
        window = paths[start : data.draw(st.integers(start, num))]
        bound = 1 + sum(Fraction(1, k) for k in range(1, len(rates) + 1))
        for path, count in enumerate(counts_of(paths, len(rates))):
            assert abs(window.count(path) - Fraction(len(window) * count, num)) < bound

    @given(st.integers(1, 60), st.floats(1, 100), st.floats(1, 100))
    @laws
    def test_the_rarer_of_two_paths_has_no_neighbour(self, num: int, first: float, second: float) -> None:
        paths = assign_paths(num, [first, second])
        rarer = int(second < first) if first != second else 1
        assert not any(left == right == rarer for left, right in pairwise(paths))


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
        assert rebalance_paths(now, [1.0, 1.3], max_moves=9) != now

    def test_what_is_moved_keeps_its_distance(self) -> None:
        assert rebalance_paths((1, 0, 0, 0, 0, 0), [1.0, 1.0], max_moves=1) == (1, 0, 0, 0, 0, 1)
        assert rebalance_paths((1, 0, 0, 0, 0, 0, 1), [1.0, 1.0], max_moves=1) == (1, 0, 0, 1, 0, 0, 1)

    def test_a_path_that_fell_silent_is_left(self) -> None:
        assert rebalance_paths((0, 1, 0, 1), [1.0, 0.0], max_moves=9) == (0, 0, 0, 0)

    @given(st.integers(0, 40), rate_lists, rate_lists, st.integers(1, 40))
    @laws
    def test_it_comes_to_rest_at_counts_as_good_as_wanted(
        self, num: int, before: list[float], rates: list[float], max_moves: int
    ) -> None:
        paths = assign_paths(num, (before * len(rates))[: len(rates)])
        wanted_s = slowest(counts_of(assign_paths(num, rates), len(rates)), rates)
        for _ in range(num + 1):
            new = rebalance_paths(paths, rates, max_moves=max_moves)
            assert sum(a != b for a, b in zip(paths, new, strict=True)) <= max_moves
            counts = counts_of(new, len(rates))
            assert slowest(counts, rates) <= slowest(counts_of(paths, len(rates)), rates)
            if new == paths:
                break
            paths = new
        else:
            pytest.fail("never at rest")
        assert slowest(counts, rates) * (1 - 0.05) <= wanted_s * (1 + 1e-12)

    @given(st.integers(0, 40), rate_lists, st.integers(0, 9))
    @laws
    def test_what_was_assigned_stays(self, num: int, rates: list[float], max_moves: int) -> None:
        paths = assign_paths(num, rates)
        assert rebalance_paths(paths, rates, max_moves=max_moves) == paths

    def test_without_moves_nothing_moves(self) -> None:
        assert rebalance_paths((0, 0, 0), [0.0, 1.0], max_moves=0) == (0, 0, 0)
        assert rebalance_paths((), [0.0, 1.0], max_moves=4) == ()
