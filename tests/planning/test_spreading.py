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
from lightning_ssd.planning.spreading import half_duplex_rate, respread, spread

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


@st.composite
def capped(draw: st.DrawFn) -> tuple[int, list[float], list[int | None]]:
    """Subgroups, rates and caps that hold them."""
    rates = draw(rate_lists)
    caps = draw(st.lists(st.none() | st.integers(0, 20), min_size=len(rates), max_size=len(rates)))
    known = [cap for cap in caps if cap is not None]
    return draw(st.integers(0, 40 if None in caps else sum(known))), rates, caps


class TestSpread:
    def test_by_hand(self) -> None:
        assert spread(5, [3.0, 2.0]) == (0, 1, 0, 1, 0)
        assert spread(6, [2.0, 1.0, 0.0]) == (0, 1, 0, 0, 1, 0)
        assert spread(4, [0.0, 0.0]) == (0, 1, 0, 1)
        assert spread(0, [1.0]) == ()

    def test_the_excess_goes_to_the_others_by_the_same_rule(self) -> None:
        assert counts_of(spread(12, [8.0, 2.0, 1.0], [3, None, None]), 3) == [3, 6, 3]
        assert counts_of(spread(12, [8.0, 3.0, 1.0], [3, 5, None]), 3) == [3, 5, 4], "the second is full only then"
        assert counts_of(spread(4, [1.0, 0.0, 0.0], [2, None, None]), 3) == [2, 1, 1], "better a path of unknown rate"

    @given(st.integers(0, 200), rate_lists)
    @laws
    def test_counts_are_less_than_one_off(self, num: int, rates: list[float]) -> None:
        counts = counts_of(spread(num, rates), len(rates))
        assert sum(counts) == num
        assert all(abs(count - quota) < 1 for count, quota in zip(counts, quotas(num, rates), strict=True))

    @given(capped())
    @laws
    def test_caps_are_kept(self, case: tuple[int, list[float], list[int | None]]) -> None:
        num, rates, caps = case
        counts = counts_of(spread(num, rates, caps), len(rates))
        assert sum(counts) == num
        assert all(cap is None or count <= cap for count, cap in zip(counts, caps, strict=True))
        # Those that are not full share what is left by their rates.
        free = [j for j, cap in enumerate(caps) if cap is None or counts[j] < cap]
        shares = quotas(sum(counts[j] for j in free), [rates[j] for j in free]) if free else []
        assert all(abs(counts[j] - share) < 1 + len(rates) for j, share in zip(free, shares, strict=True))

    @given(st.integers(1, 120), rate_lists, st.data())
    @laws
    def test_each_window_has_about_its_share_of_each_path(
        self, num: int, rates: list[float], data: st.DataObject
    ) -> None:
        paths = spread(num, rates)
        start = data.draw(st.integers(0, num))
        window = paths[start : data.draw(st.integers(start, num))]
        # A path is less than one slot ahead of its share, and behind by no more than the harmonic number of the paths.
        bound = 1 + sum(Fraction(1, k) for k in range(1, len(rates) + 1))
        for path, count in enumerate(counts_of(paths, len(rates))):
            assert abs(window.count(path) - Fraction(len(window) * count, num)) < bound

    @given(st.integers(1, 60), st.floats(1, 100), st.floats(1, 100))
    @laws
    def test_the_rarer_of_two_paths_has_no_neighbour(self, num: int, first: float, second: float) -> None:
        paths = spread(num, [first, second])
        counts = counts_of(paths, 2)
        rarer = counts.index(min(counts))
        assert not any(left == right == rarer for left, right in pairwise(paths))

    def test_impossible_ones_are_refused(self) -> None:
        for rates in ([], [-1.0], [math.nan, 1.0], [math.inf]):
            with pytest.raises(ValueError, match="rates="):
                spread(3, rates)
        with pytest.raises(ConfigError, match="hold 5 subgroups, 6 are needed"):
            spread(6, [1.0, 2.0], [2, 3])
        for caps in ([1], [-1, None]):
            with pytest.raises(ConfigError, match="one for each of the 2 paths"):
                spread(1, [1.0, 2.0], caps)
        with pytest.raises(ConfigError, match="-1 subgroups"):
            spread(-1, [1.0])


