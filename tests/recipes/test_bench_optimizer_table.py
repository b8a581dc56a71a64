"""The tables of the benchmark of optimizer states: ratios and equal bits."""

from __future__ import annotations

from typing import Any

import pytest

from recipes.benchmarks.harness.optimizer_tables import broken, show, summarise
from recipes.benchmarks.harness.tables import Sample

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


def test_what_failed_or_has_other_bits_breaks_the_benchmark() -> None:
    def row(mode: str, *, equal: bool | None = True, states_equal: bool | None = True) -> dict[str, Any]:
        return {"mode": mode, "equal": equal, "states_equal": states_equal}

    assert broken({"main": [row("torch"), row("ssd"), row("two_paths", states_equal=None)]}, {}) == []
    assert broken({"main": [row("ssd", equal=None)]}, {}) == [], "nothing was compared"
    for wrong in (row("ssd", equal=False), row("ssd", equal=None), row("ssd", states_equal=False)):
        assert broken({"odd 320": [row("torch"), wrong]}, {}) == ["odd 320: ssd has other bits than torch"]
    assert broken({}, {"main": ["ssd"]}) == ["main: ssd failed"]
