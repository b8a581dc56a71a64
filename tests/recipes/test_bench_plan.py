"""The evidence for plans: what its verdicts make of numbers, and its real entry point at a toy size."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipes.benchmarks import plan as bench_plan
from recipes.benchmarks.harness.mode_names import parse_mode
from recipes.benchmarks.harness.shapes import TINY_PLANNED
from recipes.benchmarks.harness.tables import Sample
from recipes.benchmarks.harness.targets import judge, show_verdicts


def row(mode: str, ratio: float, **values: Any) -> dict[str, Any]:
    return {"mode": mode, "step_ratio": ratio, "resident_ratio": 0.4, "equal": True} | values


def planned(mode: str, ratio: float, **values: Any) -> dict[str, Any]:
    said = {"plan": {}, "step_error": 0.05, "peak_error": -0.05, "num_over_budget": 0, "num_checked_steps": 200}
    return row(mode, ratio, **said | ({"budget_bytes": 100} if "budget" in mode else {}) | values)


GOOD = {
    "budget": [row("keep", 1.0), planned("budget=40%", 1.04)],
    "throttle": [row("keep", 1.0), planned("auto@200MB/s", 1.02), planned("auto@50MB/s", 1.03)],
    "violations": [row("keep", 1.0), planned("budget=40%", 1.5), planned("budget=60%", 1.4)],
    "mixed": [row("keep", 1.0), row("recompute", 1.4), planned("budget=30%@50MB/s", 1.3), row("ssd@50MB/s", 9.0)],
}


def test_what_reaches_every_target() -> None:
    verdicts = judge(GOOD, {})
    assert [verdict.what for verdict in verdicts if not verdict.is_reached] == []
    texts = [f"{verdict.what}: {verdict.measured}" for verdict in verdicts]
    assert "speed of budget=40% against keep: 0.962" in texts
    assert "speed of auto@50MB/s against keep: 0.971; 60 % of the saved activations not in memory" in texts
    assert any("0 of 200" in text for text in texts)
    assert any("1.300; moving all of it alone: 9.000" in text for text in texts)
    assert any("equal in all 8 runs" in text for text in texts)


@pytest.mark.parametrize(
    ("part", "replaced", "what", "is_promise"),
    [
        ("budget", planned("budget=40%", 1.06), "speed of budget=40%", False),
        ("throttle", planned("auto@50MB/s", 1.04), "speed of auto@50MB/s", False),
        ("violations", planned("budget=60%", 1.0, num_over_budget=1), "resident peak above", True),
        ("violations", planned("budget=60%", 1.0, num_checked_steps=0), "resident peak above", True),
        ("throttle", planned("auto@50MB/s", 1.0, step_error=-0.11), "predicted / measured step", False),
        ("budget", planned("budget=40%", 1.0, peak_error=0.2), "predicted / measured peak", False),
        ("mixed", planned("budget=30%@50MB/s", 1.41), "against recomputing every block", False),
        ("violations", planned("budget=60%", 1.0, equal=False), "loss, gradients and weights", True),
        ("mixed", row("recompute", 1.4, equal=None), "loss, gradients and weights", True),
    ],
)
def test_each_target_can_be_missed(part: str, replaced: dict[str, Any], what: str, is_promise: bool) -> None:
    rows = [replaced if found["mode"] == replaced["mode"] else found for found in GOOD[part]]
    missed = [verdict for verdict in judge(GOOD | {part: rows}, {}) if not verdict.is_reached]
    assert [what in verdict.what for verdict in missed] == [True]
    assert missed[0].is_promise == is_promise


def test_a_plan_that_was_never_followed_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = judge({"budget": [row("keep", 1.0), row("budget=40%", 1.0)]}, {})
    missed = [verdict for verdict in verdicts if not verdict.is_reached]
    assert [verdict.measured for verdict in missed] == ["no plan was followed"] * 2
    show_verdicts(verdicts)
    assert "**no**" in capsys.readouterr().out


def test_a_mode_that_failed_is_a_broken_promise() -> None:
    (verdict,) = judge({}, {"mixed": ["budget=30%@50MB/s"]})
    assert not verdict.is_reached
    assert verdict.is_promise


def test_the_parts_are_modes_that_exist() -> None:
    for groups in bench_plan.PARTS.values():
        for group in groups:
            assert group[0] == "keep"
            assert [parse_mode(mode) for mode in group]


def test_wrong_parts_name_the_right_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_plan.main(["--parts", "budget,speed"])
    assert "--parts has speed; allowed: budget, throttle, violations, mixed" in capsys.readouterr().err


def test_limits_are_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_plan.os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    args = bench_plan.parse_arguments(["--tiny", "--steps", "2"])
    said = {"described": {"throttle": "a token bucket around the backend"}}
    samples = [Sample("auto@50MB/s", 0, 9, True, said), Sample("budget=40%", 0, 9, True, {"plan": {}, "described": {}})]
    text = "\n".join(bench_plan.limits(args, samples))
    for part in ("toy size", "2 timed turns", "others use this machine", "wrapper of ours did"):
        assert part in text
    assert "no plan was in force for auto@50MB/s" in text
    assert "budget=40%" not in text


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_toy_run_of_the_real_thing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its speeds mean nothing; bits and budgets hold at any size."""
    fewer = {"violations": [["keep", "budget=60%"]], "mixed": [["keep", "recompute", "budget=40%@200MB/s"]]}
    monkeypatch.setattr(bench_plan, "PARTS", fewer)
    monkeypatch.setattr(bench_plan, "TINY_PLANNED", replace(TINY_PLANNED, layers=2))
    file = tmp_path / "result.json"
    arguments = ["--tiny", "--parts", "violations,mixed", "--steps", "2", "--violation-steps", "3", "--threads", "1"]
    code = bench_plan.main([*arguments, "--dir", str(tmp_path / "spill"), "--json", str(file)])
    content = json.loads(file.read_text())
    out = capsys.readouterr().out
    assert content["refused"] == {}
    assert [v["what"] for v in content["verdicts"] if v["is_promise"] and not v["is_reached"]] == []
    assert code == 0
    assert set(content["parts"]) == {"violations", "mixed"}
    budgets = [row for row in content["parts"]["violations"] if "budget_bytes" in row]
    assert [row["num_checked_steps"] for row in budgets] == [3]
    assert all(row["equal"] for rows in content["parts"].values() for row in rows)
    assert "## Verdicts" in out
    assert "a toy size" in out
    assert str(tmp_path) not in json.dumps(content["environment"])
    assert list((tmp_path / "spill").iterdir()) == []
