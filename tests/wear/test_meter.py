"""Whose bytes count for which drive, and when a warning is due."""

import os
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from lightning_ssd.errors import BudgetError
from lightning_ssd.wear import meter as meter_module
from lightning_ssd.wear.meter import ACTIVATIONS, WearMeter
from tests.support.stopped_clocks import stopped_clock

DAY_S = 86_400
TB = 10**12


@pytest.fixture
def wait(monkeypatch):
    return stopped_clock(monkeypatch, meter_module)


@pytest.fixture
def directories(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    return first, second


def lie(monkeypatch, *numbers, capacity=TB):
    """Have each directory, in the order in which it is asked for, lie on the file system of that number."""
    devices = iter(numbers)
    space = SimpleNamespace(f_blocks=capacity // 4096, f_frsize=4096)
    fake = SimpleNamespace(stat=lambda _: SimpleNamespace(st_dev=next(devices)), statvfs=lambda _: space)
    monkeypatch.setattr(meter_module, "os", fake)


class Account:
    """What writers have written so far, in each directory."""

    def __init__(self, meter, num_directories=1):
        self.meter = meter
        self.activations = [0] * num_directories
        self.states = [0] * num_directories
        meter.watch(ACTIVATIONS, lambda: self.activations)
        meter.watch("optimizer states", lambda: self.states)

    def border(self, *activations):
        self.activations = list(activations)
        return self.meter.border()

    def life(self, *activations):
        self.activations = list(activations)
        return self.meter.life_days()


def lives(meter, wait, *per_day):
    account = Account(meter, len(per_day))
    meter.border()
    wait(DAY_S)
    return account.life(*per_day)


# -- drives -----------------------------------------------------------------------------------------------------------


def test_without_a_rating_no_life_is_told(tmp_path, wait):
    meter = WearMeter([tmp_path], None)
    assert lives(meter, wait, 10**18) == {}
    for _ in range(20):
        wait(60)
        assert meter.border() is None


def test_two_directories_on_one_file_system_are_one_drive(directories, wait):
    space = os.statvfs(directories[0])
    meter = WearMeter(directories, 400 * TB, wear_budget=lambda capacity: capacity)
    assert meter.bytes_per_day == space.f_blocks * space.f_frsize, "it counts once"
    assert lives(meter, wait, TB // 2, 3 * TB // 2) == {0: pytest.approx(200), 1: pytest.approx(200)}


def test_each_drive_wears_by_what_is_written_to_it(monkeypatch, directories, wait):
    lie(monkeypatch, 1, 2)
    meter = WearMeter(directories, 400 * TB, wear_budget=lambda capacity: capacity)
    assert meter.bytes_per_day == 2 * (TB // 4096 * 4096)
    account = Account(meter, 2)
    account.states = [5 * TB, 5 * TB]
    meter.border()
    wait(DAY_S)
    account.states = [5 * TB + TB, 5 * TB]
    assert account.life(3 * TB, TB) == {0: pytest.approx(100), 1: pytest.approx(400)}
    account.states = [5 * TB, 5 * TB]
    assert account.life(0, TB) == {1: pytest.approx(400)}, "one is not written to"
    for _ in range(7):  # one has been
        warning = account.border(0, 4 * TB)
    start = f"the drive of {directories[1]} has been written the 400.0 TB that drive_endurance allows after 100.0 days"
    assert str(warning).startswith(start)


def test_a_file_system_that_tells_no_size_is_no_error(monkeypatch, tmp_path, wait):
    lie(monkeypatch, 1, capacity=0)
    account = Account(WearMeter([tmp_path], TB, wear_budget=lambda capacity: capacity or None))
    assert account.meter.bytes_per_day is None
    assert any(borders(account, wait, num=9, every_s=60, nbytes=FAST))


# -- counting ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def account(tmp_path):
    def make(rating_bytes=100 * TB, *, num_processes=1, budget=None):
        return Account(
            WearMeter([tmp_path], rating_bytes, num_processes=num_processes, wear_budget=lambda capacity: budget)
        )

    return make


def test_life_counts_from_the_first_border(account, wait):
    assert lives(account(num_processes=4).meter, wait, TB) == {0: pytest.approx(25)}, "every process writes as much"
    one = account()
    assert one.life(50 * TB) == {}
    one.meter.border()
    assert one.life(50 * TB) == {}, "no time has passed"
    wait(DAY_S / 2)
    assert one.life(50 * TB) == {}, "nothing was written"
    assert one.life(51 * TB) == {0: pytest.approx(50)}
    wait(DAY_S / 2)
    assert one.life(51 * TB) == {0: pytest.approx(100)}


def borders(one, wait, *, num, every_s, nbytes):
    told = []
    for number in range(num):
        told.append(one.border(number * nbytes) is not None)
        wait(every_s)
    return told


FAST = 10**12  # per border: any drive is worn out within hours


def test_a_warning_comes_once_and_not_before_it_can_be_trusted(account, wait):
    assert borders(account(), wait, num=40, every_s=5, nbytes=FAST) == [n == 12 for n in range(40)], "60 s"
    assert borders(account(), wait, num=20, every_s=100, nbytes=FAST) == [n == 7 for n in range(20)], "8 borders"


def test_no_warning_where_the_drive_lasts(account, wait):
    at_limit = 100 * TB // 180 // DAY_S  # bytes per second: 180 days
    assert not any(borders(account(), wait, num=40, every_s=10, nbytes=at_limit * 10))
    assert any(borders(account(), wait, num=40, every_s=10, nbytes=at_limit * 11))
    assert any(borders(account(num_processes=2), wait, num=40, every_s=10, nbytes=at_limit * 10))
    assert not any(borders(account(), wait, num=40, every_s=10, nbytes=0))


def test_a_run_that_gets_worse_is_warned_of_later(account, wait):
    one = account()
    assert not any(borders(one, wait, num=20, every_s=10, nbytes=0))
    one.states = [10 * TB]
    warning = one.border(40 * TB)
    assert warning is not None
    assert warning.startswith("the drive of /")
    assert "OffloadPolicy.wear_budget" in warning
    assert warning.endswith("Written by: activations (80%), optimizer states (20%)")
    assert one.border(60 * TB) is None
    assert one.meter.life_days(), "the number goes on"


@pytest.mark.parametrize("rating", [None, 10**9 * TB])
def test_others_that_exceed_the_budget_alone_are_refused_once_that_is_known(rating, account, wait):
    per_s = 10**9
    for num_processes, budget_per_s, is_refused in ((1, per_s, False), (1, per_s - 1, True), (2, 2 * per_s - 2, True)):
        one = account(rating, num_processes=num_processes, budget=budget_per_s * DAY_S)
        for number in range(15):
            one.states = [number * 10 * per_s]
            assert one.border(number * FAST) is None
            assert one.meter.other_bytes_per_day() == 0, "not known yet"
            wait(10)
        one.states = [150 * per_s]
        if is_refused:
            match = r"wear_budget allows .* per day, and optimizer states \(100%\) need .* per day.*Raise wear_budget"
            with pytest.raises(BudgetError, match=match):
                one.border(9 * FAST)
        else:
            assert one.border(9 * FAST) is None
        assert one.meter.other_bytes_per_day() == pytest.approx(per_s * DAY_S)


def test_what_is_written_once_is_no_rate(account, wait):
    """Weights that leave memory after the first passes, and change no more."""
    one = account(None, budget=TB)

    def go_on(num, nbytes):
        most = 0.0
        for _ in range(num):
            one.border(0)
            most = max(most, one.meter.other_bytes_per_day())
            one.states = [one.states[0] + nbytes]
            wait(10)
        return most

    go_on(20, 0)
    go_on(1, TB // 10)
    assert go_on(1000, 0) == 0, "activations would stay in memory for it"
    with pytest.raises(BudgetError):
        go_on(4000, TB // 1000)


def test_what_pauses_is_measured_over_its_pauses(account, wait):
    """Such as a validation between epochs: in training alone more is written per second than the budget allows."""
    one = account(None, budget=10**9 * DAY_S)
    for number in range(6000):
        one.states = [one.states[0] + 15 * 10**9]
        one.border(0)
        wait(10 + (number % 2000 == 0) * 20_000)
    assert one.meter.other_bytes_per_day() < 10**9 * DAY_S


@pytest.mark.parametrize("others", [0.0, 2.0 * TB])
def test_one_process_that_exceeds_the_budget_ends_all(others, account, wait):
    one = account(None, budget=TB)
    brought = list[float]()
    one.meter._agree = lambda values: brought.extend(values) or [min(*values, -others)]
    for number in range(7):
        one.states = [number]
        one.border(0)
        wait(10)
    assert brought == [], "they meet where a window ends"
    with pytest.raises(BudgetError, match=r"allows 1\.00 TB per day") if others else nullcontext():
        one.border(0)
    assert brought == [0.0]
