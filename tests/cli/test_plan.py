import json
import os
import shutil
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import yaml

import lightning_ssd
from lightning_ssd.planning.machine_profile import MachineProfile
from tests.support import processes
from tests.support.commands import command, said

NET = "tests.support.planned_models:Net"
ROOT = Path(lightning_ssd.__file__).parents[1]
SIZES = ("--batch", "8", "--sequence", "256")


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


def profile_text(machine, **hardware):
    return yaml.safe_dump({"hardware": hardware, "machine": asdict(machine)}, sort_keys=False)


@pytest.fixture
def profile(tmp_path):
    """A machine that is as fast as the test model needs, with drives that can be worn."""
    machine = MachineProfile(
        num_devices=2,
        device_memory_gb=1,
        device_peak_tflops=0.5,
        compute_efficiency=1.0,
        num_drives=4,
        drive_write_gb_per_s=0.5,
        drive_read_gb_per_s=1.0,
    )
    path = tmp_path / "mine.yaml"
    path.write_text(profile_text(machine, drive_endurance="600TB"))
    return path


run = partial(command, "plan")


def predicted(*arguments):
    done = run(*arguments, "--json")
    facts = json.loads(done.stdout)
    return facts, {row["mode"]: row for row in facts["modes"]}


def test_it_ends_with_the_fastest_policy_that_fits(profile):
    facts, rows = predicted("--model", NET, *SIZES, "--hardware", profile, "--devices", "1")
    keep_bytes = rows["keep"]["peak_bytes"] + facts["model"]["fixed_bytes"]
    assert facts["answer"].endswith('\n  OffloadPolicy(activations="keep")'), "where all fits, nothing is faster"
    text = profile.read_text()
    assert "device_memory_gb: 1" in text
    options = [
        (mode["step_s"] + away["moving_s"], mode["peak_bytes"] + away["device_bytes"], mode["mode"], away["waits"])
        for mode in facts["modes"]
        for away in facts["waiting"]
    ]
    less_gb = 0.6 * keep_bytes / 1e9
    profile.write_text(text.replace("device_memory_gb: 1", f"device_memory_gb: {less_gb}", 1))
    answer = predicted("--model", NET, *SIZES, "--hardware", profile, "--devices", "1")[0]["answer"]
    best = min((option for option in options if option[1] <= less_gb * 1e9), key=lambda option: option[0])
    assert answer.startswith(
        f"Fits {less_gb * 1e9 / 2**30:.3g} GiB ({best[1] / 2**30:.3g}, without temporaries), at most "
    )
    assert f'  OffloadPolicy(activations="{best[2]}"' in answer
    assert ('optimizer_states="offload"' in answer) is ("states" in best[3])
    profile.write_text(text.replace("device_memory_gb: 1", "device_memory_gb: 0.001", 1))
    shown = run("--model", NET, *SIZES, "--hardware", profile, "--devices", "1").stdout
    assert "Nothing fits 0.000931 GiB, because even OffloadPolicy(activations=" in shown
    assert "take a smaller batch or sequence, or more devices." in shown


MODELS = "tests.support.planned_models"


@pytest.mark.parametrize("batch", [2, 8])
def test_a_batch_takes_the_form_that_the_model_takes(batch, profile):
    """A pair of two sequences must not be mistaken for two rows of one tensor."""
    forms = ("TakesPairs", "TakesMappings", "TakesOne", "TakesTensors")
    shape = ("--batch", batch, "--sequence", 256, "--hardware", profile)
    found = [predicted("--model", f"{MODELS}:{name}", *shape)[0]["model"] for name in forms]
    assert found[0]["saved_peak_bytes"] > batch * 256 * 1024 * 4
    assert all(one == found[0] for one in found[1:])


def test_batches_are_like_the_first_one_of_a_data_module(profile):
    arguments = ("--model", f"{MODELS}:TakesVectors", "--data", f"{MODELS}:Data", "--hardware", profile)
    few, many = (predicted(*arguments, "--batch", n, "--sequence", 256)[0]["model"] for n in (2, 8))
    assert many["saved_peak_bytes"] == pytest.approx(4 * few["saved_peak_bytes"], rel=0.01)
    assert many["saved_peak_bytes"] > 8 * 256 * 1024 * 4
    done = run("--model", f"{MODELS}:TakesVectors", "--data", f"{MODELS}:NoData", *SIZES, "--hardware", profile)
    assert done.exit_code == 1
    assert "a DataModule whose first batch can be loaded" in said(done)
    done = run("--model", f"{MODELS}:TakesVectors", *SIZES, "--hardware", profile)
    assert "name a DataModule with --data" in said(done)


