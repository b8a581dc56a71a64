"""The verdict: settled numbers first, at most three short lines, one next step."""

from dataclasses import replace

import pytest

from lightning_ssd.reports.verdict import judge
from tests.support.step_records import MIB, made_report

STATS = {
    "bytes_saved": 9000 * MIB,
    "bytes_written": 2000 * MIB,
    "bytes_read": 1900 * MIB,
    "resident_peak_bytes": 3000 * MIB,
    "settled_peak_bytes": 480 * MIB,
    "saved_peak_bytes": 3000 * MIB,
}
KEPT = {**STATS, "settled_peak_bytes": 3000 * MIB}
"""Nothing is saved."""
POLICY = made_report().policy
STATES = {"state_bytes": 800 * MIB, "resident_peak_bytes": 50 * MIB, "written_bytes": 100 * MIB, "read_bytes": 0}


def run(**changes):
    return made_report(**{"stats": STATS, "record": None, **changes})


def line(verdict, label):
    return dict(verdict.lines).get(label, "")


def test_the_settled_value_comes_first_and_not_the_highest():
    report = run()
    assert judge(report).text() == (
        "lightning_ssd: saved activations 2.93 -> 0.47 GiB (84 % saved), cost 1.0 % of the step time\n"
        "  drives   1.95 GiB written (0.25 GiB per step), 1.86 GiB read, stalls 0.1 s per step (4.0 %), drive life "
        "4,000 days of training\n"
        "  memory   peak 1.50 GiB of the process, libraries included\n"
        "  next     Nothing needs to change: keep these settings."
    )
    assert report.saved_pct == 84
    assert "(0 %" not in judge(report).text()


def test_before_a_pass_has_ended_the_peak_is_all_there_is():
    assert run(stats={**STATS, "settled_peak_bytes": 0, "resident_peak_bytes": 600 * MIB}).saved_pct == 80


@pytest.mark.parametrize(
    ("changes", "headline", "next_step"),
    [
        ({"policy": None}, "nothing was offloaded: the Trainer's strategy does not", 'Trainer(strategy="ssd_offload")'),
        (
            {"stats": {"num_kept_small": 7}},
            "no saved activation was offloaded: none has min_tensor_bytes='1MiB' or more, 7 are smaller",
            'min_tensor_bytes="64KiB"',
        ),
        (
            {"stats": {"num_kept_small": 7}, "optimizers": (STATES,)},
            "no saved activation was moved: none has min_tensor_bytes='1MiB' or more, 7 are smaller",
            'min_tensor_bytes="64KiB"',
        ),
        (
            {"stats": {}, "optimizers": (STATES,), "policy": {**POLICY, "activations": "keep"}},
            "activations are kept",
            "keep these settings",
        ),
        (
            {"stats": {"recomputed_bytes": 32 * MIB}, "policy": {**POLICY, "activations": "recompute"}},
            "blocks recomputed: saved activations 32.0 -> 0.0 MiB (100 % saved)",
            "keep these settings",
        ),
        (
            {
                "stats": {"recomputed_bytes": 32 * MIB, "num_kept_small": 7},
                "policy": {**POLICY, "activations": "recompute_offload"},
            },
            "blocks recomputed: saved activations 32.0 -> 0.0 MiB (100 % saved)",
            'min_tensor_bytes="64KiB"',
        ),
        (
            {"policy": {**POLICY, "activations": "recompute"}},
            "no block was recomputed: saved activations 2.93 GiB",
            "keep these settings",
        ),
        *(
            (
                {"stats": {**KEPT, **why}, "policy": {**POLICY, "activations": "offload"}},
                f"nothing saved: at the peak all 2.93 GiB of saved activations are in memory, because {text}",
                "",
            )
            for why, text in (
                ({"failures": 1}, "writes failed"),
                ({"bytes_held_elsewhere": 1001 * MIB}, "the program holds what was written"),
                ({"bytes_held_elsewhere": 1000 * MIB}, "writes had not ended by then"),
            )
        ),
        ({"policy": {**POLICY, "activations": "keep"}}, "saved activations 2.93 GiB, all kept as asked", '"auto"'),
        (
            {"policy": {**POLICY, "activations": "recompute"}, "stats": {**STATS, "recomputed_bytes": 9000 * MIB}},
            "blocks recomputed: saved activations 11.72 -> 2.93 GiB (75 % saved)",
            "keep these settings",
        ),
        (
            {"stats": KEPT},
            "nothing saved: at the peak all 2.93 GiB of saved activations are in memory, "
            "because moving costs more than max_slowdown=1.05 allows, or gains too little",
            'activations="offload".',
        ),
        (
            {"stats": KEPT, "machine": {"malloc": "glibc 2.36", "device": "cpu"}},
            "because without THP_MEM_ALLOC_ENABLE=1 moving costs more (page faults) than it gains",
            "Start Python with THP_MEM_ALLOC_ENABLE=1",
        ),
        (
            {"stats": KEPT, "policy": {**POLICY, "activation_budget": "4GiB"}},
            "saved activations are in memory, because the budget was never needed",
            'activations="offload".',
        ),
        (
            {"stats": KEPT, "unusable": "wear_budget allows this process 1 MB"},
            "because wear_budget allows this process 1 MB",
            'activations="offload".',
        ),
        (
            {"policy": {**POLICY, "min_tensor_bytes": "1GiB"}, "stats": {"num_kept_small": 7}},
            "none has min_tensor_bytes='1GiB' or more",
            'min_tensor_bytes="64MiB"',
        ),
    ],
)
def test_headlines(changes, headline, next_step):
    verdict = judge(run(**changes))
    assert headline in verdict.headline
    assert next_step in verdict.next_step


