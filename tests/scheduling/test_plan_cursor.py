"""A cursor follows a plan while it fits, and a rule where none does."""

from lightning_ssd.scheduling.plan_cursor import PlanCursor
from tests.support.stored_plans import stored_plan
from tests.support.traces import HOST, KEEP, SSD


def known(sizes, *placements):
    return stored_plan(*placements, sizes=sizes)


def placed(cursor, *sizes):
    return [cursor.place(size) for size in sizes]


def test_a_plan_is_followed_in_pack_order():
    plan = known((5, 5, 7), SSD, KEEP, HOST)
    cursor = PlanCursor([plan], room_bytes=1000)
    assert cursor.followed is plan
    assert cursor.completed() is None
    assert placed(cursor, 5, 5) == [SSD, KEEP]
    assert cursor.completed() is None, "it may still depart"
    assert placed(cursor, 7) == [HOST]
    assert cursor.followed is cursor.completed() is plan


def test_a_pass_that_departs_goes_on_by_the_rule():
    cursor = PlanCursor([known((5, 5, 7), KEEP, KEEP, KEEP)], room_bytes=10)
    assert placed(cursor, 5, 6, 7) == [KEEP, HOST, HOST]
    assert cursor.followed is None
    assert cursor.completed() is None


def test_what_comes_after_the_end_of_a_plan_departs_from_it():
    cursor = PlanCursor([known((5,), KEEP)])
    assert placed(cursor, 5) == [KEEP]
    assert cursor.completed() is not None
    assert placed(cursor, 5) == [HOST]
    assert cursor.completed() is cursor.followed is None


def test_without_a_plan_everything_moves_and_what_there_is_no_room_for_is_waited_for():
    cursor = PlanCursor(room_bytes=10)
    assert placed(cursor, 6, 4) == [HOST, HOST]
    assert (cursor.limit_bytes, cursor.ran_out) == (None, False)
    assert placed(cursor, 1) == [HOST]
    assert (cursor.limit_bytes, cursor.ran_out) == (12, True)
    limited = PlanCursor(limit_bytes=3)
    assert placed(limited, 1 << 40) == [HOST]
    assert (limited.limit_bytes, limited.ran_out) == (3, False)


def test_the_latest_plan_that_fits_is_followed():
    latest, earlier = known((5, 5, 1), KEEP, KEEP, KEEP), known((5, 5, 2), SSD, SSD, HOST)
    cursor = PlanCursor([latest, earlier])
    assert placed(cursor, 5) == [KEEP]
    assert cursor.followed is latest
    assert placed(cursor, 5, 2) == [KEEP, HOST]
    assert cursor.followed is cursor.completed() is earlier


def test_the_plan_of_a_pass_that_ends_early_is_found_behind_a_longer_one():
    longer, shorter = known((5, 5, 1), KEEP, KEEP, KEEP), known((5, 5), SSD, SSD)
    cursor = PlanCursor([longer, shorter])
    placed(cursor, 5, 5)
    assert cursor.followed is longer, "it may still go on"
    assert cursor.completed() is shorter
    placed(cursor, 1)
    assert cursor.completed() is longer
