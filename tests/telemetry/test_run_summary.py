from dataclasses import replace

import pytest

from lightning_ssd import OffloadPolicy, OffloadStats
from lightning_ssd.telemetry.run_summary import RunFacts, headline, summarize_run
from lightning_ssd.telemetry.stats import OptimizerStats

GIB = 1 << 30
STATS = OffloadStats(
    bytes_saved=20 * GIB,
    bytes_written=12 * GIB,
    bytes_read=11 * GIB,
    bytes_forwarded=GIB,
    stall_s=1.25,
    resident_peak_bytes=GIB // 2,
    saved_peak_bytes=3 * GIB,
    num_saved=100,
)
METRICS = {
    "memory/device_peak_gib": 4.0,
    "memory/host_peak_gib": 0.05,
    "memory/activations_resident_peak_gib": 0.75,
    "memory/activations_saved_peak_gib": 3.0,
    "io/overlap_ratio": 0.984,
}


def run(**changes):
    settings = {
        "stats": STATS,
        "policy": OffloadPolicy(),
        "backend": "posix O_DIRECT; in /mnt/nvme",
        "metrics": METRICS,
        "step_s": 100.0,
    }
    return RunFacts(**(settings | changes))


def test_a_run_that_offloaded():
    assert summarize_run(run()) == (
        "Saved activations: at most 0.75 GiB resident of 3.00 GiB that keeping would have held (25 %). "
        "12.00 GiB written, 11.00 GiB read, 1.00 GiB taken back without a read; "
        "stalled 1.2 s of 100.0 s in training steps (1.2 %), overlap 98 %. "
        "Backend: posix O_DIRECT; in /mnt/nvme. "
        "Peak memory: device 4.00 GiB, host 0.05 GiB."
    )


def test_what_the_program_holds_is_told_where_it_is_much():
    text = summarize_run(run(stats=replace(STATS, bytes_held_elsewhere=GIB + (GIB >> 4))))
    assert (
        "1.00 GiB taken back without a read (held elsewhere: 1.06 GiB, whose writes freed nothing, because the program "
        "holds those tensors); stalled" in text
    )
    assert "held elsewhere" not in summarize_run(run(stats=replace(STATS, bytes_held_elsewhere=GIB)))
    kept = replace(STATS, bytes_kept=18 * GIB, bytes_held_elsewhere=GIB // 2)
    assert "held elsewhere: 0.50 GiB" in summarize_run(run(stats=kept))


def test_failures_are_not_hushed_up():
    text = summarize_run(run(stats=OffloadStats(bytes_saved=1, failures=3, fallbacks=2)))
    assert "3 transfers failed; 2 times training went on with the tensor in memory or a second try." in text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"stats": OffloadStats(num_kept_small=7)},
            "Nothing was offloaded: no saved activation had min_tensor_bytes='1MiB' or more; "
            "7 smaller ones were kept. Lower min_tensor_bytes to move those too. ",
        ),
        (
            {"stats": OffloadStats()},
            "Nothing was offloaded: no saved activation had min_tensor_bytes='1MiB' or more; "
            "0 smaller ones were kept. ",
        ),
        (
            {"stats": OffloadStats(num_kept_small=7), "policy": OffloadPolicy(activations="keep")},
            "Nothing was offloaded: no saved activation had min_tensor_bytes='1MiB' or more; "
            "7 smaller ones were kept. ",
        ),
        (
            {"policy": OffloadPolicy(activations="keep")},
            "Saved activations: all kept in memory, as asked; at most 3.00 GiB at a time. ",
        ),
        (
            {"policy": OffloadPolicy(activations="recompute")},
            "Blocks were recomputed, as asked; what they leave was kept: at most 3.00 GiB at a time. ",
        ),
        ({"stats": None, "policy": None}, "Nothing was offloaded: the Trainer's strategy does not. "),
    ],
)
def test_a_run_that_did_not(changes, text):
    assert summarize_run(run(**changes)) == text + "Peak memory: device 4.00 GiB, host 0.05 GiB."


def test_nothing_is_claimed_without_a_number():
    text = summarize_run(run(metrics={}, step_s=0.0))
    assert "Peak memory" not in text
    assert "overlap" not in text
    assert "stalled 1.2 s of 0.0 s in training steps;" not in text
    assert "at most 0.50 GiB resident of 3.00 GiB" in text


def test_whose_numbers_they_are():
    assert summarize_run(run(num_processes=4)).endswith("Numbers of the first of 4 processes.")


def test_why_no_drive_was_used():
    text = summarize_run(run(stats=replace(STATS, bytes_written=0), unusable="the directory /spill is full"))
    assert "overlap 98 %. Nothing was moved to a drive, because the directory /spill is full. Backend: " in text
    assert "Nothing was moved" not in summarize_run(run(unusable="the directory /spill was full at first"))


PLAN = "Plan: 5.00 GiB of 6.00 GiB saved activations moved in each pass; cost 2.3 %; 3 passes, 2 plans."


