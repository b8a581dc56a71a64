"""Drive life: the numbers of the papers, and what the formula must do at its edges."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ssd.wear.endurance import WARN_DAYS, Drive, life_days, used_bytes, wear_warning

TB = 10**12
GB = 10**9
FOUR_980_PRO = [Drive(600 * TB, share=0.25)] * 4


def test_ssdtrain_at_its_worst_rate():
    """12.1 GB/s while forward runs, which is half of the step, on four 980 PRO of 1 TB; by the rating as printed."""
    step_s = 10.0
    activations = round(12.1 * GB * step_s / 2)
    assert round(life_days(FOUR_980_PRO, activations, step_s) or 0, 1) == 4.6
    teraio = [Drive(1_200 * TB, share=0.25)] * 4
    assert round(life_days(teraio, 16 * GB, 1.0) or 0, 1) == 3.5


def test_the_worked_examples():
    consumer = [Drive(1_200 * TB)]
    assert round(life_days(consumer, 10 * GB, 2.0) or 0, 1) == 2.8
    assert round(life_days(consumer, 84 * GB, 60.0) or 0, 1) == 9.9
    data_centre = 3 * 7_680 * GB * 365 * 5  # three drive writes per day for five years
    assert math.floor(life_days([Drive(data_centre)], 84 * GB, 60.0) or 0) == 347


def test_the_least_of_the_drives_counts():
    one_day = 86_400 * GB  # at 1 GB a second
    young, old, busy = Drive(10 * one_day), Drive(10 * one_day, used_bytes=6 * one_day), Drive(10 * one_day, share=0.5)
    assert life_days([young], GB, 1.0) == 10
    assert life_days([old], GB, 1.0) == 4
    assert life_days([busy], GB, 1.0) == 20
    assert life_days([busy, young, old], GB, 1.0) == 4
    assert life_days([], GB, 1.0) is None


def test_nothing_written_lasts_for_ever_and_a_worn_drive_not_a_day():
    assert life_days([Drive(TB)], 0, 1.0) == math.inf
    assert life_days([Drive(TB, share=0.0)], GB, 1.0) == math.inf
    assert life_days([Drive(TB, used_bytes=2 * TB)], GB, 1.0) == 0
    assert life_days([Drive(TB, used_bytes=2 * TB)], 0, 1.0) == math.inf


drives = st.builds(Drive, st.integers(1, 10**17), used_bytes=st.integers(0, 10**16), share=st.floats(0, 1))


@given(st.lists(drives, max_size=5), st.integers(0, 10**13), st.floats(1e-3, 1e4), st.integers(1, 9))
def test_more_writes_and_more_drives_never_last_longer(some, nbytes, step_s, factor):
    life, shorter = life_days(some, nbytes, step_s), life_days(some, nbytes * factor, step_s)
    if life is None or shorter is None:
        assert life is shorter is None
        assert not some
        return
    assert 0 <= shorter <= life
    for drive in some:
        alone = life_days([drive], nbytes, step_s)
        assert alone is None or life <= alone


@pytest.mark.parametrize(
    ("written", "percentage", "used"),
    [(None, 0, 0), (300 * TB, 0, 300 * TB), (None, 25, 150 * TB), (300 * TB, 25, 300 * TB), (TB, 120, 720 * TB)],
)
def test_used_life_is_the_larger_of_what_is_told(written, percentage, used):
    assert used_bytes(600 * TB, written_bytes=written, percentage_used=percentage) == used


def test_the_warning_tells_days_bytes_drive_and_what_to_do():
    fine = Drive(10**9 * TB, name="nvme1n1", share=0.75)
    worn = Drive(600 * TB, name="nvme0n1", share=0.25, capacity_bytes=TB)
    text = wear_warning([fine, worn], round(6.05 * GB), 1.0)
    assert text.startswith(
        "drive nvme0n1 reaches its rated 600.0 TB after 4.6 days of continuous use (warned of below 180): "
        "this run writes 130.7 TB to it per day, 130.7 drive writes."
    )
    for advice in ("wear_budget", "host_memory", 'activations="recompute"', '"keep"'):
        assert advice in text
    text = wear_warning([Drive(600 * TB, used_bytes=700 * TB)], 1_000, 1.0)
    assert text.startswith("a drive is past its rated 600.0 TB already (700.0 TB used)")
    assert "writes 0.1 GB to it per day. " in text


def test_the_warning_begins_exactly_at_its_days():
    rating = WARN_DAYS * 86_400 * GB
    assert WARN_DAYS == 180
    assert wear_warning([Drive(rating)], GB, 1.0) is None
    assert wear_warning([Drive(rating - TB)], GB, 1.0) is not None
    assert wear_warning([Drive(rating, used_bytes=TB)], GB, 1.0) is not None
    assert wear_warning([], 10**18, 1.0) is None
    assert wear_warning([Drive(1)], 0, 1.0) is None
