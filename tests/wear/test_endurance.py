"""Drive life: the numbers of the papers, and what the formula must do at its edges."""

import math

from lightning_ssd.wear.endurance import DAY_S, WARN_DAYS, life_days, wear_warning

TB = 10**12
GB = 10**9


def test_ssdtrain_at_its_worst_rate():
    """12.1 GB/s while forward runs, which is half of the step, on four 980 PRO of 1 TB; by the rating as printed."""
    assert round(life_days(600 * TB, 12.1 * GB / 2 / 4 * DAY_S), 1) == 4.6
    assert round(life_days(1_200 * TB, 16 * GB / 4 * DAY_S), 1) == 3.5, "TERAIO's"


def test_the_worked_examples():
    assert round(life_days(1_200 * TB, 10 * GB / 2 * DAY_S), 1) == 2.8
    assert round(life_days(1_200 * TB, 84 * GB / 60 * DAY_S), 1) == 9.9
    data_centre = 3 * 7_680 * GB * 365 * 5  # three drive writes per day for five years
    assert math.floor(life_days(data_centre, 84 * GB / 60 * DAY_S)) == 347


def test_nothing_written_lasts_for_ever():
    assert life_days(TB, 0) == math.inf
    assert wear_warning("/a", 1, 0, TB) is None


def test_the_warning_tells_days_bytes_drive_and_what_to_do():
    text = wear_warning("/mnt/a", 600 * TB, 1.5125 * GB * DAY_S, TB)
    assert text is not None
    assert text.startswith(
        "the drive of /mnt/a has been written the 600.0 TB that drive_endurance allows after 4.6 days of continuous "
        "use (warned of below 180): this run writes 130.7 TB to it per day, 130.7 drive writes."
    )
    for advice in ("wear_budget", "host_memory", 'activations="recompute"', '"keep"'):
        assert advice in text
    text = wear_warning("/mnt/a", TB // 1000, 1_000 * DAY_S, 0)
    assert text is not None
    assert "writes 0.1 GB to it per day. " in text


def test_the_warning_begins_exactly_at_its_days():
    assert WARN_DAYS == 180
    assert wear_warning("/a", WARN_DAYS * DAY_S * GB, GB * DAY_S, TB) is None
    assert wear_warning("/a", WARN_DAYS * DAY_S * GB - TB, GB * DAY_S, TB) is not None
