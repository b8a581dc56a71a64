"""Lightning's own tests with our strategy: what is compared, and a run over a checkout of three tests."""

import json
import sys

import pytest

from recipes.compat import lightning_suite
from recipes.compat.lightning_plugin import strategy_arguments
from recipes.compat.lightning_suite import Outcome, compare, main, markdown, reason_for


def test_what_passes_without_us_has_to_pass_or_to_have_a_reason():
    passed, failed, skipped = Outcome("passed"), Outcome("failed", "AssertionError: no"), Outcome("skipped")
    plain = {"a": passed, "b": passed, "c": passed, "d": failed, "e": passed}
    found = compare(plain, {"a": passed, "b": failed, "c": skipped, "d": failed})
    assert [(difference.test, difference.message) for difference in found] == [
        ("b", "AssertionError: no"),
        ("c", ""),
        ("e", "was not run"),
    ]
    assert not any(difference.reason for difference in found)
    assert "read-only" in reason_for("loops.test_skip_training_step_not_allowed[2]", "AttributeError")
    row = {"passed_plain": 4, "passed_ours": 1, "with_saved_tensors": 0, "with_bytes_on_a_drive": 0}
    text = markdown({"loops": row}, found)
    assert "| **all** | **4** | **1** | **0** | **0** |" in text
    assert "| `b` | **none**: AssertionError: no |" in text


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        ({}, {}),
        ({"strategy": "auto", "accelerator": "cpu", "devices": 1}, {}),
        ({"strategy": "ddp_spawn", "devices": 2}, {"start_method": "spawn"}),
        ({"strategy": "ddp", "devices": 1}, None),
        ({"strategy": object()}, None),
        ({"strategy": "fsdp", "devices": 2}, None),
        ({"accelerator": "mps"}, None),
    ],
)
def test_which_trainers_get_our_strategy(settings, arguments):
    assert strategy_arguments(settings) == arguments


CHECKOUT = """
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import SingleDeviceStrategy
import threading, torch

def test_fits(tmp_path):
    Trainer(default_root_dir=tmp_path, fast_dev_run=2, accelerator="cpu").fit(BoringModel())

def test_which():
    assert type(Trainer(accelerator="cpu", logger=False).strategy) is SingleDeviceStrategy

def test_fabric(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fabric = Fabric(accelerator="cpu")
    model = fabric.setup_module(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()))
    fabric.backward(model(torch.ones(64, 64)).sum())

def test_nothing_is_left():
    assert not [thread for thread in threading.enumerate() if "lightning_ssd" in thread.name]

def test_fails():
    raise ValueError
"""


def test_a_checkout_is_run_both_ways_and_compared(tmp_path, capsys, forks, monkeypatch):
    monkeypatch.setattr(sys, "executable", *forks)
    folder = tmp_path / "checkout" / "tests" / "tests_pytorch" / "loops"
    folder.mkdir(parents=True)
    (folder / "test_it.py").write_text(CHECKOUT)
    before = sorted(tmp_path.rglob("*"))
    found = tmp_path / "found.json"
    command = ["--checkout", str(tmp_path / "checkout"), "--only", "loops", "--json", str(found), "--states"]
    assert main(command) == 1
    assert sorted(tmp_path.rglob("*")) == sorted([*before, found])
    document = json.loads(found.read_text())
    assert document["groups"]["loops"] == {
        "passed_plain": 4,
        "passed_ours": 3,
        "not_passed_plain": 1,
        "with_saved_tensors": 2,
        "with_bytes_on_a_drive": document["groups"]["loops"]["with_bytes_on_a_drive"],
    }
    assert [difference["test"] for difference in document["differences"]] == ["tests_pytorch.loops.test_it.test_which"]
    assert document["offloaded"] == "activations and optimizer states"
    assert "**none**: " in capsys.readouterr().out


def test_a_run_that_tells_nothing_is_no_success(tmp_path, monkeypatch):
    (tmp_path / "tests" / "tests_pytorch").mkdir(parents=True)
    monkeypatch.setattr(lightning_suite, "_run", lambda *_: {})
    assert main(["--checkout", str(tmp_path), "--only", "loops"]) == 2
