"""Benchmarks: their entry points at a toy size, what they refuse, and that wrong bits are told."""

import importlib.util
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_ssd import HardwareProfile
from recipes.benchmarks import (
    drives,
    hooks,
    io,
    memory_limit,
    memory_over_step,
    optimizer,
    parameters,
    recompute,
    rivals,
    step,
)
from recipes.benchmarks.harness import optimizer_tables, tables
from recipes.benchmarks.harness.mode_names import ModeSpec, parse_mode, parse_modes
from recipes.benchmarks.harness.tables import Sample
from recipes.benchmarks.workers import step as worker
from recipes.benchmarks.workers.optimizer import states_digest

MIB = 1 << 20

# -- toy runs ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch):
    """Sizes that no argument sets."""
    monkeypatch.setattr(optimizer, "ODD_HIDDEN", (320,))
    monkeypatch.setattr(hooks, "CHAIN", 60)
    monkeypatch.setattr(hooks, "ONCE_STORAGES", 20)
    monkeypatch.setattr(hooks, "ONCE_PARAMETERS", 8)


def all_equal(rows, *names):
    return [row["mode"] for row in rows] == list(names) and all(row["equal"] for row in rows)


def told_of_budgets(found):
    rows = {row["mode"]: row for row in found["summary"]}
    budget = rows["budget=60%@200MB/s"]
    assert budget["num_over_budget"] == 0
    assert budget["num_checked_steps"] == budget["num_planned_steps"] == 3
    assert budget["resident_bytes"] <= budget["budget_bytes"] == pytest.approx(0.6 * rows["keep"]["resident_bytes"])
    return all(row["equal"] for row in rows.values())


def told_of_states(found):
    rows = {row["mode"]: row for row in next(iter(found["parts"].values()))}
    assert {(row["equal"], row["states_equal"]) for row in rows.values()} == {(True, True)}
    return bool(rows["ssd"]["written_bytes"] > rows["cache=50%"]["written_bytes"])


def trained_within_a_limit(found):
    free, plain, ours = found
    assert plain["exit_code"] == -9
    assert plain["limit_bytes"] == ours["limit_bytes"] < free["peak_bytes"]
    assert (ours["losses"], ours["weights_digest"]) == (free["losses"], free["weights_digest"])
    return bool(ours["moved_bytes"] > 0 and ours["peak_bytes"] <= ours["limit_bytes"])


STEP_SIZES = ["--width", "128", "--sequence", "128", "--threads", "1", "--rounds", "1"]
TOYS = {
    "rivals, states": (
        rivals,
        "--tiny --part states --modes plain,ours_states,ours_states_cached --steps 1",
        lambda found: all(row["bits"] == {"equal": 28, "of": 28} and row["update_s"] > 0 for row in found["rows"]),
    ),
    "rivals": (
        rivals,
        "--tiny --modes plain,swap,fsdp2,ours --steps 1",
        lambda found: all(row["bits"] == {"equal": 28, "of": 28} for row in found["rows"]),
    ),
    "hooks": (
        hooks,
        "--rounds 2",
        lambda found: found["counts"]["moved"]["calls"] > found["counts"]["large, stays"]["calls"] > 0,
    ),
    "optimizer": (optimizer, "--tiny --part main --steps 2 --threads 1", told_of_states),
    "odd sizes": (optimizer, "--tiny --part odd --steps 2 --threads 1", told_of_states),
    "copies of weights": (
        optimizer,
        "--tiny --profile gpu --part main --modes torch,ssd --steps 1 --threads 1",
        lambda found: all_equal(found["parts"]["main"], "torch", "ssd"),
    ),
    "parameters": (
        parameters,
        "--tiny --part compute --turns 1 --warmup 1 --threads 1",
        lambda found: all_equal(found["parts"]["compute, full"]["summary"], "keep", "states", "away", "keep_again"),
    ),
    "step": (
        step,
        "--tiny --modes keep,ssd,recompute,naive --steps 2 --batch 8",
        lambda found: all_equal(found["summary"], "keep", "ssd", "recompute", "naive"),
    ),
    "step, as on a card": (
        step,
        "--tiny --profile gpu --modes keep,keep_again,ssd --steps 2 --batch 8",
        lambda found: all_equal(found["summary"], "keep", "keep_again", "ssd"),
    ),
    "budgets": (
        step,
        "--tiny --layers 2 --modes keep,auto,budget=60%@200MB/s,recompute_offload --steps 3 --batch 16",
        told_of_budgets,
    ),
    "memory limit": (memory_limit, "--tiny --steps 2", trained_within_a_limit),
    "memory limit, parameters": (memory_limit, "--parameters --tiny --limit 800MiB", trained_within_a_limit),
    "memory over a step": (
        memory_over_step,
        "--tiny --output {out}.png",
        lambda found: found["modes"].keys() == {"keep", "offload"},
    ),
    "drives": (
        io,
        "--size 60MiB --rounds 1",
        lambda found: all(row["gib_per_s"] > 0 and row["rate_ratio"] > 0 for row in found["medians"]),
    ),
}
DEFAULT = ("step", "drives")