def test_a_plan_is_told_of_as_it_is():
    text = summarize_run(run(plan=PLAN))
    assert f"overlap 98 %. {PLAN} Backend: " in text
    assert "Plan:" not in summarize_run(run())


@pytest.mark.parametrize("activations", ["offload", "recompute_offload"])
def test_whatever_moves_is_judged_alike(activations):
    assert summarize_run(run(policy=OffloadPolicy(activations=activations))) == summarize_run(run())


@pytest.mark.parametrize(
    ("days", "text"), [(0.04, "0.0"), (0.31, "0.3"), (9.96, "10.0"), (10.4, "10"), (12345.6, "12,346")]
)
def test_how_long_a_drive_lasts(days, text):
    sentence = f"Written to like this day and night, a drive reaches its vendor's rating in {text} days."
    assert sentence in summarize_run(run(drive_life_days=days))
    assert "rating" not in summarize_run(run())


def test_what_went_into_host_memory_is_no_write_to_a_drive():
    text = summarize_run(run(stats=replace(STATS, bytes_host=2 * GIB)))
    assert "12.00 GiB written and 2.00 GiB put into host memory, 11.00 GiB read, " in text


def test_each_sentence_has_one_unit():
    text = summarize_run(run(stats=replace(STATS, bytes_forwarded=5 << 20, resident_peak_bytes=1 << 20), metrics={}))
    assert "at most <0.01 GiB resident of 3.00 GiB that" in text
    assert "12.00 GiB written, 11.00 GiB read, <0.01 GiB taken back" in text
    assert "MiB" not in text
    small = OffloadStats(
        bytes_saved=9 << 20, bytes_written=3 << 20, saved_peak_bytes=9 << 20, resident_peak_bytes=1 << 19
    )
    text = summarize_run(run(stats=small, metrics={}))
    assert "at most 0.5 MiB resident of 9.0 MiB that" in text
    assert "3.0 MiB written, 0.0 MiB read, 0.0 MiB taken back" in text


def test_one_of_something_is_told_as_one():
    text = summarize_run(run(stats=OffloadStats(bytes_saved=1, failures=1, fallbacks=1)))
    assert "1 transfer failed; 1 time training went on with" in text
    assert "; 1 smaller one was kept. " in summarize_run(run(stats=OffloadStats(num_kept_small=1)))


STATES = OptimizerStats(
    state_bytes=8 * GIB, resident_peak_bytes=GIB // 2, written_bytes=70 * GIB, read_bytes=60 * GIB, stall_s=12.34
)


@pytest.mark.parametrize("activations", ["auto", "keep"])
def test_optimizer_states_are_told_of_whatever_becomes_of_activations(activations):
    text = summarize_run(run(policy=OffloadPolicy(activations=activations), optimizers=[STATES], drive_life_days=40.0))
    told = (
        "Optimizer states: at most 0.50 GiB of 8.00 GiB in memory; 70.00 GiB written, 60.00 GiB read; "
        "steps waited 12.3 s for them. "
    )
    assert told in text
    assert "a drive reaches its vendor's rating in 40 days. Peak memory: " in text
    assert "Optimizer" not in summarize_run(run())


def test_two_optimizers_are_told_of_together():
    text = summarize_run(run(optimizers=[STATES, STATES]))
    assert "at most 1.00 GiB of 16.00 GiB in memory; 140.00 GiB written, 120.00 GiB read; steps waited 24.7 s" in text


def test_a_line_to_compare_runs_by():
    assert headline(run()) == "activations 3.00 -> 0.75 GiB, 432.00 GiB/h written"
    told = headline(run(overhead=(0.0231, "stalls 0.4, hooks 1.5, CPU 0.4"), drive_life_days=1500.0))
    assert told == (
        "activations 3.00 -> 0.75 GiB, cost 2.3 % (stalls 0.4, hooks 1.5, CPU 0.4), 432.00 GiB/h written, "
        "drive life 4.1 years"
    )
    assert headline(run(stats=None)) == ""
    assert "written" not in headline(run(stats=OffloadStats(bytes_saved=1, saved_peak_bytes=1)))


def test_weights_that_waited():
    stats = replace(STATS, weights_bytes=4 << 30, weights_resident_peak_bytes=1 << 30)
    assert "Weights: 4.00 GiB wait on SSD, at most 1.00 GiB of them brought in at a time." in summarize_run(
        run(stats=stats)
    )
    assert "Weights:" not in summarize_run(run())


def test_weights_that_stayed_since_there_was_room():
    stats = replace(STATS, weights_bytes=4 << 30, weights_resident_peak_bytes=1 << 30, weights_kept_bytes=3 << 29)
    assert "at most 1.00 GiB of them brought in at a time; memory has room for 1.50 GiB more, which stay." in (
        summarize_run(run(stats=stats))
    )
    stats = replace(STATS, weights_kept_bytes=3 << 29)
    assert "Weights: none wait on SSD, since memory has room for all 1.50 GiB that could." in summarize_run(
        run(stats=stats)
    )