def test_rates_of_a_drive_that_one_has_not_got_yet(profile):
    rates = ("--write-rate", "2GB", "--read-rate", "4GB")
    facts, _ = predicted("--model", NET, *SIZES, "--hardware", profile, *rates)
    assert (facts["machine"]["drive_write_gb_per_s"], facts["machine"]["drive_read_gb_per_s"]) == (2, 4)
    assert run("--model", NET, *SIZES, "--hardware", "h100", *rates).exit_code == 0
    assert "--write-rate 5GB --read-rate 7GB" in run("--model", NET, *SIZES, "--hardware", "h100").stderr
    assert "--write-rate" in run("--model", NET, *SIZES, "--hardware", "h100", "--write-rate", "fast").stderr


CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}


def test_a_configuration_of_hugging_face_is_a_model(profile, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    facts, rows = predicted("--model", file, *SIZES, "--hardware", profile)
    num_parameters = 2 * 1000 * 256 + 2 * (4 * 256 * 256 + 3 * 256 * 512 + 2 * 256) + 256
    assert facts["model"]["parameter_bytes"] == 4 * num_parameters
    assert facts["model"]["num_blocks"] == 2
    assert rows["keep"]["peak_bytes"] > 8 * 256 * 1000 * 4, "the loss has been computed"
    file.write_text(json.dumps({**CONFIG, "architectures": ["NoSuchModel"]}))
    assert "NoSuchModel" in run("--model", file, *SIZES, "--hardware", profile).stderr
    assert "none.json" in run("--model", tmp_path / "none.json", *SIZES, "--hardware", profile).stderr
    monkeypatch.setitem(sys.modules, "transformers", None)
    missing = run("--model", file, *SIZES, "--hardware", profile)
    assert missing.exit_code == 1
    assert "pip install -c constraints.txt '.[recipes]'" in missing.stderr


def test_one_command_tells_the_largest_batch_and_sequence(profile):
    arguments = ("--model", NET, *SIZES, "--hardware", profile, "--devices", 1)
    largest = predicted(*arguments, "--largest")[0]["largest"]
    shown = run(*arguments, "--largest").stdout
    for name, other in (("batch", "of 256 tokens each"), ("sequence", "in a batch of 8")):
        size = largest[name]
        assert size["largest"] < size["beyond"] <= 1.07 * size["largest"] + 1
        assert f"Largest {name} {other}: {size['largest']} ({size['beyond']} takes " in shown
        assert f"\n  {size['policy']}\n" in shown
        sizes = {"batch": 8, "sequence": 256}
        for number, verdict in ((size["largest"], "Fits 0.931 GiB"), (size["beyond"], "Nothing fits 0.931 GiB")):
            given = [word for key, value in {**sizes, name: number}.items() for word in (f"--{key}", value)]
            answer = predicted("--model", NET, *given, "--hardware", profile, "--devices", 1)[0]["answer"]
            assert answer.startswith(verdict)


def test_each_way_to_train_is_predicted(profile):
    facts, rows = predicted("--model", NET, *SIZES, "--hardware", profile)
    assert list(rows) == ["keep", "offload", "recompute", "recompute_offload", "auto"]
    keep, offload, again = rows["keep"], rows["offload"], rows["recompute"]
    assert keep["peak_bytes"] == facts["model"]["saved_peak_bytes"]
    assert keep["written_bytes"] == keep["stall_s"] == 0
    assert keep["life_days"] is None
    assert keep["step_s"] == pytest.approx(facts["model"]["flops"] / 0.5e12, rel=1e-3)
    assert offload["peak_bytes"] < keep["peak_bytes"]
    assert offload["written_bytes"] > 0
    daily = offload["written_bytes"] / offload["step_s"] * 86_400 * 2 / 4  # two devices write to four drives
    assert offload["life_days"] == pytest.approx(600e12 / daily)
    assert again["peak_bytes"] < keep["peak_bytes"]
    assert again["num_recomputed"] == facts["model"]["num_blocks"] == 6
    assert again["step_s"] > keep["step_s"]
    assert rows["recompute_offload"]["peak_bytes"] <= again["peak_bytes"]
    assert rows["auto"]["peak_bytes"] <= keep["peak_bytes"]
    assert rows["auto"]["step_s"] <= 1.02 * keep["step_s"]


def test_what_the_model_takes_is_told_by_what_waits(profile):
    one = ("--model", NET, *SIZES, "--hardware", profile, "--devices", 1)
    facts, _ = predicted(*one)
    rows = {row["waits"]: row for row in facts["waiting"]}
    assert list(rows) == ["nothing", "states", "states, weights", "states, weights, gradients"]
    weights, block, biases = 6 * 2 * 1024 * 1024 * 4, 2 * 1024 * 1024 * 4, 6 * 2 * 1024 * 4
    states = 2 * (weights + biases)
    assert rows["nothing"]["device_bytes"] == rows["nothing"]["plain_bytes"] == facts["model"]["fixed_bytes"]
    assert rows["nothing"]["moving_s"] == 0
    assert rows["states"]["written_bytes"] == rows["states"]["read_bytes"] == states
    everything = rows["states, weights, gradients"]
    assert everything["waiting_bytes"] == 2 * weights + states
    assert everything["read_bytes"] == 2 * weights + weights + weights + states
    in_update = 4 * 4 * (4 << 20)
    assert in_update < states, "four subgroups for each of four drives"
    assert (
        everything["device_bytes"] == max(4 * block, weights * in_update / states) + in_update + 2 * block + 2 * biases
    )
    # Four drives of 0.5 and 1 GB/s.
    assert everything["moving_s"] == pytest.approx(everything["read_bytes"] / 4e9 + everything["written_bytes"] / 2e9)
    shown = run(*one).output
    assert "states, weights, gradients" in shown
    assert "frozen weights" not in shown


def test_of_several_devices_only_what_may_wait_there_is_shown(profile):
    several = ("--model", "tests.support.planned_models:Adapted", *SIZES, "--hardware", profile)
    facts, _ = predicted(*several)
    assert [row["waits"] for row in facts["waiting"]] == ["nothing", "frozen weights", "states"]
    assert "--devices 1" in run(*several).output
    machine = MachineProfile(
        num_devices=2,
        device_peak_tflops=0.5,
        num_drives=4,
        drive_write_gb_per_s=0.5,
        drive_read_gb_per_s=1.0,
        link_gb_per_s=10.0,
    )
    profile.write_text(profile_text(machine))
    facts, _ = predicted(*several)
    assert [row["waits"] for row in facts["waiting"]] == ["nothing", "states"]


@pytest.mark.parametrize("budget", ["60%", "{size}"])
def test_a_budget_is_kept(budget, profile):
    facts, _ = predicted("--model", NET, *SIZES, "--hardware", profile)
    limit = int(0.6 * facts["model"]["saved_peak_bytes"])
    facts, rows = predicted("--model", NET, *SIZES, "--hardware", profile, "--budget", budget.format(size=f"{limit}B"))
    assert 'activations="keep"' not in facts["answer"], "it exceeds the budget"
    assert "OffloadPolicy(activations=" in facts["answer"]
    assert rows["auto"]["peak_bytes"] <= limit
    assert rows["auto, blocks"]["peak_bytes"] <= limit
    assert rows["auto, blocks"]["step_s"] <= 1.01 * rows["auto"]["step_s"]


def test_a_budget_that_no_plan_keeps_is_told_with_the_least_one(profile):
    done = run("--model", NET, *SIZES, "--hardware", profile, "--budget", "1%")
    assert done.exit_code == 1
    assert "expected a budget of at least" in said(done)
    assert "keep" in done.stdout, "what can be predicted is"
    assert "OffloadPolicy(" not in done.stdout, "no policy keeps the budget"
    assert "auto" not in done.stdout.partition("life")[2].partition("Predicted")[0]


def test_what_does_not_fit_is_marked(profile):
    done = run("--model", NET, "--batch", 64, "--sequence", 256, "--hardware", profile)
    assert done.exit_code == 0, done.output
    keep = next(line for line in done.output.splitlines() if line.startswith("keep"))
    assert keep.split()[2].startswith("!")
    assert "! marks more than 0.931 GiB" in done.output, "in the unit of the column"


def test_without_a_profile_this_machine_is_timed(spill_dir, monkeypatch):
    monkeypatch.setenv("LIGHTNING_SSD_PATHS", str(spill_dir))
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    done = run("--model", NET, *SIZES)
    assert done.exit_code == 0, done.output
    assert "this machine (a matrix product was timed)" in done.output
    assert "TFLOPS per device, estimated as 40% of" in done.output
    assert not list(spill_dir.iterdir())


def test_a_gpu_is_not_timed(monkeypatch):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    done = run("--model", NET, *SIZES)
    assert done.exit_code == 1
    assert "--hardware on a machine with an accelerator" in said(done)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--model", "gptt", "--hardware", "dgx_h100"], "an option of conf/model"),
        (["--model", NET, "--hardware", "dgx_h1000"], "an option of conf/hardware"),
        (["--model", NET, "--hardware", "missing.yaml"], "missing.yaml does not exist"),
        (["--model", NET, "--hardware", "h100"], "drive_write_gb_per_s and drive_read_gb_per_s"),
        (
            ["--model", NET, "--hardware", "conf/trainer/default.yaml"],
            "a hardware profile with hardware: and machine: alone",
        ),
        (["--model", NET, "--hardware", "dgx_h100", "--budget", "lots"], "is not a size"),
        (["--model", NET, "--hardware", "dgx_h100", "--budget", "lots"], "a part such as 40%"),
        (["--model", NET, "--hardware", "dgx_h100", "--budget", "0%"], "a budget above 0"),
        (["--model", "tests.support.planned_models:no_model", "--hardware", "dgx_h100"], "a torch.nn.Module"),
        (["--model", "tests.support.planned_models:Nett", "--hardware", "dgx_h100"], "can be imported"),
        (["--model", "tests.support.planned_models:NOT_CALLABLE", "--hardware", "dgx_h100"], "a class or function"),
        (["--model", "tests.support.planned_models:NeedsValues", "--hardware", "dgx_h100"], "measure instead"),
    ],
)
def test_what_cannot_be_predicted_is_refused_with_a_reason(arguments, match):
    done = run(*arguments, *SIZES)
    assert done.exit_code == 1
    assert match in said(done)
    assert "error: " in said(done)
    assert not done.stdout


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (("drive_endurance:", "drive_endurence:"), "hardware.drive_endurence="),
        (("device_peak_tflops:", "tflops:"), "machine.tflops="),
        (("machine:", "machin:"), "machin"),
        (("hardware:", "x:"), "it has "),
    ],
)
@pytest.mark.parametrize("has_defaults", [True, False])
def test_a_profile_that_is_mistyped_is_refused_with_the_key(has_defaults, change, match, tmp_path):
    written = (ROOT / "conf" / "hardware" / "dgx_h100.yaml").read_text()
    assert written.count(f"\n{change[0]}") + written.count(f"  {change[0]}") == 1
    if not has_defaults:
        written = written.replace("defaults:\n  - /_lightning_ssd_hardware\n", "")
    (tmp_path / "mine.yaml").write_text(written.replace(*change))
    done = run("--model", NET, "--hardware", str(tmp_path / "mine.yaml"), *SIZES)
    assert done.exit_code == 1
    assert "a hardware profile with hardware: and machine: alone" in said(done)
    assert match in said(done)