@pytest.mark.slow
@pytest.mark.usefixtures("tiny", "forked_workers")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.exhaustive) for name in TOYS]
)
def test_a_toy_run_has_the_bits_of_plain_training_and_leaves_nothing(name, spill_dir, capsys):
    benchmark, arguments, is_right = TOYS[name]
    if benchmark is memory_over_step:
        pytest.importorskip("matplotlib", reason="matplotlib is in the extra 'recipes'")
    if benchmark is memory_limit:
        try:
            with memory_limit.memory_group(None):
                pass
        except memory_limit.GroupUnavailableError as error:
            pytest.skip(f"no memory control group here: {error}")
    drive, out, threads = spill_dir / "drive", spill_dir / "out", torch.get_num_threads()
    drive.mkdir()
    words = [*arguments.format(out=out).split(), *(STEP_SIZES if benchmark is step else []), "--dir", str(drive)]
    file = out.with_suffix(".json")
    code = benchmark.main(words + ["--json", str(file)] * (benchmark is not memory_over_step))
    torch.set_num_threads(threads)
    said = capsys.readouterr()
    assert code == 0, said.out + said.err
    found = json.loads(file.read_text())
    assert is_right(found)
    environment = found["environment"] if isinstance(found, dict) and "environment" in found else found
    assert str(spill_dir) not in json.dumps(environment)
    assert list(drive.iterdir()) == []


@pytest.mark.slow
def test_several_drives_at_a_toy_size(spill_dir, capsys, monkeypatch):
    monkeypatch.setattr(drives, "SETS", {"1": (0,), "2": (0, 1)})
    file = spill_dir / "drives.json"
    try:
        drives.main(["--dir", str(spill_dir), "--rate", "1000", "--rounds", "1", "--mib", "64", "--json", str(file)])
    except SystemExit as why:
        if "cannot throttle loop devices" not in str(why):
            raise
        pytest.skip(str(why))
    found = json.loads(file.read_text())["median"]
    assert all(
        row["read_mb_per_s"] > 0 for kind in ("16 MiB", "256 MiB", "states", "weights") for row in found[kind].values()
    )
    said = capsys.readouterr().out
    assert all(f"| {kind} | 2 | " in said for kind in ("16 MiB", "256 MiB", "states", "weights"))
    assert "| forward and backward | " in said
    assert "| one taken away | " in said
    assert list(spill_dir.iterdir()) == [file]


@pytest.mark.exhaustive
def test_a_toy_run_of_recomputing(capsys):
    pytest.importorskip("transformers", reason="the block is transformers'")
    recompute.main(["--batch", "1", "--length", "8", "--width", "64", "--rounds", "1"])
    assert "forward, repetition and backward of one block: " in capsys.readouterr().out


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("benchmark", "arguments", "message"),
    [
        (io, ["--dir", "none", "--size", "1GiB", "--rounds", "7", "--max-written", "15GiB"], "would write 16.0 GiB"),
        (memory_limit, ["--limit", "much"], "--limit"),
        (memory_limit, ["--steps", "0"], "--steps"),
        (optimizer, ["--modes", "torch,sdd"], "sdd; allowed: torch, ssd, cache=50%"),
        (optimizer, ["--modes", "cache=101%"], "cache=101%; allowed"),
        (optimizer, ["--warmup", "0"], "--steps and --warmup begin at 1"),
        (optimizer, ["--profile", "gpu"], "needs a CUDA device"),
        (parameters, ["--turns", "0"], "--turns and --warmup begin at 1"),
        (rivals, ["--modes", "plain,deepspeed_lean"], "not installed: deepspeed; pip install deepspeed"),
        (rivals, [], "leave it out: --modes plain,swap,fsdp2,ours"),
        (rivals, ["--modes", "plain,our"], "--modes has our; allowed: plain"),
        (rivals, ["--modes", "plain", "--limit", "much"], "is not a size"),
        (rivals, ["--steps", "0", "--modes", "plain"], "at least one step"),
        (step, ["--modes", "keep,ssdd"], "--modes has ssdd; allowed: keep, ssd"),
        (step, ["--profile", "gpu", "--shape", "tall"], "--shape tall belongs to --profile cpu"),
        (step, ["--profile", "gpu"], "--profile gpu needs a CUDA device"),
    ],
)
def test_a_mistake_is_refused(benchmark, arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as caught:
        benchmark.main(arguments)
    assert message in " ".join(f"{caught.value.code} {capsys.readouterr().err}".split())
    assert not Path("none").exists()


@pytest.mark.parametrize(
    ("name", "spec", "budget_bytes"),
    [
        ("budget=40%", ModeSpec(kind="budget", budget="40%"), 400),
        ("budget=1.5GiB", ModeSpec(kind="budget", budget="1.5GiB"), 3 << 29),
        ("budget=12.5%@50MB/s", ModeSpec(kind="budget", budget="12.5%", throttle="50MB/s"), 125),
        ("auto@200MB/s", ModeSpec(kind="auto", throttle="200MB/s"), None),
    ],
)
def test_names_of_modes_are_read(name, spec, budget_bytes):
    assert parse_mode(name) == spec
    assert spec.budget_bytes(1000) == budget_bytes


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("budget", "budget=SIZE"),
        ("budget=101%", "up to 100 %"),
        ("budget=0", "above 0"),
        ("budget=lots", "is not a size"),
        ("ssd=40%", "no budget for the other modes"),
        ("auto@fast", "is not a size"),
        ("keep,ssd, keep", "each mode once"),
        ("keep@50MB/s", "so not keep"),
    ],
)
def test_names_that_say_nothing_are_refused(name, allowed):
    with pytest.raises(ValueError, match=allowed):
        parse_modes(name)


