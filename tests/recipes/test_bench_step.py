"""The step benchmark: its arithmetic, and its real entry point at a toy size."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_ssd import HardwareProfile
from lightning_ssd.common.tensors import Region
from recipes.benchmarks import hooks
from recipes.benchmarks import step as bench_step
from recipes.benchmarks.harness import rounds as bench_round
from recipes.benchmarks.harness import shapes
from recipes.benchmarks.harness.modes import Account
from recipes.benchmarks.harness.shapes import SHAPES, TINY, Shape
from recipes.benchmarks.harness.tables import Sample, show, summarise
from recipes.benchmarks.workers import step as worker
from recipes.benchmarks.workers.step import Job, open_trainer
from tests.parity.models import Perceptrons, floats


def sample(mode: str, step: int, seconds: float, **values: Any) -> Sample:
    filled = {
        **dict.fromkeys(("step_s", "forward_s", "backward_s", "optimizer_s", "user_s", "system_s"), seconds),
        "page_faults": 1,
        "host_peak_bytes": 3 << 20,
        "device_peak_bytes": None,
        **{name: f"{name} of step {step}" for name in ("loss", "gradients", "weights")},
        "rest": {"host_bytes": 1 << 20, "device_bytes": None},
    }
    return Sample(mode, 0, step, step > 0, filled | values)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert bench_step.main(arguments) == 0
    return capsys.readouterr().out


def test_ratios_are_paired_and_warm_up_is_left_out() -> None:
    """A machine that is ten times slower in one turn changes no ratio."""
    keep = [sample("keep", 0, 99.0), sample("keep", 1, 1.0), sample("keep", 2, 10.0), sample("keep", 3, 2.0)]
    ours = [sample("ssd", 0, 1.0), sample("ssd", 1, 1.1), sample("ssd", 2, 11.0), sample("ssd", 3, 2.2)]
    first, second = summarise([*keep, *ours])
    assert first["step_ratio"] == 1
    assert second["step_ratio"] == pytest.approx(1.1)
    assert second["num_steps"] == 3
    assert second["peak_above_rest_bytes"] == 2 << 20
    assert second["equal"] is True


def test_one_wrong_gradient_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    keep = [sample("keep", step, 1.0) for step in range(3)]
    ours = [sample("ssd", step, 1.0) for step in range(2)] + [sample("ssd", 2, 1.0, gradients="others")]
    rows = summarise([*keep, *ours])
    assert [row["equal"] for row in rows] == [True, False]
    show(rows)
    assert "DIFFERENT" in capsys.readouterr().out


def test_a_keep_that_does_not_repeat_itself_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Then no other row's bits can be judged."""
    keep = [sample("keep", step, 1.0) for step in range(3)]
    ours = [sample("ssd", step, 1.0, gradients="others") for step in range(3)]
    equal = [sample("keep_again", step, 1.0) for step in range(3)]
    rows = summarise([*keep, *equal, *ours])
    assert [row["equal"] for row in rows] == [True, True, False]
    show(rows)
    assert "does not repeat" not in capsys.readouterr().out
    rows = summarise([*keep, *(sample("keep_again", step, 1.0, weights="others") for step in range(3)), *ours])
    assert [row["equal"] for row in rows] == [True, False, False]
    show(rows)
    assert "keep_again DIFFERS: plain PyTorch does not repeat its own bits here" in capsys.readouterr().out


def test_a_card_has_its_own_default_modes() -> None:
    """With a second keep; without those that would fill its machine's drive or memory."""
    assert bench_step.parse_arguments([]).modes == ["keep", "ssd", "recompute", "naive", "save_on_cpu"]
    modes = bench_step.parse_arguments(["--profile", "gpu"]).modes
    assert modes == ["keep", "keep_again", "ssd", "budget=40%", "recompute"]
    assert bench_step.parse_arguments(["--profile", "gpu", "--modes", "keep,naive"]).modes == ["keep", "naive"]


