"""What to keep: the pure rule."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_ssd.scheduling.pass_profile import storages_to_keep

Times = tuple[list[int], list[float], list[float | None]]
"""Sizes, when each was packed, when each was wanted."""
BACK_IN_REVERSE: Times = ([100] * 10, [float(i) for i in range(10)], [20.0 - i for i in range(10)])
"""Ten storages, one a second."""


def test_tail_of_forward_is_kept() -> None:
    """The last ones are wanted before they could be back."""
    # 100 bytes need 1 s out and 2 s in: storage 9 is packed at 9 s and wanted at 11 s, storage 8 at 8 s and 12 s.
    assert storages_to_keep(*BACK_IN_REVERSE, write_rate=100, read_rate=50) == {9}


def test_a_slow_drive_keeps_more_and_a_fast_one_less() -> None:
    slow = storages_to_keep(*BACK_IN_REVERSE, write_rate=20, read_rate=20)
    fast = storages_to_keep(*BACK_IN_REVERSE, write_rate=1e9, read_rate=1e9)
    assert fast == set()
    assert {9, 8} <= slow
    assert 0 not in slow


@st.composite
def passes(draw: st.DrawFn) -> Times:
    sizes = draw(st.lists(st.integers(1, 1000), min_size=1, max_size=30))
    packed = sorted(draw(st.lists(st.floats(0, 10), min_size=len(sizes), max_size=len(sizes))))
    wanted = draw(st.lists(st.one_of(st.none(), st.floats(10, 30)), min_size=len(sizes), max_size=len(sizes)))
    return sizes, packed, wanted


@given(passes(), st.floats(1, 1000), st.floats(1, 1000))
def test_what_is_written_can_be_back_in_time(case: Times, write_rate: float, read_rate: float) -> None:
    keep = storages_to_keep(*case, write_rate=write_rate, read_rate=read_rate)
    end = float("-inf")
    for index, (size, packed, wanted) in enumerate(zip(*case, strict=True)):
        if index not in keep:
            end = max(end, packed) + size / write_rate
            assert wanted is None or end + size / read_rate <= wanted


@given(passes(), st.floats(1, 1000), st.floats(1, 1000), st.floats(1, 8))
def test_a_faster_read_never_keeps_more(case: Times, write_rate: float, read_rate: float, factor: float) -> None:
    """Reads are not booked one behind the other, so that this holds exactly; for writes a kept storage can make
    room for another, so that only the totals shrink."""
    slow = storages_to_keep(*case, write_rate=1e12, read_rate=read_rate)
    fast = storages_to_keep(*case, write_rate=1e12, read_rate=read_rate * factor)
    assert fast <= slow
