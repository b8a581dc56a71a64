"""Each rule speaks when it should, says what to set, and is silent otherwise."""

import re
from dataclasses import replace

import pytest

from lightning_ssd.config import OffloadPolicy
from lightning_ssd.reports.adviser import advise
from lightning_ssd.telemetry.step_record import Move, Wait
from tests.support.step_records import MIB, made_record, made_report


def told(report, words):
    found = [sentence for sentence in advise(report) if words in sentence]
    assert len(found) <= 1
    return found[0] if found else None


def test_a_good_run_needs_nothing():
    assert advise(made_report(record=made_record(waits=(), weight_bytes=9 * MIB))) == [
        "Nothing needs to change: keep these settings."
    ]


def test_reads_that_are_waited_for_name_the_rate_and_a_budget():
    moves = (Move("read", "ssd", 500 * MIB, 1.0, 1.5),)
    waited = (Wait(1.1, 1.4),)
    report = made_report(record=made_record(moves=moves, waits=waited))
    sentence = told(report, "are the limit")
    assert "waited 0.3 s of a step of 2.5 s" in sentence
    assert "1 GB/s" in sentence
    # 0.3 s at 1 GB/s are 287 MiB more than the 200 that were resident.
    assert 'activation_budget="487MiB"' in sentence
    all_fits = replace(report, stats={**report.stats, "saved_peak_bytes": 400 * MIB})
    assert "activation_budget" not in (told(all_fits, "are the limit") or "activation_budget")
    no_read, short = made_record(moves=(), waits=waited), made_record(moves=moves, waits=(Wait(1.1, 1.14),))
    for record in (no_read, short):
        assert told(made_report(record=record), "are the limit") is None


def test_forward_that_waits_for_room():
    report = made_report(record=made_record(waits=(Wait(0.2, 0.7),)))
    sentence = told(report, "for room")
    assert "Forward waited 0.5 s" in sentence
    assert "activation_budget=" in sentence
    assert told(made_report(record=made_record(waits=(Wait(2.1, 2.4),))), "The optimizer's step waited") is not None


@pytest.mark.parametrize(
    ("malloc", "device", "is_advised"),
    [
        ("glibc 2.36", "cpu", True),
        ("glibc 2.36, tensors in whole pages", "cpu", False),
        ("glibc 2.36", "cuda:0", False),
        ("tcmalloc", "cpu", False),
    ],
)
def test_the_switch_that_makes_moving_cheap_is_advised(malloc, device, is_advised):
    report = made_report(machine={"malloc": malloc, "device": device})
    assert (told(report, "THP_MEM_ALLOC_ENABLE=1") is not None) is is_advised


def test_what_a_budget_costs_is_no_broken_promise():
    costly = {**PLAN, "measured_overhead": 0.08}
    for budget in ("memory_budget", "activation_budget"):
        policy = {**POLICY, budget: "8GiB"}
        assert told(made_report(plan=costly, policy=policy), "Moving took") is None
        assert told(made_report(plan=costly, policy={**POLICY, budget: None}), "Moving took") is not None


def test_two_points_above_the_promise_are_the_machines():
    assert told(made_report(plan={**PLAN, "measured_overhead": 0.069}), "Moving took") is None


STATS = made_report().stats
POLICY = made_report().policy
PLAN = made_report().plan
METRICS = made_report().metrics


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stats": {**STATS, "failures": 2}}, "2 transfers failed"),
        (
            {"stats": {**STATS, "bytes_saved": 9 * MIB, "bytes_kept": 5 * MIB, "bytes_held_elsewhere": MIB}},
            "Of 4.0 MiB sent away, 1.0 MiB never left",
        ),
        ({"unusable": "it is full", "stats": {**STATS, "bytes_written": 0}}, "because it is full"),
        ({"policy": None}, 'Trainer(strategy="ssd_offload")'),
        ({"policy": {**POLICY, "activations": "keep"}}, 'activations="auto" moves what pays'),
        (
            {"plan": {**PLAN, "measured_overhead": 0.0712}},
            "7.1 % of a pass, more than the 5 % that max_slowdown allows; to move less: max_slowdown=1.025",
        ),
        ({"metrics": {**METRICS, "wear/drive_life_days": 90.0}}, "in 90 days"),
        ({"stats": {**STATS, "resident_peak_bytes": 2000 * MIB}}, 'whatever it costs: activations="offload".'),
        (
            {"unusable": "wear_budget allows too little", "stats": {**STATS, "bytes_written": 0}},
            "too little. Raise it in that proportion, or leave it out.",
        ),
    ],
)
def test_rules(changes, words):
    assert told(made_report(**changes), words) is not None
    assert told(made_report(), words) is None


@pytest.mark.parametrize(
    ("policy", "rung"),
    [
        (
            {"activations": "offload", "max_slowdown": 1.5, "optimizer_states": "keep", "recompute_modules": []},
            "offload optimizer states (37.0 MiB; saved activations 11.0 MiB): "
            'OffloadPolicy(activations="offload", optimizer_states="offload", max_slowdown=1.5).',
        ),
        (
            {"optimizer_states": "offload"},
            "offload weights and gradients (24.0 MiB; saved activations 11.0 MiB): "
            'OffloadPolicy(parameters="offload", gradients="offload", optimizer_states="offload").',
        ),
        ({"optimizer_states": "offload", "parameters": "offload"}, None),
    ],
)
def test_the_next_rung_is_the_largest_part_with_the_line_to_paste(policy, rung):
    record = made_record(waits=(), state_bytes=37 * MIB, weight_bytes=19 * MIB, gradient_bytes=5 * MIB)
    toy = {"record": record, "stats": {**STATS, "settled_peak_bytes": 11 * MIB}, "policy": {**POLICY, **policy}}
    well = "Nothing needs to change: keep these settings."
    assert advise(made_report(**toy)) == [well if rung is None else f"{well} For less memory {rung}"]
    assert (
        advise(made_report(**toy, metrics={"wear/drive_life_days": 9.0}))[1:]
        == [f"For less memory {rung}"][: bool(rung)]
    )
    assert advise(made_report(**toy, num_processes=2)) == [well], "weights of several processes may not wait"
    if rung is not None:
        line = rung.partition(": ")[2].removesuffix(".")
        assert eval(line, {"OffloadPolicy": OffloadPolicy}).optimizer_states == "offload"


@pytest.mark.parametrize("activations", ["auto", "offload", "recompute_offload"])
def test_every_line_to_write_is_taken(activations):
    """By the policy of the run that is advised."""
    policy = {**POLICY, "activations": activations}
    reads = (Move("read", "ssd", 500 * MIB, 1.0, 1.5),)
    record = made_record(moves=reads, waits=(Wait(1.1, 1.4), Wait(0.1, 0.6)))
    metrics = {**METRICS, "wear/drive_life_days": 90.0}
    advised = advise(made_report(policy=policy, record=record, metrics=metrics))
    small = {"num_kept_small": 3}
    advised += advise(made_report(policy=policy, stats=small)) + advise(
        made_report(policy={**policy, "min_tensor_bytes": "4KiB"}, stats=small)
    )
    lines = [line for sentence in advised for line in re.findall(r'(?:[a-z_]+="[^"]*"(?:, )?)+', sentence)]
    assert len(lines) > 2
    for line in lines:
        replace(OffloadPolicy(**policy), **dict(re.findall(r'([a-z_]+)="([^"]*)"', line)))
    smallest = advise(made_report(policy={**policy, "min_tensor_bytes": 1024}, stats=small))
    assert not [sentence for sentence in smallest if "To move" in sentence]