def test_modes_that_would_fill_the_drive_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(step.shutil, "disk_usage", lambda path: SimpleNamespace(free=10 << 30))
    names = ["keep", "ssd", "budget=40%", "recompute", "save_on_cpu", "auto@1GB/s", "naive"]
    assert [parse_mode(name).disk_bytes(100) for name in names] == [0, 100, 60, 0, 0, 100, 100]
    step.check_room(names[:5], 6 << 30, tmp_path)
    with pytest.raises(SystemExit, match=r"has 10.0 GiB free.* ssd 6.0, budget=40% 3.6, naive 6.0; name fewer --modes"):
        step.check_room([*names[:5], "naive"], 6 << 30, tmp_path)


# -- arithmetic, and wrong bits ----------------------------------------------------------------------------------------


def stepped(mode, number, seconds, **values):
    filled = {
        **dict.fromkeys(("step_s", "forward_s", "backward_s", "optimizer_s", "user_s", "system_s"), seconds),
        "page_faults": 1,
        "host_peak_bytes": 3 * MIB,
        "device_peak_bytes": None,
        **{name: f"{name} of step {number}" for name in ("loss", "gradients", "weights")},
        "rest": {"host_bytes": MIB, "device_bytes": None},
    }
    return Sample(mode, 0, number, number > 0, filled | values, number == 0)


def updated(mode, number, seconds, **values):
    filled = dict.fromkeys(("step_s", "settled_s"), seconds)
    filled |= {"host_peak_bytes": 9 * MIB, "device_peak_bytes": None, "peak_above_base_bytes": 2 * MIB}
    filled |= {"weights": f"weights of step {number}"}
    if mode != "torch":
        filled |= {"written_bytes": 8, "read_bytes": 8, "kept_bytes": 0, "state_bytes": 8, "subgroup_bytes": 1}
        filled |= {"resident_peak_bytes": number, "limit_s": seconds / 1.1, "turned_limit_s": seconds / 0.5}
    return Sample(mode, 0, number, number > 0, filled | values, number == 0)


def run_of(sample, mode, *seconds, **last):
    """A warm-up and these steps; ``last``: values of the last one."""
    found = [sample(mode, number, step_s) for number, step_s in enumerate((99.0, *seconds))]
    found[-1].values.update(last)
    return found


def test_ratios_are_paired_and_warm_up_is_left_out():
    """A machine that is ten times slower in one turn changes no ratio."""
    keep, ours = tables.summarise([*run_of(stepped, "keep", 1, 10, 2), *run_of(stepped, "ssd", 1.1, 11, 2.2)])
    assert (keep["step_ratio"], ours["num_steps"], ours["equal"]) == (1, 3, True)
    assert ours["step_ratio"] == pytest.approx(1.1)
    assert ours["peak_above_rest_bytes"] == 2 * MIB
    runs = [*run_of(updated, "torch", 1, 10, 2), *run_of(updated, "ssd", 3, 30, 6)]
    plain, ours = optimizer_tables.summarise(runs)
    assert (plain["step_ratio"], ours["step_ratio"], ours["num_steps"], ours["num_compared"]) == (1, 3, 3, 4)
    assert (ours["limit_ratio"], ours["turned_limit_ratio"]) == (pytest.approx(1.1), pytest.approx(0.5))


