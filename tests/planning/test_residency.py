"""Which weights stay: all if they fit, frozen ones leave first, evenly spread, never more than there is room for."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ssd.planning.residency import (
    MemoryOutlook,
    ResidencyUnit,
    choose_residents,
    window_bytes,
)

laws = settings(derandomize=True, deadline=None, max_examples=300, database=None)
MODELS = st.lists(
    st.builds(
        ResidencyUnit, weight_bytes=st.integers(1, 40), gradient_bytes=st.integers(0, 40), is_trained=st.booleans()
    ),
    max_size=24,
)
SIZES = st.integers(0, 2000)


def frozen(*sizes):
    return [ResidencyUnit(weight_bytes=nbytes) for nbytes in sizes]


def drawn(stays):
    return "".join("x" if stay else "." for stay in stays)


def kept_bytes(units, stays):
    return sum(unit.nbytes for unit, stay in zip(units, stays, strict=True) if stay)


def test_frozen_ones_wait_before_trained_ones():
    trained = ResidencyUnit(weight_bytes=10, gradient_bytes=10, is_trained=True)
    units = [trained, *frozen(10), trained, *frozen(10), trained, *frozen(10), trained]
    assert drawn(choose_residents(units, room_bytes=100, in_flight_bytes=10)) == "x.xxx.x"
    assert drawn(choose_residents(units, room_bytes=90, in_flight_bytes=10)) == "x.x.x.x"
    assert drawn(choose_residents(units, room_bytes=89, in_flight_bytes=10)) == "x.x...x"
    assert drawn(choose_residents(units, room_bytes=50, in_flight_bytes=10)) == "x...x.."


@given(MODELS, SIZES, SIZES)
@laws
def test_what_fits_stays(units, room, in_flight):
    stays = choose_residents(units, room_bytes=room, in_flight_bytes=in_flight)
    assert all(stays) == (sum(unit.nbytes for unit in units) <= room)


@given(MODELS, SIZES, st.integers(0, 100))
@laws
def test_never_more_than_the_room(units, room, in_flight):
    stays = choose_residents(units, room_bytes=room, in_flight_bytes=in_flight)
    if not all(stays):
        assert kept_bytes(units, stays) <= max(room - in_flight, 0)


@given(MODELS, SIZES, SIZES, st.integers(0, 100))
@laws
def test_with_more_room_no_less_stays(units, one, other, in_flight):
    less, more = (
        kept_bytes(units, choose_residents(units, room_bytes=room, in_flight_bytes=in_flight))
        for room in sorted((one, other))
    )
    assert less <= more


@given(MODELS, SIZES, st.integers(0, 100))
@laws
def test_a_trained_one_waits_only_if_all_frozen_ones_do(units, room, in_flight):
    stays = choose_residents(units, room_bytes=room, in_flight_bytes=in_flight)
    waiting = [unit for unit, stay in zip(units, stays, strict=True) if not stay]
    if any(unit.is_trained for unit in waiting):
        assert all(unit.is_trained for unit, stay in zip(units, stays, strict=True) if stay)


@given(st.integers(1, 60), st.integers(1, 9), st.booleans(), SIZES | st.none(), st.integers(0, 20))
@laws
def test_of_equal_units_the_fewest_wait_and_evenly(number, nbytes, is_trained, room, in_flight):
    """Where nobody waits, nothing is in flight; with an unknown room all wait."""
    units = [ResidencyUnit(weight_bytes=nbytes, is_trained=is_trained)] * number
    stays = choose_residents(units, room_bytes=room, in_flight_bytes=in_flight)
    most = max((room or 0) - in_flight, 0) // nbytes
    assert stays.count(True) == (number if room is not None and number * nbytes <= room else most)
    for wanted in (True, False):
        places = [index for index, stay in enumerate(stays) if stay is wanted]
        # In a circle: the next step begins where the last one ended.
        gaps = [after - before for before, after in pairwise([*places, *[place + number for place in places[:1]]])]
        assert not gaps or max(gaps) <= -(-number // len(places))


# -- the room --------------------------------------------------------------------------------------------------------


def outlook(**changes):
    return MemoryOutlook(**{"held_bytes": 300, "available_bytes": 700} | changes)


@pytest.mark.parametrize(
    ("changes", "usable", "room"),
    [
        ({}, 900, 300),
        ({"weight_bytes": 200}, 900, 400),
        ({"weight_bytes": 500}, 900, 450),  # not all of them touched so far
        ({"weight_bytes": 200, "coming_bytes": 300}, 900, 250),
        ({"weight_bytes": 200, "coming_bytes": 5000}, 900, 0),
        ({"weight_bytes": 200, "activation_bytes": 100}, 900, 700),
        ({"weight_bytes": 200, "activation_bytes": 1000}, 900, 0),
        ({"weight_bytes": 200, "budget_bytes": 500}, 500, 200),
        ({"weight_bytes": 200, "budget_bytes": 2000}, 900, 400),
        ({"weight_bytes": 200, "budget_bytes": 50}, 50, 0),
        ({"available_bytes": None}, None, None),
        ({"available_bytes": None, "budget_bytes": 400, "weight_bytes": 300}, 400, 200),
    ],
)
def test_room(changes, usable, room):
    found = outlook(**changes)
    assert (found.usable_bytes, found.room_bytes) == (usable, room)


@pytest.mark.parametrize(
    ("held", "available", "is_short"), [(300, 700, False), (450, 550, False), (451, 549, True), (1, None, True)]
)
def test_short(held, available, is_short):
    assert outlook(held_bytes=held, available_bytes=available).is_short is is_short


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        ([], 0),
        ([(5, False)], 5),
        ([(5, True)], 5),
        ([(5, False), (7, False), (3, False)], 7),
        ([(5, True), (7, True), (3, True)], 12),
        ([(5, False), (7, True)], 12),
        ([(5, False), (7, False), (3, True), (2, True)], 10),
    ],
)
def test_what_is_in_memory_at_a_time(units, expected):
    assert window_bytes(units) == expected