def test_how_bits_were_made_equal_is_said_once_and_can_be_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    described = [sample(mode, 1, 1.0, described={"determinism": "as told"}) for mode in ("keep", "ssd")]
    bench_step.show_determinism([*described, sample("recompute", 1, 1.0, described={})])
    assert capsys.readouterr().out == "Bits: as told\n"
    for flags, chosen in (([], True), (["--no-deterministic"], False)):
        args = bench_step.parse_arguments(flags)
        jobs = bench_step.make_jobs(["keep", "ssd"], TINY, tmp_path, args, held_bytes=None)
        assert [job.settings.deterministic for job in jobs] == [chosen] * 2


def test_what_autograd_saves_is_accounted_once_per_storage() -> None:
    x = torch.rand(100).requires_grad_()
    model = Perceptrons(num_blocks=1)
    account = Account(model)
    with account.hooks():
        y = x * 1
        loss = (y.sin() + y.cos() + y[:3].exp().sum()).sum()
    assert account.held_bytes == 100 * 4 + 3 * 4
    del loss, y
    assert account.held_bytes == 0
    with account.hooks():
        loss = model(floats(0, 5, 40)).square().mean()
    assert 0 < account.held_bytes < 5 * 40 * 4 * 12
    loss.backward()
    assert account.held_bytes == 0


def plan(**values: float) -> dict[str, float]:
    names = ("step_s", "stall_s", "peak_bytes", "written_bytes")
    return {f"{kind}_{name}": 0.0 for kind in ("predicted", "measured") for name in names} | {"num_plans": 1} | values


def budgeted(step: int, resident: int, *, warmup: bool = False, **values: Any) -> Sample:
    filled = sample("budget=100", step, 1.0, resident_peak_bytes=resident, budget_bytes=100, **values)
    return Sample(filled.mode, 0, step, not warmup, filled.values, warmup)


def test_steps_over_the_budget_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the warm-up apart, since the profiled step keeps everything on purpose."""
    samples = [budgeted(0, 500, warmup=True), budgeted(1, 100), budgeted(2, 101), budgeted(3, 99)]
    (row,) = summarise(samples)
    assert (row["num_over_budget"], row["num_checked_steps"], row["num_over_budget_warmup"]) == (1, 3, 1)
    assert row["resident_bytes"] == 101
    show([row])
    assert "| 1 of 3 |" in capsys.readouterr().out


def test_predictions_are_compared_with_what_came(capsys: pytest.CaptureFixture[str]) -> None:
    """The last step's report counts: it covers all steps that followed the plan."""
    early = plan(predicted_step_s=9.0, measured_step_s=1.0)
    late = plan(predicted_step_s=1.1, measured_step_s=1.0, predicted_peak_bytes=90 << 20, measured_peak_bytes=100 << 20)
    samples = [sample("auto", 1, 1.0, plan=early), sample("auto", 2, 1.0, plan=late), sample("auto", 3, 1.0, plan=late)]
    (row,) = summarise(samples)
    assert row["step_error"] == pytest.approx(0.1)
    assert row["peak_error"] == pytest.approx(-0.1)
    assert row["num_planned_steps"] == 3
    show([row])
    assert "| 1.100 | 1.000 | +10.0 % | 90 | 100 | -10.0 % |" in capsys.readouterr().out


def test_predictions_are_compared_step_by_step_where_steps_moved() -> None:
    """A step that keeps everything follows no plan, and the report's peak is one of the warm-up's."""

    def moved(step: int, seconds: float, predicted_s: float, **values: Any) -> Sample:
        said = plan(predicted_step_s=predicted_s, predicted_peak_bytes=100, measured_peak_bytes=300, measured_step_s=99)
        return sample("auto", step, seconds, plan=said, **{"bytes_written": 1, "resident_peak_bytes": 110} | values)

    samples = [
        *(moved(1, 1.0, 2.2), moved(2, 1.0, 2.0), moved(3, 2.0, 4.4)),
        moved(4, 9.0, 1.0, bytes_written=0, resident_peak_bytes=1000),
    ]
    (row,) = summarise(samples)
    assert row["step_error"] == pytest.approx(0.1), "forward and backward take a second each in the first"
    assert row["peak_error"] == pytest.approx(100 / 110 - 1)
    assert row["plan"]["measured_step_s"] == 2.0
    assert row["plan"]["measured_peak_bytes"] == 110