class TestRespread:
    def test_by_hand(self) -> None:
        # The second path has become three times as fast: 2 and 6 would be right.
        now = spread(8, [1.0, 1.0])
        assert counts_of(now, 2) == [4, 4]
        some = respread(now, [1.0, 3.0], max_moves=1)
        assert counts_of(some, 2) == [3, 5]
        assert counts_of(respread(some, [1.0, 3.0], max_moves=9), 2) == [2, 6]

    def test_small_changes_of_rate_move_nothing(self) -> None:
        now = spread(100, [1.0, 1.0])
        assert respread(now, [1.0, 1.05], max_moves=9) == now
        assert respread(now, [1.0, 1.05], max_moves=9, hysteresis=0.0) != now
        assert respread(now, [1.0, 1.3], max_moves=9) != now

    def test_what_is_moved_keeps_its_distance(self) -> None:
        assert respread((1, 0, 0, 0, 0, 0), [1.0, 1.0], max_moves=1) == (1, 0, 0, 0, 0, 1)
        assert respread((1, 0, 0, 0, 0, 0, 1), [1.0, 1.0], max_moves=1) == (1, 0, 0, 1, 0, 0, 1)

    def test_a_path_that_is_too_full_gives_whatever_the_time(self) -> None:
        assert respread((0, 0, 1), [5.0, 1.0], [1, None], max_moves=9) in {(0, 1, 1), (1, 0, 1)}

    def test_a_path_that_fell_silent_is_left(self) -> None:
        assert respread((0, 1, 0, 1), [1.0, 0.0], max_moves=9) == (0, 0, 0, 0)

    @given(capped(), capped(), st.integers(1, 40), st.sampled_from([0.0, 0.05, 0.5]))
    @laws
    def test_it_comes_to_rest_at_counts_as_good_as_wanted(
        self,
        before: tuple[int, list[float], list[int | None]],
        now: tuple[int, list[float], list[int | None]],
        max_moves: int,
        hysteresis: float,
    ) -> None:
        num, rates, caps = now
        paths = spread(num, (before[1] * len(rates))[: len(rates)])
        ideal = counts_of(spread(num, rates, caps), len(rates))
        wanted_s = slowest(ideal, rates)
        for _ in range(num + 1):
            new = respread(paths, rates, caps, max_moves=max_moves, hysteresis=hysteresis)
            assert sum(a != b for a, b in zip(paths, new, strict=True)) <= max_moves
            counts = counts_of(new, len(rates))
            assert slowest(counts, rates) <= max(slowest(counts_of(paths, len(rates)), rates), wanted_s) * (1 + 1e-12)
            if new == paths:
                break
            paths = new
        else:
            pytest.fail("never at rest")
        assert all(cap is None or count <= cap for count, cap in zip(counts, caps, strict=True))
        assert counts == ideal or slowest(counts, rates) * (1 - hysteresis) <= wanted_s * (1 + 1e-12)

    @given(capped(), st.integers(0, 9))
    @laws
    def test_what_was_spread_stays(self, case: tuple[int, list[float], list[int | None]], max_moves: int) -> None:
        num, rates, caps = case
        paths = spread(num, rates, caps)
        assert respread(paths, rates, caps, max_moves=max_moves, hysteresis=0.0) == paths

    def test_without_moves_nothing_moves(self) -> None:
        assert respread((0, 0, 0), [0.0, 1.0], max_moves=0) == (0, 0, 0)

    def test_impossible_ones_are_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"names paths \[-1, 2\]; allowed: 0 to 1"):
            respread((0, 2, -1), [1.0, 1.0], max_moves=1)
        with pytest.raises(ConfigError, match="max_moves=-1"):
            respread((0,), [1.0], max_moves=-1)
        for hysteresis in (-0.1, 1.0, math.nan):
            with pytest.raises(ConfigError, match="hysteresis="):
                respread((0,), [1.0], max_moves=1, hysteresis=hysteresis)
