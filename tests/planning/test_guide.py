"""A guide follows a plan while it fits, and a rule where none does."""

from __future__ import annotations

from lightning_ssd.planning.guide import Guide, StoredPlan
from lightning_ssd.planning.placement import Placement
from lightning_ssd.planning.plan import Goal, Plan, Prediction, TierRates
from lightning_ssd.planning.trace import Trace

KEEP, SSD, HOST = Placement.KEEP, Placement.SSD, Placement.HOST


def known(sizes: tuple[int, ...], *placements: Placement) -> StoredPlan:
    prediction = Prediction(step_s=1.0, stall_s=0.0, peak_bytes=1, written_bytes=0, read_bytes=0)
    return StoredPlan(
        sizes=sizes,
        trace=Trace(storages=(), order=(), forward_end_s=0.5, end_s=1.0),
        goal=Goal(),
        rates=TierRates(write_bytes_per_s=1.0, read_bytes_per_s=1.0),
        plan=Plan(placements=placements, limit_bytes=1, ahead_bytes=0, prediction=prediction, keep_step_s=1.0),
    )


def placed(guide: Guide, *sizes: int) -> list[Placement]:
    return [guide.place(size) for size in sizes]


def test_a_plan_is_followed_in_pack_order() -> None:
    plan = known((5, 5, 7), SSD, KEEP, HOST)
    guide = Guide([plan], room_bytes=1000)
    assert guide.followed is plan
    assert guide.completed() is None
    assert placed(guide, 5, 5) == [SSD, KEEP]
    assert guide.completed() is None, "it may still depart"
    assert placed(guide, 7) == [HOST]
    assert guide.followed is guide.completed() is plan


def test_a_pass_that_departs_goes_on_by_the_rule() -> None:
    guide = Guide([known((5, 5, 7), SSD, SSD, SSD)], room_bytes=10)
    assert placed(guide, 5, 6, 7, 4) == [SSD, KEEP, SSD, KEEP]
    assert guide.followed is None
    assert guide.completed() is None


def test_what_comes_after_the_end_of_a_plan_departs_from_it() -> None:
    guide = Guide([known((5,), KEEP)])
    assert placed(guide, 5) == [KEEP]
    assert guide.completed() is not None
    assert placed(guide, 5) == [SSD], "no room was given"
    assert guide.completed() is guide.followed is None


def test_a_plan_that_was_left_is_not_taken_up_again() -> None:
    guide = Guide([known((5, 5, 5), KEEP, KEEP, KEEP)])
    assert placed(guide, 5, 4, 5) == [KEEP, SSD, SSD]


def test_without_a_plan_the_room_is_used_up_and_no_more() -> None:
    assert placed(Guide(room_bytes=10), 6, 5, 4, 1) == [KEEP, SSD, KEEP, SSD]
    assert placed(Guide(), 1) == [SSD]


def test_the_latest_plan_that_fits_is_followed() -> None:
    latest, earlier = known((5, 5, 1), KEEP, KEEP, KEEP), known((5, 5, 2), SSD, SSD, HOST)
    guide = Guide([latest, earlier])
    assert placed(guide, 5) == [KEEP]
    assert guide.followed is latest
    assert placed(guide, 5, 2) == [KEEP, HOST]
    assert guide.followed is guide.completed() is earlier


def test_the_plan_of_a_pass_that_ends_early_is_found_behind_a_longer_one() -> None:
    longer, shorter = known((5, 5, 1), KEEP, KEEP, KEEP), known((5, 5), SSD, SSD)
    guide = Guide([longer, shorter])
    placed(guide, 5, 5)
    assert guide.followed is longer, "it may still go on"
    assert guide.completed() is shorter
    placed(guide, 1)
    assert guide.completed() is longer


def test_blocks_and_limit_are_as_given() -> None:
    guide = Guide(recompute=frozenset({1, 3}), limit_bytes=7)
    assert [guide.block(index) for index in range(5)] == [False, True, False, True, False]
    assert guide.limit_bytes == 7
    assert Guide().limit_bytes is None
    assert not Guide().block(0)