def test_a_profile_may_leave_the_machine_open_and_must_be_yaml(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("hardware: {}\nmachine:\n  accelerator: cpu\n  # drive_write_gb_per_s: 2\n")
    assert "drive_write_gb_per_s and drive_read_gb_per_s" in run("--model", NET, "--hardware", str(file), *SIZES).stderr
    file.write_text("hardware: [\n")
    done = run("--model", NET, "--hardware", str(file), *SIZES)
    assert done.exit_code == 1
    assert "a hardware profile with hardware: and machine: alone" in said(done)


@pytest.mark.parametrize(
    ("target", "got", "advice"),
    [
        ("not_installed.Model", "ModuleNotFoundError: No module named 'not_installed'", "pip install -c constraints"),
        ("builtins.int", "ValueError", "pip install -c constraints"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused_with_the_cause(target, got, advice, tmp_path, monkeypatch):
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    (tmp_path / "conf" / "model" / "broken.yaml").write_text(f"_target_: {target}\n_args_: [no number]\n")
    monkeypatch.chdir(tmp_path)
    done = run("--model", "broken", *SIZES, "--hardware", "dgx_h100")
    assert done.exit_code == 1
    assert said(done).count(got) == 1
    assert advice in said(done)
    assert "HYDRA_FULL_ERROR" not in said(done)


def test_a_profile_without_a_rate_of_computing_is_refused(tmp_path):
    path = tmp_path / "mine.yaml"
    machine = MachineProfile(drive_write_gb_per_s=1.0, drive_read_gb_per_s=1.0)
    path.write_text(profile_text(machine))
    done = run("--model", NET, *SIZES, "--hardware", path)
    assert done.exit_code == 1
    assert "device_peak_tflops" in said(done)


def test_a_model_of_conf_in_eighty_columns(forks):
    """In a process of its own, as users start it."""
    pytest.importorskip("transformers")
    command = ["--model", "llama_1b", "--batch", "1", "--sequence", "512", "--hardware", "dgx_h200"]
    env = {**os.environ, "COLUMNS": "80"}
    done = processes.run(*forks, "-m", "lightning_ssd", "plan", *command, env=env, cwd=ROOT)
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "1,235,814,400 trained parameters" in done.stdout
    assert "estimated as 40% of 989" in done.stdout
