"""The wheel, in an environment that has never seen the checkout: a command, a script, a Hydra application.

The environment is new, and has the wheel by pip. What the wheel depends on comes from the environment of the tests, by
a path, since installing PyTorch again would take minutes; the checkout is not on that path.
"""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[1]
SCRIPT = """
import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
import hydra_plugins.lightning_ssd
import lightning_ssd

trainer = L.Trainer(
    strategy="ssd_offload", accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False,
    callbacks=[lightning_ssd.OffloadMonitor(prog_bar=False)],
)
model = BoringModel()
trainer.fit(model)
print("trained", trainer.global_step, torch.isfinite(model.layer.weight).all().item())
print("files", lightning_ssd.__file__, hydra_plugins.lightning_ssd.__file__)
"""
HIDDEN = """
import os, sys, {package} as L
from {package}.demos.boring_classes import BoringModel

for value in ("", "mine.yaml", "ofload"):
    os.environ["LIGHTNING_SSD"] = value
    L.seed_everything(7, verbose=False)
    model = BoringModel()
    trainer = L.Trainer(accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False)
    trainer.fit(model)
    found = [one for one in trainer.callbacks if type(one).__name__ == "OffloadCallback"]
    print("weights", model.layer.weight.detach().view(-1).view(dtype=__import__("torch").int32).tolist())
    print("saved", [one.stats.bytes_saved > 0 for one in found], "lightning_ssd" in sys.modules)
"""
MODEL = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(256, 64), torch.nn.Linear(64, 256)

    def forward(self, tokens):
        return self.head(torch.relu(self.embedding(tokens)))
"""
APPLICATION = """
import hydra
from hydra.utils import instantiate

@hydra.main(config_path="settings", config_name="config", version_base="1.3")
def main(config):
    trainer = instantiate(config.trainer, _convert_="all")
    print("policy", trainer.strategy.policy.activations, trainer.strategy.policy.min_tensor_bytes)

main()
"""
SETTINGS = """
defaults:
  - lightning_ssd/offload: auto
  - lightning_ssd/hardware: auto
  - _self_
trainer: {_target_: lightning.Trainer, accelerator: cpu, devices: 1, max_steps: 1, logger: false}
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of the new environment."""
    directory = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(directory)]
    subprocess.run([*build, str(REPOSITORY)], check=True, timeout=PATIENCE_S)
    (wheel,) = directory.glob("*.whl")
    venv.create(directory / "env", with_pip=False)
    interpreter = directory / "env" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(interpreter), "install", "-q", "--no-deps"]
    subprocess.run([*install, str(wheel)], check=True, timeout=PATIENCE_S)
    (packages,) = (directory / "env").glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return interpreter


def run(command, directory, *, code=0):
    """Run a command away from the checkout; return what it prints."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "LIGHTNING_SSD_PATHS")}
    done = subprocess.run(
        [*map(str, command)], cwd=directory, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_doctor(python, tmp_path):
    report = json.loads(run([python.with_name("lightning-ssd"), "doctor", "--json", tmp_path], tmp_path))
    assert report["versions"]["lightning_ssd"]


def test_plan_for_a_machine_that_is_not_here(python, tmp_path):
    (tmp_path / "mine.py").write_text(MODEL)
    command = [python.with_name("lightning-ssd"), "plan", "--batch", "2", "--sequence", "64"]
    plan = run([*command, "--model", "mine:Model", "--hardware", "workstation"], tmp_path)
    assert "offload" in plan


def test_a_script_of_a_dozen_lines(python, tmp_path):
    """And it is the wheel that runs."""
    (tmp_path / "script.py").write_text(SCRIPT)
    told = run([python, "script.py"], tmp_path)
    assert "trained 2 True" in told
    (files,) = (line.split()[1:] for line in told.splitlines() if line.startswith("files "))
    assert all(Path(path).is_relative_to(python.parents[1]) for path in files), files


@pytest.mark.parametrize(
    "package", ["lightning.pytorch", pytest.param("pytorch_lightning", marks=pytest.mark.exhaustive)]
)
def test_a_program_that_hides_its_trainer(python, tmp_path, package):
    (tmp_path / "hidden.py").write_text(HIDDEN.format(package=package))
    settings = "policy: {activations: offload, min_tensor_bytes: 0}\nhardware: {allow_unsuitable_paths: true}\n"
    (tmp_path / "mine.yaml").write_text(settings)
    output = run([python, "hidden.py"], tmp_path, code=1)
    weights, saved = ([line for line in output.splitlines() if word in line] for word in ("weights [", "saved ["))
    assert weights[0] == weights[1]
    assert saved == ["saved [] False", "saved [True] True"]
    assert "'ofload' is no policy's name" in output


def test_a_hydra_application_takes_an_override(python, tmp_path):
    (tmp_path / "settings").mkdir()
    (tmp_path / "settings" / "config.yaml").write_text(SETTINGS)
    (tmp_path / "application.py").write_text(APPLICATION)
    told = run([python, "application.py", "lightning_ssd/offload=ssd", "offload.min_tensor_bytes=64KiB"], tmp_path)
    assert "policy offload 64KiB" in told
    wrong = run([python, "application.py", "lightning_ssd/offload=sdd"], tmp_path, code=1)
    assert "budget" in wrong, "the options that there are"