class Scripted:
    """A worker that has settled on a plan from a certain step on, and tries others before."""

    def __init__(self, mode: str, planned_from: int, log: list[str]) -> None:
        self.mode = mode
        self._planned_from, self._log, self._num_steps = planned_from, log, 0

    def ask(self, command: str) -> dict[str, Any]:
        if command != "step":
            return {}
        self._log.append(self.mode)
        self._num_steps += 1
        return {"step_s": 1.0} | ({"plan": {}} if self._num_steps >= self._planned_from else {})


@pytest.mark.parametrize(
    ("modes", "planned_from", "warmup", "expected"),
    [
        (["keep", "ssd"], 99, 2, 2),
        (["keep", "ssd"], 99, 0, 0),
        (["keep", "auto"], 3, 1, 3),
        (["keep", "auto"], 3, 5, 5),
        (["keep", "budget=40%"], 7, 1, 7),
        (["keep", "auto"], 99, 2, 2 + bench_round.MAX_EXTRA_WARMUP),
    ],
)
def test_warm_up_lasts_until_plans_are_followed(
    modes: list[str], planned_from: int, warmup: int, expected: int, capsys: pytest.CaptureFixture[str]
) -> None:
    log: list[str] = []
    children: Any = [Scripted(mode, planned_from if mode != "keep" else 1, log) for mode in modes]
    args = bench_step.parse_arguments(["--warmup", str(warmup), "--steps", "4", "--turn-steps", "1"])
    samples = bench_round._take_turns(0, children, args, {})
    for mode in modes:
        mine = [s for s in samples if s.mode == mode]
        assert [s.warmup for s in mine] == [True] * expected + [False] * 4
        assert [s.timed for s in mine] == [False] * expected + [True] * 4
        assert [s.step for s in mine] == list(range(expected + 4))
    assert log[:4] == [modes[0], modes[1], modes[1], modes[0]], "the order must rotate"
    assert ("no plan was followed by auto" in capsys.readouterr().err) == (planned_from == 99 and "auto" in modes)


