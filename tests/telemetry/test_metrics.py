import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ssd.memory.readings import MemoryReadings
from lightning_ssd.telemetry.events import StallEvent, TransferEvent
from lightning_ssd.telemetry.metrics import (
    METRICS,
    NUM_DRIVES,
    MetricWindow,
    compute,
    intersection,
    merge_ranks,
    overlap_ratio,
    union_s,
)
from lightning_ssd.telemetry.stats import OffloadStats, SavedBytes

GIB = 1 << 30

# Quarters are exact in binary floating point, so that sums can be compared without a tolerance.
instants = st.integers(0, 80).map(lambda quarter: quarter / 4)
intervals = st.tuples(instants, instants)
interval_lists = st.lists(intervals, max_size=12)


def covered_quarters(pairs):
    """A toy model: which quarters of a second are covered."""
    return {quarter for start, end in pairs for quarter in range(int(start * 4), int(end * 4))}


@given(interval_lists)
def test_union_equals_counting_quarters(pairs):
    assert union_s(pairs) == len(covered_quarters(pairs)) / 4


@given(interval_lists, st.randoms(use_true_random=False), st.integers(-100, 100))
def test_union_ignores_order_repetition_and_origin(pairs, rng, shift):
    shuffled = [*pairs, *pairs]
    rng.shuffle(shuffled)
    assert union_s((start + shift, end + shift) for start, end in shuffled) == union_s(pairs)


@given(interval_lists, interval_lists)
def test_intersection_equals_counting_quarters(first, second):
    both = intersection(first, second)
    assert covered_quarters(both) == covered_quarters(first) & covered_quarters(second)
    assert both == sorted(both)


@given(interval_lists, interval_lists)
def test_overlap_ratio_is_a_ratio(stalls, transfers):
    ratio = overlap_ratio(stalls, transfers)
    if not covered_quarters(transfers):
        assert ratio is None
    else:
        assert 0 <= ratio <= 1
        assert overlap_ratio([], transfers) == 1
        assert overlap_ratio(transfers, transfers) == 0
    assert overlap_ratio([(3, 4)], [(0, 2), (1, 4), (1, 3)]) == 0.75, "parallel transfers count once"


def transfer(direction, nbytes, start, end, **more):
    return TransferEvent(direction, nbytes, start_s=start, end_s=end, **more)


EVENTS = (
    transfer("write", GIB, 0.0, 1.0),
    transfer("write", GIB, 0.5, 2.0),
    transfer("write", 99 * GIB, 0.0, 9.0, failed=True),
    transfer("write", 7 * GIB, 2.0, 2.5, tier="host"),
    transfer("read", 3 * GIB, 4.0, 5.0),
    StallEvent(3 * GIB, 4.5, 5.0),
)
BEFORE = OffloadStats(bytes_written=GIB, bytes_read=GIB, stall_s=1.0, hook_s=0.125, cpu_s=0.25)
NOW = OffloadStats(
    bytes_written=3 * GIB,
    bytes_read=4 * GIB,
    bytes_host=7 * GIB,
    bytes_forwarded=GIB // 2,
    bytes_held_elsewhere=GIB // 8,
    stall_s=1.5,
    stall_backward_s=0.25,
    stall_update_s=0.125,
    hook_s=0.375,
    cpu_s=0.75,
    resident_peak_bytes=GIB,
    saved_peak_bytes=5 * GIB,
    weights_bytes=6 * GIB,
    weights_resident_peak_bytes=GIB // 2,
)
READINGS = MemoryReadings(host_bytes=GIB, host_peak_bytes=2 * GIB, device_bytes=0, device_peak_bytes=3 * GIB)


PLAN = {
    "plan/predicted_step_s": 4.0,
    "plan/measured_step_s": 5.0,
    "plan/predicted_peak_gib": GIB,
    "plan/measured_peak_gib": 2 * GIB,
    "plan/predicted_stall_s": 0.25,
    "plan/num_plans": 3,
    "plan/predicted_overhead_ratio": 0.02,
    "plan/overhead_ratio": 0.04,
    "plan/recomputed_gib": GIB // 8,
}
DRIVES = [metric.key for metric in METRICS if metric.key.startswith("io/drive")]
LIVES = [f"wear/drive{number}_life_days" for number in range(NUM_DRIVES)]