def test_nothing_is_saved_is_not_said_of_states_that_are():
    assert judge(run(stats=KEPT)).headline.startswith("nothing saved: at the peak all ")
    verdict = judge(run(stats=KEPT, optimizers=(STATES,)))
    assert verdict.headline.startswith("at the peak all 2.93 GiB of saved activations are in memory, because ")
    assert line(verdict, "besides").startswith("optimizer states: at most ")


def test_budgets_are_said_to_be_kept_or_not():
    policy = {**POLICY, "activation_budget": "3GiB", "memory_budget": "1GiB"}
    memory = line(judge(run(policy=policy)), "memory")
    assert "activation_budget='3GiB' kept, memory_budget='1GiB' exceeded (1.50 GiB), maybe before training" in memory


def test_states_and_weights_have_a_line_of_their_own():
    weights = {"weights_bytes": 4096 * MIB, "weights_resident_peak_bytes": 1024 * MIB, "weights_kept_bytes": MIB}
    verdict = judge(run(optimizers=(STATES, STATES), stats={**STATS, **weights}))
    assert line(verdict, "besides") == (
        "optimizer states: at most 0.10 of 1.56 GiB in memory; weights: at most 1.00 of 4.00 GiB offloaded in memory; "
        "weights: 1.0 MiB stay, because memory has room"
    ).replace("0.10 of", "0.10 GiB of").replace("1.00 of", "1.00 GiB of")
    assert "2.15 GiB written" in line(verdict, "drives")


def test_failures_are_not_hushed_up():
    drives = line(judge(run(stats={**STATS, "failures": 3, "fallbacks": 2})), "drives")
    assert "3 transfers failed, 2 made good" in drives


def test_nothing_is_claimed_without_a_number():
    verdict = judge(run(metrics={}, step_s=0.0, plan=None))
    assert "cost" not in verdict.headline
    assert "%" not in line(verdict, "drives")
    assert line(verdict, "memory") == ""


def test_at_most_three_lines_and_whose_numbers_they_are():
    verdict = judge(replace(run(optimizers=(STATES,)), num_processes=4))
    assert len(verdict.lines) == 3
    assert verdict.headline.endswith("(process 1 of 4)")
