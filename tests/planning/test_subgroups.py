"""Cutting optimizer states into subgroups, and spreading these over paths."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ssd.errors import ConfigError
from lightning_ssd.planning.subgroups import (
    GRANULE,
    ParameterSize,
    Part,
    half_duplex_rate,
    make_subgroups,
    respread,
    spread,
    visit_order,
)

laws = settings(derandomize=True, deadline=None, max_examples=150, database=None)

# Around the granule, where cuts begin to be possible.
lengths = st.one_of(
    st.integers(0, 3),
    st.integers(GRANULE - 1, GRANULE + 1),
    st.integers(0, 12 * GRANULE),
    st.integers(0, 12).map(lambda n: n * GRANULE),
)
states = st.sampled_from([0.0, 0.1, 2.0, 2.03125, 8.0, 12.0])
parameter_sizes = st.builds(ParameterSize, lengths, states, st.booleans())
limits = st.one_of(st.integers(1, 100), st.integers(1, 100 * GRANULE))
rate_lists = st.lists(
    st.one_of(st.just(0.0), st.floats(1e-3, 1e11), st.integers(1, 9).map(float)), min_size=1, max_size=6
)


def sliceable(*lengths: int, state: float = 12.0) -> list[ParameterSize]:
    return [ParameterSize(length, state, True) for length in lengths]


def whole(*lengths: int, state: float = 12.0) -> list[ParameterSize]:
    return [ParameterSize(length, state, False) for length in lengths]


def nbytes(group: tuple[Part, ...], sizes: list[ParameterSize]) -> Fraction:
    return sum((p.num_elements * Fraction(sizes[p.parameter].bytes_per_element) for p in group), Fraction(0))


def real_limit(sizes: list[ParameterSize], max_bytes: int) -> Fraction:
    """``max_bytes``, but at least a granule of what is sliceable."""
    granules = [min(s.num_elements, GRANULE) * Fraction(s.bytes_per_element) for s in sizes if s.sliceable]
    return max([Fraction(max_bytes), *granules])


def is_oversized(group: tuple[Part, ...], sizes: list[ParameterSize], limit: Fraction) -> bool:
    return len(group) == 1 and not sizes[group[0].parameter].sliceable and nbytes(group, sizes) > limit


class TestCutting:
    def test_nothing(self) -> None:
        assert make_subgroups([], 1) == ()

    def test_by_hand(self) -> None:
        groups = make_subgroups(sliceable(10 * GRANULE, state=1.0), 4 * GRANULE)
        # 4, 4, 2 would be as few, but not as even.
        assert groups == (
            (Part(0, 0, 3 * GRANULE),),
            (Part(0, 3 * GRANULE, 7 * GRANULE),),
            (Part(0, 7 * GRANULE, 10 * GRANULE),),
        )

    def test_small_parameters_share_and_are_not_cut(self) -> None:
        assert make_subgroups(sliceable(5, 0, 7), 1000) == ((Part(0, 0, 5), Part(1, 0, 0), Part(2, 0, 7)),)
        groups = make_subgroups(sliceable(*[1000] * 10), 12 * 4000)  # so that four fit
        # Cuts next to 3 1/3 and 6 2/3 parameters.
        assert [len(group) for group in groups] == [3, 4, 3]

    def test_a_near_border_is_taken_instead_of_a_cut(self) -> None:
        lengths = 31 * GRANULE, 33 * GRANULE
        assert make_subgroups(sliceable(*lengths), 33 * GRANULE * 12) == (
            (Part(0, 0, lengths[0]),),
            (Part(1, 0, lengths[1]),),
        )
        far = make_subgroups(sliceable(20 * GRANULE, 44 * GRANULE), 33 * GRANULE * 12)
        assert far[0] == (Part(0, 0, 20 * GRANULE), Part(1, 0, 12 * GRANULE))

    def test_what_must_stay_whole_and_is_too_large_is_alone(self) -> None:
        groups = make_subgroups(sliceable(3) + whole(900) + sliceable(0, 4), 100)
        assert [[part.parameter for part in group] for group in groups] == [[0], [1], [2, 3]]

    def test_a_limit_below_a_granule_counts_as_one(self) -> None:
        groups = make_subgroups(sliceable(2 * GRANULE + 1), 1)
        assert [group[0].num_elements for group in groups] == [GRANULE, GRANULE, 1]

    def test_parameters_without_state_do_no_harm(self) -> None:
        assert make_subgroups(sliceable(10 * GRANULE, state=0.0), 1) == ((Part(0, 0, 10 * GRANULE),),)

    @given(st.lists(parameter_sizes, max_size=8), limits)
    @laws
    def test_each_element_is_in_one_part_in_order(self, sizes: list[ParameterSize], max_bytes: int) -> None:
        parts = [part for group in make_subgroups(sizes, max_bytes) for part in group]
        found = [[part for part in parts if part.parameter == index] for index in range(len(sizes))]
        assert parts == [part for pieces in found for part in pieces], "not in the order of parameters"
        for size, pieces in zip(sizes, found, strict=True):
            assert pieces[0].start == 0
            assert pieces[-1].stop == size.num_elements
            assert all(left.stop == right.start for left, right in pairwise(pieces))
            assert all(piece.stop % GRANULE == 0 for piece in pieces[:-1])
            assert all(piece.num_elements > 0 for piece in pieces) or len(pieces) == 1
            assert size.sliceable or len(pieces) == 1
            assert sum(piece.num_elements for piece in pieces) == size.num_elements

    @given(
        st.tuples(st.lists(parameter_sizes, max_size=8), limits)
        | st.tuples(
            st.lists(st.integers(0, 9).map(lambda n: ParameterSize(n, 1.0, False)), max_size=12), st.integers(1, 20)
        )
    )
    @settings(laws, max_examples=500)
    def test_bytes_are_bounded_and_subgroups_few(self, case: tuple[list[ParameterSize], int]) -> None:
        sizes, max_bytes = case
        groups, limit = make_subgroups(sizes, max_bytes), real_limit(sizes, max_bytes)
        assert all(groups), "an empty subgroup"
        oversized = [is_oversized(group, sizes, limit) for group in groups]
        assert all(large or nbytes(group, sizes) <= limit for group, large in zip(groups, oversized, strict=True))
        # Were they more than needed, two neighbours would fit into one.
        for (left, right), large in zip(pairwise(groups), pairwise(oversized), strict=True):
            assert any(large) or nbytes(left, sizes) + nbytes(right, sizes) > limit

    @given(st.lists(lengths, min_size=1, max_size=8), states, st.integers(1, 60))
    @laws
    def test_they_are_about_equal(self, lengths: list[int], state: float, granules: int) -> None:
        sizes = sliceable(*lengths, state=state)
        groups = make_subgroups(sizes, max(math.ceil(granules * GRANULE * state), 1))
        share = sum(nbytes(group, sizes) for group in groups) / len(groups)
        # Half a granule, or a sixteenth of the share where a border is taken, at either end; a full one at a limit.
        for group in groups:
            assert abs(nbytes(group, sizes) - share) <= share / 8 + 2 * GRANULE * Fraction(state)

    def test_no_rest_is_left_for_the_last(self) -> None:
        """Filled to the brim, the last of these would hold a hundredth."""
        sizes = sliceable(*[1000 * GRANULE] * 7)
        groups = make_subgroups(sizes, 12 * GRANULE * 999)
        held = [nbytes(group, sizes) / (12 * GRANULE) for group in groups]
        assert len(groups) == 8
        assert min(held) > 0.85 * max(held)

    @pytest.mark.parametrize("max_bytes", [0, -1])
    def test_impossible_limits_are_refused(self, max_bytes: int) -> None:
        with pytest.raises(ConfigError, match=r"max_bytes=.*above 0"):
            make_subgroups(sliceable(1), max_bytes)

    @pytest.mark.parametrize(("length", "state"), [(-1, 1.0), (1, -1.0), (1, math.nan), (1, math.inf)])
    def test_impossible_sizes_are_refused(self, length: int, state: float) -> None:
        with pytest.raises(ConfigError, match=r"ParameterSize\."):
            ParameterSize(length, state, True)


class TestOrder:
    def test_by_hand(self) -> None:
        assert visit_order(3, 0) == [0, 1, 2]
        assert visit_order(3, 1) == [2, 1, 0]
        assert visit_order(4, 0, first=1) == [1, 2, 3, 0]
        assert visit_order(4, 1, first=1) == [0, 3, 2, 1]
        assert visit_order(3, 0, first=7) == [1, 2, 0]
        assert visit_order(0, 0) == visit_order(0, 1, first=3) == []

    @given(st.integers(1, 50), st.integers(0, 9), st.integers(0, 99))
    @laws
    def test_what_was_last_is_first(self, num: int, step: int, first: int) -> None:
        now, then = visit_order(num, step, first), visit_order(num, step + 1, first)
        assert then == now[::-1]
        assert sorted(now) == [*range(num)]


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