def sample(events=EVENTS, before=BEFORE, now=NOW, readings=READINGS, plan=PLAN, drive_life_days=500.0, num_drives=1):
    return compute(
        events,
        stats_before=before,
        stats_now=now,
        readings=readings,
        plan=plan,
        drive_life_days=drive_life_days if isinstance(drive_life_days, dict) else {0: drive_life_days},
        num_drives=num_drives,
        step_s=2.0,
        states_bytes=GIB // 4,
        host_tier_bytes=8 * GIB,
        worst=SavedBytes(5 * GIB, GIB, 3 * GIB, 2 * GIB),
    )


def test_the_numbers_of_one_sample():
    assert sample() == pytest.approx(
        {
            "time/step_s": 2,
            "memory/device_peak_gib": 3,
            "memory/host_peak_gib": 2,
            "memory/activations_resident_peak_gib": 1,
            "memory/activations_saved_peak_gib": 5,
            "memory/activations_kept_at_peak_gib": 1,
            "memory/activations_host_at_peak_gib": 3,
            "memory/activations_ssd_at_peak_gib": 1,
            "memory/activations_recomputed_at_peak_gib": 2,
            "memory/states_resident_gib": 0.25,
            "memory/host_tier_gib": 8,
            "memory/weights_offloaded_gib": 6,
            "memory/weights_resident_peak_gib": 0.5,
            "io/write_gib": 2,
            "io/read_gib": 3,
            "io/host_gib": 7,
            "io/forwarded_gib": 0.5,
            "io/held_elsewhere_gib": 0.125,
            "io/stall_s": 0.5,
            "io/stall_ratio": 0.25,
            "io/hook_s": 0.25,
            "io/cpu_s": 0.5,
            "io/stall_forward_s": 0.125,
            "io/stall_backward_s": 0.25,
            "io/stall_update_s": 0.125,
            "io/overlap_ratio": 1 - 0.5 / 3.5,
            "io/write_gib_per_s": 1,
            "io/read_gib_per_s": 3,
            "wear/written_tb": 3 * GIB / 1e12,
            "wear/drive_life_days": 500,
            "plan/predicted_step_s": 4,
            "plan/measured_step_s": 5,
            "plan/predicted_peak_gib": 1,
            "plan/measured_peak_gib": 2,
            "plan/predicted_stall_s": 0.25,
            "plan/num_plans": 3,
            "plan/predicted_overhead_ratio": 0.02,
            "plan/overhead_ratio": 0.04,
            "plan/recomputed_gib": 0.125,
        }
    )


def test_keys_and_table_are_the_same():
    absent = ("memory/worst_rank", "io/busiest_drive_ratio", *DRIVES, *LIVES)
    assert list(sample()) == [metric.key for metric in METRICS if metric.key not in absent]


def sample_of_drives(events, num_drives):
    nothing = OffloadStats()
    row = compute(events, stats_before=nothing, stats_now=nothing, readings=MemoryReadings(), num_drives=num_drives)
    return {key: value for key, value in row.items() if key.startswith(("io/drive", "io/busiest"))}


DRIVEN = (
    transfer("write", GIB, 0.0, 1.0, drive=0),
    transfer("write", GIB, 0.5, 2.0, drive=0),
    transfer("write", GIB, 0.0, 4.0, drive=1),
    transfer("write", 9 * GIB, 0.0, 4.0, drive=1, failed=True),
    transfer("write", 9 * GIB, 0.0, 4.0, tier="host"),
    transfer("read", 2 * GIB, 4.0, 5.0, drive=1),
)


def test_each_of_several_drives_has_its_numbers():
    assert sample_of_drives(DRIVEN, 3) == {
        "io/busiest_drive_ratio": 0.6,
        "io/drive0_write_gib": 2,
        "io/drive0_write_gib_per_s": 1,
        "io/drive0_read_gib": 0,
        "io/drive1_write_gib": 1,
        "io/drive1_write_gib_per_s": 0.25,
        "io/drive1_read_gib": 2,
        "io/drive1_read_gib_per_s": 2,
        "io/drive2_write_gib": 0,
        "io/drive2_read_gib": 0,
    }
    assert sample_of_drives((), 2) == dict.fromkeys((key for key in DRIVES if key[8] in "01" and key[-1] == "b"), 0)


