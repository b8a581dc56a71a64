"""Moving that does not pay is given up, and gets another chance later."""

from __future__ import annotations

import pytest

from lightning_ssd.planning.worth import NUM_KEPT, Worth


@pytest.fixture(autouse=True)
def plans_are_followed() -> None:
    """Here they are given up."""


def warmed(worth: Worth, kept_s: float = 1.0) -> Worth:
    worth.kept(10.0)  # the first pass warms up, and must not make everything else look fast
    for _ in range(NUM_KEPT - 1):
        worth.kept(kept_s)
    return worth


def test_the_first_passes_keep() -> None:
    worth = Worth(1.02)
    for _ in range(NUM_KEPT):
        assert worth.keeps
        worth.kept(1.0)
    assert not worth.keeps


@pytest.mark.parametrize(("slowdown", "max_slowdown"), [(1.06, 1.02), (1.9, 2.0), (0.5, 1.0)])
def test_what_pays_goes_on(slowdown: float, max_slowdown: float) -> None:
    worth = warmed(Worth(max_slowdown))
    for _ in range(20):
        assert worth.planned(slowdown) is None
        assert not worth.keeps


@pytest.mark.parametrize(("slowdown", "max_slowdown"), [(1.08, 1.02), (2.1, 2.0)])
def test_what_does_not_pay_is_given_up_after_three_passes(slowdown: float, max_slowdown: float) -> None:
    worth = warmed(Worth(max_slowdown))
    assert worth.planned(slowdown) is None
    assert worth.planned(slowdown) is None
    assert worth.planned(slowdown) == pytest.approx(slowdown)
    assert worth.keeps


def test_one_slow_pass_says_nothing() -> None:
    worth = warmed(Worth(1.02))
    for step_s in (1.0, 9.0, 1.0, 1.0, 9.0, 1.0):
        assert worth.planned(step_s) is None


def test_one_disturbed_kept_pass_does_not_hide_that_moving_is_slow() -> None:
    worth = Worth(1.02)
    for step_s in (5.0, 1.7, 1.0, *[1.0] * (NUM_KEPT - 3)):
        worth.kept(step_s)
    assert [worth.planned(1.4) for _ in range(3)] == [None, None, pytest.approx(1.4)]


def test_the_pause_doubles_and_keeping_is_measured_anew() -> None:
    worth = warmed(Worth(1.02))
    pauses = []
    for _ in range(3):
        while worth.planned(2.0) is None:
            assert not worth.keeps
        pause = 0
        while worth.keeps:
            worth.kept(1.0)
            pause += 1
        pauses.append(pause)
    assert pauses == [64, 128, 256]
    while worth.planned(2.0) is None:
        pass
    while worth.keeps:
        worth.kept(2.0)  # the machine has become slower as a whole
    assert all(worth.planned(2.0) is None for _ in range(20))
