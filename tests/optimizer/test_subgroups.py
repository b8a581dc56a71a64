"""Cutting optimizer states into subgroups, and their order."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ssd.optimizer.step.subgroups import GRANULE, ParameterSize, Part, make_subgroups, visit_order

laws = settings(derandomize=True, deadline=None, max_examples=150, database=None)

# Around the granule, where cuts begin to be possible.
lengths = st.one_of(
    st.integers(0, 3),
    st.integers(GRANULE - 1, GRANULE + 1),
    st.integers(0, 12 * GRANULE),
    st.integers(0, 12).map(lambda n: n * GRANULE),
)
states = st.sampled_from([0, 2, 8, 12])
parameter_sizes = st.builds(ParameterSize, lengths, states, st.booleans())
limits = st.one_of(st.integers(1, 100), st.integers(1, 100 * GRANULE))


def sliceable(*lengths, state=12):
    return [ParameterSize(length, state, True) for length in lengths]


def nbytes(group, sizes):
    return sum(part.num_elements * sizes[part.parameter].bytes_per_element for part in group)


def real_limit(sizes, max_bytes):
    return max([max_bytes, *(min(s.num_elements, GRANULE) * s.bytes_per_element for s in sizes if s.sliceable)])


def is_oversized(group, sizes, limit):
    return len(group) == 1 and not sizes[group[0].parameter].sliceable and nbytes(group, sizes) > limit


class TestCutting:
    def test_by_hand(self):
        groups = make_subgroups(sliceable(9 * GRANULE, state=1), 4 * GRANULE)
        # 4, 4, 1 would be as few, but take more memory.
        assert groups == [
            [Part(0, 0, 3 * GRANULE)],
            [Part(0, 3 * GRANULE, 6 * GRANULE)],
            [Part(0, 6 * GRANULE, 9 * GRANULE)],
        ]

    @given(st.lists(parameter_sizes, max_size=8), limits)
    @laws
    def test_each_element_is_in_one_part_in_order(self, sizes, max_bytes):
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
            st.lists(st.integers(0, 9).map(lambda n: ParameterSize(n, 1, False)), max_size=12), st.integers(1, 20)
        )
    )
    @settings(laws, max_examples=500)
    def test_bytes_are_bounded_and_subgroups_few(self, case):
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
    def test_none_is_larger_than_need_be(self, lengths, state, granules):
        sizes = sliceable(*lengths, state=state)
        groups = make_subgroups(sizes, max(granules * GRANULE * state, 1))
        share = sum(nbytes(group, sizes) for group in groups) / len(groups)
        assert max(nbytes(group, sizes) for group in groups) <= share + GRANULE * state

    def test_no_rest_is_left_for_the_last(self):
        """Filled to the brim, the last of these would hold a hundredth."""
        sizes = sliceable(*[1000 * GRANULE] * 7)
        groups = make_subgroups(sizes, 12 * GRANULE * 999)
        held = [nbytes(group, sizes) / (12 * GRANULE) for group in groups]
        assert len(groups) == 8
        assert min(held) > 0.85 * max(held)


class TestOrder:
    def test_by_hand(self):
        assert visit_order(3, 0) == [0, 1, 2]
        assert visit_order(3, 1) == [2, 1, 0]
        assert visit_order(4, 0, first=1) == [1, 2, 3, 0]
        assert visit_order(4, 1, first=1) == [0, 3, 2, 1]
        assert visit_order(3, 0, first=7) == [1, 2, 0]
        assert visit_order(0, 0) == visit_order(0, 1, first=3) == []

    @given(st.integers(1, 50), st.integers(0, 9), st.integers(0, 99))
    @laws
    def test_what_was_last_is_first(self, num, step, first):
        now, then = visit_order(num, step, first), visit_order(num, step + 1, first)
        assert then == now[::-1]
        assert sorted(now) == [*range(num)]