def test_a_drive_alone_and_one_too_many_have_no_keys():
    assert sample_of_drives(DRIVEN, 1) == {}
    far = transfer("write", GIB, 0.0, 1.0, drive=NUM_DRIVES)
    row = sample_of_drives((far, *DRIVEN), NUM_DRIVES + 1)
    assert set(row) <= {*DRIVES, "io/busiest_drive_ratio"}
    assert row["io/busiest_drive_ratio"] == 0.5


def test_the_rate_of_a_drive_over_several_steps_is_all_bytes_over_all_busy_time():
    window = MetricWindow()
    for nbytes, end in ((GIB, 1.0), (GIB, 3.0), (0, 0.0)):
        window.add(sample_of_drives((transfer("write", nbytes, 0.0, end, drive=1),), 2))
    assert window.result()["io/drive1_write_gib"] == pytest.approx(2 / 3)
    assert window.result()["io/drive1_write_gib_per_s"] == 0.5


@pytest.mark.parametrize(
    ("days", "num_drives", "told"),
    [
        ({}, 2, {}),
        ({0: 4.5}, 1, {"wear/drive_life_days": 4.5}),
        ({0: 0.0, 1: 4.5}, 2, {"wear/drive_life_days": 0, "wear/drive0_life_days": 0, "wear/drive1_life_days": 4.5}),
        ({NUM_DRIVES: 4.5}, NUM_DRIVES + 1, {"wear/drive_life_days": 4.5}),
    ],
)
def test_the_life_of_each_drive_is_told_and_the_shortest_one(days, num_drives, told):
    row = sample(drive_life_days=days, num_drives=num_drives)
    assert {key: value for key, value in row.items() if key.endswith("life_days")} == told
    json.dumps(row, allow_nan=False)


def test_a_window_merges_by_the_rule_of_the_table():
    slow = (transfer("write", 2 * GIB, 10.0, 18.0), StallEvent(1, 16.0, 18.0))
    later = replace(NOW, bytes_written=5 * GIB, resident_peak_bytes=GIB // 2)
    window = MetricWindow()
    window.add(sample())
    later_plan = {**PLAN, "plan/predicted_step_s": 6.0, "plan/predicted_peak_gib": GIB // 2, "plan/num_plans": 4}
    window.add(sample(slow, before=NOW, now=later, plan=later_plan, drive_life_days=400.0))
    row = window.result()
    assert row["io/write_gib"] == 2
    assert row["io/read_gib"] == 1.5
    assert row["io/write_gib_per_s"] == pytest.approx(4 / (2 + 8)), "all bytes over all busy time"
    assert row["io/read_gib_per_s"] == pytest.approx(3), "a step without reads has no say in their rate"
    ratio = (19 * (1 - 0.5 / 3.5) + 2 * 0.75) / 21
    assert row["io/overlap_ratio"] == pytest.approx(ratio), "weighted by bytes moved; host bytes go down and come back"
    assert row["memory/activations_resident_peak_gib"] == 1
    assert row["wear/written_tb"] == pytest.approx(5 * GIB / 1e12)
    assert row["io/host_gib"] == 3.5
    assert row["wear/drive_life_days"] == 400
    assert row["plan/predicted_step_s"] == 5
    assert row["plan/predicted_peak_gib"] == 1
    assert row["plan/num_plans"] == 4


def test_rows_of_several_processes_are_merged_by_the_rule_of_the_table():
    first = {
        "time/step_s": 1.0,
        "memory/device_peak_gib": 2.0,
        "io/write_gib": 1.0,
        "io/overlap_ratio": 0.5,
        "wear/drive_life_days": 90.0,
    }
    second = {**first, "time/step_s": 3.0, "memory/device_peak_gib": 5.0, "wear/drive_life_days": 10.0}
    third = {"memory/device_peak_gib": 1.0, "io/overlap_ratio": 1.0}  # nothing was moved to its drives
    assert merge_ranks([first, second, third]) == {
        "time/step_s": 3.0,
        "memory/device_peak_gib": 5.0,
        "memory/worst_rank": 1.0,
        "io/write_gib": 2.0,
        "io/overlap_ratio": pytest.approx(2 / 3),
        "wear/drive_life_days": 10.0,
    }
    assert merge_ranks([{"memory/host_peak_gib": 1.0}, {"memory/host_peak_gib": 2.0}])["memory/worst_rank"] == 1
    assert merge_ranks([{}, {}]) == {"memory/worst_rank": 0}