def test_one_wrong_gradient_is_told(capsys):
    keep, ours = run_of(stepped, "keep", 1, 1), run_of(stepped, "ssd", 1, 1, gradients="others")
    rows = tables.summarise([*keep, *ours])
    assert [row["equal"] for row in rows] == [True, False]
    tables.show(rows)
    assert "DIFFERENT" in capsys.readouterr().out
    tables.show(tables.summarise([*keep, *run_of(stepped, "keep_again", 1, 1, weights="others"), *ours]))
    assert "keep_again DIFFERS: plain PyTorch does not repeat its own bits here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "equal", "states_equal"),
    [
        ({"states": "s"}, True, True),
        ({"states": "t"}, True, False),
        ({"states": "s", "weights": "others"}, False, True),
        ({}, True, None),
    ],
)
def test_one_wrong_bit_of_a_state_is_told(changed, equal, states_equal, capsys):
    plain, ours = run_of(updated, "torch", 1, 1, states="s"), run_of(updated, "ssd", 1, 1, **changed)
    rows = optimizer_tables.summarise([*plain, *ours])
    assert (rows[1]["equal"], rows[1]["states_equal"]) == (equal, states_equal)
    optimizer_tables.show(rows)
    assert ("DIFFERENT" in capsys.readouterr().out) == (not equal or states_equal is False)
    other = ["main: ssd has other bits than torch"]
    assert optimizer_tables.broken({"main": rows}, {}) == (other if not equal or states_equal is False else [])
    assert optimizer_tables.broken({}, {"main": ["ssd"]}) == ["main: ssd failed"]
    assert optimizer_tables.summarise(ours)[0]["equal"] is None, "nothing was compared"


def test_wrong_bits_of_rivals_are_told(monkeypatch):
    seconds = dict.fromkeys(("step_s", "update_s", "sync_s"), 2.0)

    def row(mode, equal=2):
        found = {"mode": mode, **seconds, "peak_bytes": 1 << 30, "losses": [1.0]}
        return found | {"fate": "trained", "bits": {"equal": equal, "of": 2}}

    assert rivals.is_right(row("ours"))
    assert not rivals.is_right(row("ours") | {"fate": "killed in step 1"})
    monkeypatch.setattr(rivals, "measure", lambda *_: [row("ours:limited", equal=1)])
    assert rivals.main(["--tiny", "--modes", "ours"]) == 1


def test_what_came_back_otherwise_is_no_measurement(tmp_path, monkeypatch):
    class Lying(hooks.InstantBackend):
        def read(self, arena, region, offset):
            super().read(arena, region, offset)
            region.view()[0] ^= 0x40

    monkeypatch.setattr(hooks, "CHAIN", 20)
    monkeypatch.setattr(hooks, "InstantBackend", Lying)
    with pytest.raises(RuntimeError, match="other gradients than plain PyTorch"):
        hooks.per_tensor(HardwareProfile(paths=[tmp_path], allow_unsuitable_paths=True), "cpu", 1)
    monkeypatch.setattr(io.Owner, "is_right", lambda self: False)
    monkeypatch.setattr(io.shutil, "which", shutil.which if shutil.which("fio") else lambda name: None)
    with pytest.raises(SystemExit, match="2 of 2 tensors came back with other bytes"):
        io.main(["--dir", str(tmp_path / "drive"), "--size", "60MiB", "--rounds", "1"])
    assert list((tmp_path / "drive").iterdir()) == []


def test_digests_tell_bits_and_places(monkeypatch):
    def saved(**changed):
        return {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.zeros(5)} | changed}, "param_groups": []}

    wrong = torch.zeros(5)
    wrong[4] = -0.0
    changes = ({"exp_avg": wrong}, {"exp_avg": torch.zeros(5, 1)}, {"step": 3.0}, {"other": torch.zeros(5)})
    assert states_digest(saved()) not in {states_digest(saved(**change)) for change in changes}
    monkeypatch.setattr(worker, "_SUMMED_WORDS", 1000)
    tensor = torch.randn(5000)
    expected = worker.checksums(tensor)
    assert torch.equal(worker.checksums(tensor.clone()), expected)
    for place in (0, 999, 1000, 4999):
        other = tensor.clone()
        other[place] = other[place].nextafter(torch.tensor(9.0))
        assert not torch.equal(worker.checksums(other), expected)
    assert not torch.equal(worker.checksums(tensor[[1, 0, *range(2, 5000)]]), expected)
    assert not torch.equal(worker.checksums(tensor.roll(1000)), expected)
