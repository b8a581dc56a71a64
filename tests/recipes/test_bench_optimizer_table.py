"""The tables of the benchmark of optimizer states: ratios, equal bits, and which targets are reached."""

from __future__ import annotations

from typing import Any

import pytest

from recipes.benchmarks.harness.optimizer_tables import judge, show, summarise
from recipes.benchmarks.harness.tables import Sample
from recipes.benchmarks.harness.targets import show_verdicts

MIB = 1 << 20


def sample(mode: str, step: int, seconds: float, **values: Any) -> Sample:
    filled: dict[str, Any] = {
        "step_s": seconds,
        "settled_s": seconds,
        "host_peak_bytes": 9 * MIB,
        "device_peak_bytes": None,
    }
    filled |= {"peak_above_base_bytes": 2 * MIB, "weights": f"weights of step {step}"}
    if mode != "torch":
        filled |= {"written_bytes": 8, "read_bytes": 8, "kept_bytes": 0, "state_bytes": 8, "subgroup_bytes": 1}
        filled |= {"resident_peak_bytes": step, "limit_s": seconds / 1.1, "turned_limit_s": seconds / 0.5}
    return Sample(mode, 0, step, step > 0, filled | values, step == 0)


def run_of(mode: str, *seconds: float, **last: Any) -> list[Sample]:
    found = [sample(mode, step, time_s) for step, time_s in enumerate((99.0, *seconds))]
    found[-1].values.update(last)
    return found


def test_ratios_are_paired_and_warm_up_is_left_out() -> None:
    """A machine that is ten times slower in one turn changes no ratio."""
    runs = [run_of("torch", 1, 10, 2), run_of("two_paths", 3, 30, 6), run_of("one_path", 4.5, 45, 9)]
    plain, two, one = summarise([found for run in runs for found in run])
    assert (plain["step_ratio"], two["step_ratio"], one["step_ratio"]) == (1, 3, 4.5)
    assert two["two_paths_gain"] == 1.5
    assert (two["num_steps"], two["num_compared"]) == (3, 4)
    assert two["limit_ratio"] == pytest.approx(1.1)
    assert two["turned_limit_ratio"] == pytest.approx(0.5)
    assert two["resident_share"] == 3 / 8
    assert plain["resident_share"] is plain["limit_ratio"] is None


@pytest.mark.parametrize(
    ("changed", "equal", "states_equal"),
    [
        ({"states": "s"}, True, True),
        ({"states": "t"}, True, False),
        ({"states": "s", "weights": "others"}, False, True),
        ({}, True, None),
    ],
)
def test_one_wrong_bit_is_reported(
    changed: dict[str, Any], equal: bool, states_equal: bool | None, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = summarise([*run_of("torch", 1, 1, states="s"), *run_of("ssd", 1, 1, **changed)])
    assert (rows[1]["equal"], rows[1]["states_equal"]) == (equal, states_equal)
    show(rows)
    assert ("DIFFERENT" in capsys.readouterr().out) == (not equal or states_equal is False)


def test_without_pytorchs_run_nothing_is_called_equal() -> None:
    (row,) = summarise(run_of("ssd", 1, 1))
    assert row["equal"] is None
    assert summarise([*run_of("torch", 1), *run_of("ssd", 1, 1)])[1]["equal"] is None


def row(mode: str, **values: Any) -> dict[str, Any]:
    filled = {"mode": mode, "written_bytes": 80, "read_bytes": 80, "resident_share": 0.08, "limit_ratio": 1.1}
    filled |= {"turned_limit_ratio": 0.9, "checkpoint_extra_bytes": 20, "subgroup_bytes": 10, "two_paths_gain": None}
    return filled | {"equal": True, "states_equal": True, "num_compared": 7} | values


GOOD = {
    "main": [
        row("torch"),
        row("ssd"),
        row("cache=50%", written_bytes=40, read_bytes=42),
        row("two_paths", two_paths_gain=1.3),
        row("one_path"),
    ],
    "odd 320": [row("torch"), row("ssd", resident_share=1.0)],
}


def test_what_reaches_every_target(capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = judge(GOOD, {})
    assert [verdict.what for verdict in verdicts if not verdict.is_reached] == []
    assert len(verdicts) == 6
    show_verdicts(verdicts)
    assert "equal in all 35 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("part", "replaced", "what", "is_promise"),
    [
        ("main", row("ssd", resident_share=0.11), "states resident", True),
        ("main", row("ssd", resident_share=None), "states resident", True),
        ("main", row("ssd", limit_ratio=1.16), "the drive's limit", False),
        ("main", row("ssd", limit_ratio=None), "the drive's limit", False),
        ("main", row("ssd", checkpoint_extra_bytes=21), "a checkpoint takes", True),
        ("main", row("ssd", checkpoint_extra_bytes=None), "a checkpoint takes", True),
        ("main", row("two_paths", two_paths_gain=1.24), "speed of two paths", False),
        ("main", row("two_paths"), "speed of two paths", False),
        ("main", row("cache=50%", written_bytes=50, read_bytes=42), "bytes moved by cache=50%", True),
        ("main", row("one_path", equal=False), "weights after every step", True),
        ("main", row("one_path", states_equal=False), "weights after every step", True),
        ("odd 320", row("ssd", equal=None), "weights after every step", True),
    ],
)
def test_each_target_can_be_missed(part: str, replaced: dict[str, Any], what: str, is_promise: bool) -> None:
    rows = [replaced if found["mode"] == replaced["mode"] else found for found in GOOD[part]]
    missed = [verdict for verdict in judge(GOOD | {part: rows}, {}) if not verdict.is_reached]
    assert [what in verdict.what for verdict in missed] == [True]
    assert missed[0].is_promise == is_promise
    if "weights" not in what:
        assert not any(verdict.is_promise for verdict in judge({part: rows}, {}, is_toy=True) if not verdict.is_reached)


def test_a_mode_that_failed_is_a_broken_promise() -> None:
    (verdict,) = judge({}, {"odd 960": ["ssd"]}, is_toy=True)
    assert verdict.is_promise
    assert not verdict.is_reached


def test_what_nothing_was_compared_with_is_neither_equal_nor_different() -> None:
    rows = [row(mode="ssd", equal=None, states_equal=None)]
    verdict = judge({"main": rows}, {})[-1]
    assert verdict.measured == "not compared: torch did not run"
    assert not verdict.is_promise
    assert not verdict.is_reached
