"""The recompute-offload-keep curve: its arithmetic, its picture, and a toy run of the real thing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib import image

from lightning_ssd.planning.plan import Machine, TierRates
from lightning_ssd.planning.trace import Trace, TracedBlock, TracedStorage
from recipes.benchmarks import keep_recompute_offload
from recipes.benchmarks.harness import groups as bench_groups
from recipes.benchmarks.harness import rounds as bench_round
from recipes.benchmarks.harness.curve_plot import draw, label
from recipes.benchmarks.harness.groups import split
from recipes.benchmarks.harness.process import ChildDiedError
from recipes.benchmarks.harness.profile_json import machine_from_json, trace_from_json, trace_to_json
from recipes.benchmarks.harness.shapes import TINY_PLANNED
from recipes.benchmarks.harness.tables import Sample
from recipes.benchmarks.step import parse_arguments as step_arguments

MIB = 1 << 20


def made_trace(num_blocks: int = 6, nbytes: int = 8 * MIB) -> Trace:
    """Blocks of 0.1 s forward and 0.2 s backward, each of which saves two storages."""
    end_s = num_blocks * 0.3
    storages, blocks = [], []
    for block in range(num_blocks):
        begin_s, back_s = block * 0.1, end_s - (block + 1) * 0.2
        storages += [
            TracedStorage(
                nbytes=nbytes,
                packed_s=begin_s + 0.05 * part,
                last_used_s=begin_s + 0.1,
                wanted_s=back_s + 0.01,
                freed_s=back_s + 0.2,
                block=block,
            )
            for part in range(2)
        ]
        blocks.append(
            TracedBlock(
                name="Block",
                forward_start_s=begin_s,
                forward_end_s=begin_s + 0.1,
                backward_start_s=back_s,
                backward_end_s=back_s + 0.2,
                input_nbytes=nbytes // 8,
            )
        )
    return Trace(
        storages=tuple(storages),
        order=tuple(reversed(range(len(storages)))),
        blocks=tuple(blocks),
        forward_end_s=num_blocks * 0.1,
        end_s=end_s,
    )


def made_machine(rate: float) -> Machine:
    return Machine(ssd=TierRates(write_bytes_per_s=rate, read_bytes_per_s=rate))


def point(mode: str, peak_mib: float, speed: float, **values: Any) -> dict[str, Any]:
    filled = {"step_ratio_quartiles": [0.9, 1.1], "equal": True}
    return {"mode": mode, "peak_bytes": peak_mib * MIB, "tokens_per_s": speed} | filled | values


CANNED = {
    "points": [
        point("keep", 4315, 500.0, step_ratio_quartiles=[1.0, 1.0]),
        point("ssd", 350, 480.0),
        point("auto", 900, 495.0),
        point("budget=20%", 863, 490.0),
        point("budget=40%", 1726, 498.0),
        point("ours_recompute", 820, 370.0),
        point("recompute_offload", 700, 365.0, step_ratio_quartiles=None),
        point("budget=30%@50MB/s", 1290, 420.0),
    ],
    "curves": [
        {
            "label": "keep, offload; drive as it is",
            "throttle": None,
            "recompute": False,
            "points": [point("", 400, 450.0), point("", 4315, 500.0)],
        },
        {
            "label": "keep, offload, recompute; drive at 50MB/s",
            "throttle": "50MB/s",
            "recompute": True,
            "points": [point("", 4315, 500.0), point("", 900, 380.0)],
        },
    ],
    "refused": [],
}


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    draw(CANNED, tmp_path / "rok.png")
    pixels = image.imread(tmp_path / "rok.png")
    assert pixels.shape[0] > 600
    assert pixels.shape[1] > 800
    colors = {tuple(round(255 * float(part)) for part in pixel[:3]) for pixel in pixels[::2, ::2].reshape(-1, 4)}
    wanted = {"keep": (0, 0, 0), "ssd": (0, 114, 178), "recompute": (213, 94, 0), "mixed": (204, 121, 167)}
    missing = [name for name, color in wanted.items() if color not in colors]
    assert not missing, f"nothing was drawn in the colour of {missing}"


def test_a_picture_without_predictions_or_with_a_foreign_mode(tmp_path: Path) -> None:
    draw({"points": [point("keep", 1, 1.0), point("naive", 1, 0.5)], "curves": []}, tmp_path / "rok.png")
    assert (tmp_path / "rok.png").stat().st_size > 10_000


def test_labels_say_what_symbols_do_not() -> None:
    assert [label(mode) for mode in ("keep", "ssd", "budget=40%", "budget=30%@50MB/s")] == [
        "",
        "",
        "40%",
        "30% @50MB/s",
    ]


def test_the_command_draws_an_older_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rok.json"
    file.write_text(json.dumps(CANNED | {"refused": ["budget=1%"]}))
    assert keep_recompute_offload.main(["--draw", str(file), "--output", str(tmp_path / "out")]) == 1
    assert (tmp_path / "out" / "rok.png").exists()
    assert "budget=1%: failed" in capsys.readouterr().out
    file.write_text(json.dumps(CANNED))
    assert keep_recompute_offload.main(["--draw", str(file), "--output", str(tmp_path / "out")]) == 0


def test_profiles_survive_json() -> None:
    trace = made_trace()
    machine = Machine(ssd=TierRates(write_bytes_per_s=1e9, read_bytes_per_s=2e9, capacity_bytes=5))
    assert trace_from_json(json.loads(json.dumps(trace_to_json(trace)))) == trace
    fields = {"ssd": {"write_bytes_per_s": 1e9, "read_bytes_per_s": 2e9, "capacity_bytes": 5}, "host": None}
    assert machine_from_json(fields) == machine


def test_a_predicted_curve_runs_from_the_least_budget_to_keeping() -> None:
    trace = made_trace()
    arguments: dict[str, Any] = {"other_s": 0.2, "num_tokens": 1000, "num_points": 9}
    fast = keep_recompute_offload.predicted_curve(trace, made_machine(10e9), recompute=False, **arguments)
    slow = keep_recompute_offload.predicted_curve(trace, made_machine(20e6), recompute=False, **arguments)
    mixed = keep_recompute_offload.predicted_curve(trace, made_machine(20e6), recompute=True, **arguments)
    for curve in (fast, slow, mixed):
        assert curve[-1]["peak_bytes"] <= trace.saved_peak_bytes
        assert curve[-1]["tokens_per_s"] == pytest.approx(1000 / (trace.end_s + 0.2), rel=0.01)
        assert all(point["peak_bytes"] <= point["budget_bytes"] for point in curve)
    assert len(fast) == 9
    assert fast[0]["tokens_per_s"] > 1.2 * slow[0]["tokens_per_s"]
    assert max(point["num_recomputed"] for point in fast + slow) == 0
    assert max(point["num_recomputed"] for point in mixed) > 0
    assert min(point["written_bytes"] for point in fast) < max(point["written_bytes"] for point in fast)


def test_each_drive_has_its_lines_and_all_come_from_one_trace() -> None:
    trace = made_trace()
    cut = made_trace(num_blocks=2)
    found = {
        "budget=30%@50MB/s": (
            Trace(storages=(), order=(), forward_end_s=1.0, end_s=2.0, recomputed=frozenset({0})),
            made_machine(20e6),
        ),
        "auto": (trace, made_machine(10e9)),
        "budget=40%": (cut, made_machine(1.0)),
    }
    assert keep_recompute_offload.profiled_trace(found) is trace
    lines = keep_recompute_offload.curves(found, other_s=0.0, num_tokens=1000, num_points=3)
    assert [(line["throttle"], line["recompute"]) for line in lines] == [
        (None, False),
        (None, True),
        ("50MB/s", False),
        ("50MB/s", True),
    ]
    speeds = [line["points"][0]["tokens_per_s"] for line in lines]
    assert speeds[0] > speeds[2]


def test_nothing_is_predicted_from_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert keep_recompute_offload.curves({}, other_s=0.0, num_tokens=1, num_points=3) == []
    assert "nothing can be predicted" in capsys.readouterr().err


def row(mode: str, ratio: float | None, resident: int | None) -> dict[str, Any]:
    return {"mode": mode, "step_s": 2.0, "step_ratio": ratio, "resident_bytes": resident, "equal": True}


def test_throughput_comes_from_paired_ratios_and_recomputed_blocks_are_counted() -> None:
    rows = [row("keep", 1.0, 100), row("ssd", 1.25, 10), row("ours_recompute", 1.6, 7), row("recompute", 1.5, None)]
    found = {point["mode"]: point for point in keep_recompute_offload.points(rows, 1000, 30)}
    assert set(found) == {"keep", "ssd", "ours_recompute"}
    assert found["keep"]["tokens_per_s"] == 500
    assert found["ssd"]["tokens_per_s"] == 400
    assert (found["ssd"]["peak_bytes"], found["ours_recompute"]["peak_bytes"]) == (10, 37)
    assert found["ours_recompute"]["counted_bytes"] == 7
    assert {point["mode"] for point in keep_recompute_offload.points(rows, 1000, None)} == {"keep", "ssd"}
    assert keep_recompute_offload.largest_block_bytes(made_trace()) == 16 * MIB


def test_the_sweep_is_parsed() -> None:
    args = keep_recompute_offload.parse_arguments(["--budgets", "20%, 1GiB,80%", "--throttle", "80MB/s"])
    assert args.modes == [
        *("keep", "ssd", "auto", "budget=20%", "budget=1GiB", "budget=80%", "ours_recompute", "recompute_offload"),
        "budget=20%@80MB/s",
    ]
    assert not any("@" in mode for mode in keep_recompute_offload.parse_arguments(["--throttle", ""]).modes)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--budgets", "20%,many"], "the sweep has budget=many|'many' is not a size"),
        (["--modes", "ssd,auto"], "a list with keep"),
    ],
)
def test_a_wrong_sweep_is_refused(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        keep_recompute_offload.parse_arguments(arguments)
    message = capsys.readouterr().err
    assert any(part in message for part in text.split("|"))


@pytest.mark.parametrize(
    ("size", "groups"),
    [
        (2, [["keep", "ssd"], ["keep", "auto"], ["keep", "ours_recompute"]]),
        (3, [["keep", "ssd", "auto"], ["keep", "ours_recompute"]]),
        (9, [["keep", "ssd", "auto", "ours_recompute"]]),
        (1, [["keep", "ssd"], ["keep", "auto"], ["keep", "ours_recompute"]]),
    ],
)
def test_every_group_has_a_keep(size: int, groups: list[list[str]]) -> None:
    assert split(["ssd", "keep", "auto", "ours_recompute"], size) == groups
    assert split(["keep"], size) == [["keep"]]


def test_a_mode_that_fails_is_left_out_and_the_group_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs: list[list[str]] = []

    def fake(index: int, jobs: Any, args: Any, *, details: bool) -> list[Sample]:
        runs.append([job.mode for job in jobs])
        for job in jobs:
            if job.mode == "auto" or (job.mode == "keep" and job.shape.layers == 1):
                raise ChildDiedError(job.mode, 1)
        return [Sample(job.mode, index, 0, True, {}) for job in jobs]

    monkeypatch.setattr(bench_groups, "run_round", fake)
    args = step_arguments([])
    groups = [["keep", "ssd", "auto"], ["keep", "auto"]]
    measured = bench_groups.run_groups(groups, TINY_PLANNED, tmp_path, args, rounds=2)
    assert runs == [["keep", "ssd", "auto"], ["keep", "ssd"], ["keep", "ssd"]]
    assert measured.refused == ["auto"]
    assert [(sample.mode, sample.round) for sample in measured.samples] == [
        ("keep", 0),
        ("ssd", 0),
        ("keep", 1),
        ("ssd", 1),
    ]
    assert "auto ended with code 1" in capsys.readouterr().err
    one_layer = type(TINY_PLANNED)(layers=1)
    with pytest.raises(ChildDiedError, match="keep"):
        bench_groups.run_groups([["keep", "ssd"]], one_layer, tmp_path, args)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_toy_run_of_the_real_thing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_round, "MAX_EXTRA_WARMUP", 2)  # times of a toy scatter too much for a search to settle
    output = tmp_path / "out"
    arguments = ["--tiny", "--layers", "2", "--budgets", "70%", "--steps", "2", "--threads", "1"]
    modes = "keep,ssd,auto,budget=70%,ours_recompute,budget=70%@200MB/s"
    paths = ["--output", str(output), "--dir", str(tmp_path / "spill")]
    assert keep_recompute_offload.main([*arguments, "--modes", modes, *paths]) == 0
    content = json.loads((output / "rok.json").read_text())
    found = {point["mode"]: point for point in content["points"]}
    assert list(found) == modes.split(",")
    assert all(point["equal"] for point in found.values())
    assert found["budget=70%"]["peak_bytes"] <= 0.7 * found["keep"]["peak_bytes"] + 1
    assert found["ssd"]["peak_bytes"] <= found["keep"]["peak_bytes"], "how much less is how soon the drive takes it"
    assert {line["throttle"] for line in content["curves"]} == {None, "200MB/s"}
    assert all(line["points"] for line in content["curves"])
    assert content["refused"] == []
    assert (output / "rok.png").stat().st_size > 10_000
    assert str(tmp_path) not in json.dumps(content["environment"])
    assert list((tmp_path / "spill").iterdir()) == []