@pytest.mark.parametrize(
    ("step_s", "expected"),
    [(20.0, (2, 1)), (8.0, (4, 3)), (1.0, (3, 4))],
    ids=["next to none", "no plan in half of it", "enough"],
)
def test_where_time_is_short_there_are_fewer_turns(
    step_s: float, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifty seconds, of which half are for the warm-up; at least one turn is timed, whatever it takes."""
    now = [0.0]
    monkeypatch.setattr(bench_round, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class Slow(Scripted):
        def ask(self, command: str) -> dict[str, Any]:
            now[0] += step_s if command == "step" else 0.0
            return super().ask(command)

    planned_from = 3 if step_s == 1.0 else 99
    args = bench_step.parse_arguments(["--warmup=1", "--steps=4", "--turn-steps=1", "--within=50"])
    args.started_s = 0.0
    samples = bench_round._take_turns(0, [Slow("auto", planned_from, [])], args, {})  # type: ignore[list-item]
    assert (sum(s.warmup for s in samples), sum(s.timed for s in samples)) == expected


def test_the_model_without_transformers_trains_alike_in_every_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape(layers=2, width=128, heads=4, sequence=128, batch=8, vocabulary=211)
    published = sum(p.numel() for p in shape.model().parameters())
    monkeypatch.setattr(shapes, "has_transformers", lambda: False)
    hashes = []
    for mode in ("keep", "ssd", "recompute"):
        with open_trainer(Job(mode, shape, str(tmp_path), 1)) as trainer:
            step = trainer.step()
            assert trainer.account()["num_parameters"] == published
        assert (step.get("bytes_written", 0) > 0) == (mode == "ssd")
        hashes.append([step[name] for name in ("loss", "gradients", "weights")])
    assert hashes[0] == hashes[1] == hashes[2]
    assert step["loss_value"] == pytest.approx(math.log(shape.vocabulary), rel=0.02), "nothing is learnt yet"


@pytest.mark.parametrize("name", ["tall", "wide"])
def test_the_shapes_have_about_equal_activations(name: str) -> None:
    """Counted on a shape scaled down eight times in tokens, to what autograd saves per token in the blocks."""

    def volume(shape: Any) -> int:
        return int(shape.layers * shape.width * shape.num_tokens)

    small, other = SHAPES["small"], SHAPES[name]
    assert volume(other) == volume(small)
    assert (other.layers > small.layers) == (other.width < small.width) == (name == "tall")


def test_the_shapes_of_a_card_are_its_own() -> None:
    with pytest.raises(SystemExit, match="--shape tall belongs to --profile cpu"):
        bench_step.main(["--profile", "gpu", "--shape", "tall"])


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("profile", ["cpu", pytest.param("gpu", marks=pytest.mark.exhaustive)])
def test_a_toy_run_of_the_real_thing(profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    modes = "keep,keep_again,ssd" if profile == "gpu" else "keep,ssd,recompute,naive"
    arguments = ["--tiny", "--profile", profile, "--modes", modes, "--rounds", "1", "--steps", "2"]
    # As large as what is moved at all.
    sizes = ["--width", "128", "--sequence", "128", "--batch", "8"]
    file = tmp_path / "result.json"
    for _ in range(3):  # a drive that is busy with others may write nothing before backward wants it back
        out = run(capsys, *arguments, *sizes, "--dir", str(tmp_path / "spill"), "--json", str(file))
        content = json.loads(file.read_text())
        rows = {row["mode"]: row for row in content["summary"]}
        if rows["ssd"]["bytes_read"] > 0:
            break
    assert list(rows) == modes.split(",")
    assert all(row["equal"] for row in rows.values())
    assert rows["keep"]["resident_ratio"] == 1
    assert rows["ssd"]["failures"] == 0
    assert rows["ssd"]["bytes_read"] > 0, "wrong bits could not have come back"
    assert len(content["samples"]) == len(rows) * 4
    assert content["environment"]["shape"]["autocast"] == (profile == "gpu")
    assert str(tmp_path) not in json.dumps(content["environment"])
    assert "| ssd |" in out
    assert list((tmp_path / "spill").iterdir()) == []


@pytest.mark.exhaustive
def test_a_toy_run_under_budgets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, forked_workers: list[str]
) -> None:
    """All modes that plan or recompute, one of them on a throttled drive: bits, budgets, predictions."""
    modes = "keep,auto,budget=60%@200MB/s,recompute_offload"
    sizes = ["--layers", "2", "--width", "128", "--sequence", "128", "--batch", "16"]
    file = tmp_path / "result.json"
    arguments = ["--tiny", *sizes, "--modes", modes, "--rounds", "1", "--steps", "3", "--threads", "1"]
    run(capsys, *arguments, "--dir", str(tmp_path / "spill"), "--json", str(file))
    rows = {row["mode"]: row for row in json.loads(file.read_text())["summary"]}
    assert list(rows) == modes.split(",")
    assert all(row["equal"] for row in rows.values())
    held = rows["keep"]["resident_bytes"]
    budget = rows["budget=60%@200MB/s"]
    assert budget["budget_bytes"] == pytest.approx(0.6 * held, rel=1e-6)
    assert budget["num_over_budget"] == 0
    assert budget["num_checked_steps"] == budget["num_planned_steps"] == 3
    assert budget["plan"]["predicted_peak_bytes"] <= budget["budget_bytes"]
    assert budget["resident_bytes"] <= budget["budget_bytes"]
    assert rows["auto"]["plan"]["num_plans"] >= 1
    assert rows["recompute_offload"]["resident_bytes"] < held
    assert list((tmp_path / "spill").iterdir()) == []


def test_cost_of_hooks(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """No bound on the numbers: they are differences of times of milliseconds, and other processes turn their sign."""
    monkeypatch.setattr(hooks, "CHAIN", 100)
    threads = torch.get_num_threads()
    out = run(capsys, "--hooks", "5", "--dir", str(tmp_path), "--json", str(tmp_path / "hooks.json"))
    torch.set_num_threads(threads)
    content = json.loads((tmp_path / "hooks.json").read_text())
    rows, moved = content["summary"], content["moved"]
    assert [row["saved tensor"] for row in rows] == ["small result of an operation", "parameter", "view of a parameter"]
    assert all(row["ours_us"] == pytest.approx(row["identity_us"] + row["ours_without_python_us"]) for row in rows)
    assert all(f"| {row['ours_us']:.2f} | {row['identity_us']:.2f} |" in out for row in rows)
    assert 0 < moved["thread_us"] <= moved["process_us"]
    assert f"| CPU time of the process | {moved['process_us']:.1f} |" in out


def test_a_moved_tensor_that_comes_back_with_other_bytes_is_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lying(hooks.InstantBackend):
        def read(self, arena: Any, region: Region, offset: int) -> None:
            super().read(arena, region, offset)
            region.view()[0] ^= 0x40

    monkeypatch.setattr(hooks, "CHAIN", 20)
    monkeypatch.setattr(hooks, "InstantBackend", Lying)
    hardware = HardwareProfile(paths=[tmp_path], allow_unsuitable_paths=True)
    with pytest.raises(RuntimeError, match="other gradients than plain PyTorch"):
        hooks.moved_us(hardware, rounds=3)


def test_cost_of_hooks_is_the_median_difference_per_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks_s = iter([3e-6, 90.0, 5e-6])

    def time_s(chain: object, x: object, context: object) -> float:
        return 1.0 if context is nullcontext else 1.0 + hooks.CHAIN * next(hooks_s)

    monkeypatch.setattr(hooks, "_time_s", time_s)
    assert hooks.cost_us(lambda x: x, lambda: nullcontext(), rounds=3) == pytest.approx(5)


@pytest.mark.parametrize(
    ("features", "is_told"), [([], False), (["0000010000"], True), (["1111101111"], False), (["00", "000001"], True)]
)
def test_free_page_reporting_is_told_by_a_balloon(
    features: list[str], is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, bits in enumerate(features):
        (tmp_path / f"virtio{number}").mkdir()
        (tmp_path / f"virtio{number}" / "features").write_text(f"{bits:0<64}\n")
    monkeypatch.setattr(bench_step, "_BALLOONS", tmp_path)
    assert bench_step.reports_free_pages() is is_told


def test_checksums_tell_bits_and_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a card makes of its tensors, in place of hashes."""
    monkeypatch.setattr(worker, "_SUMMED_WORDS", 1000)
    tensor = torch.randn(5000)
    expected = worker.checksums(tensor)
    assert torch.equal(worker.checksums(tensor.clone()), expected)
    for place in (0, 999, 1000, 4999):
        other = tensor.clone()
        other[place] = other[place].nextafter(torch.tensor(9.0))
        assert not torch.equal(worker.checksums(other), expected)
    swapped = tensor[[1, 0, *range(2, 5000)]]
    assert not torch.equal(worker.checksums(swapped), expected)
    assert not torch.equal(worker.checksums(tensor.roll(1000)), expected)
    assert worker.checksums(torch.zeros(3, dtype=torch.bfloat16)).tolist() == [0]
