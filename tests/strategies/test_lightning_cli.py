"""``LightningCLI``: the strategy by its name, and by its class with policy and hardware nested in it."""

import sys

import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

from lightning_ssd import OffloadPolicy, SSDOffloadStrategy
from tests.support.processes import run_python

YAML = """
trainer:
  accelerator: cpu
  max_steps: 2
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  strategy:
    class_path: lightning_ssd.SSDOffloadStrategy
    init_args:
      policy:
        class_path: lightning_ssd.OffloadPolicy
        init_args:
          activations: offload
          min_tensor_bytes: 64KiB
      hardware:
        class_path: lightning_ssd.HardwareProfile
        init_args:
          paths: [{directory}]
          allow_unsuitable_paths: true
      static_graph: true
"""
NOISE = [
    "ignore:The '.*_dataloader' does not have many workers",
    "ignore:The number of training batches .* is smaller than the logging interval",
    "ignore:.*isinstance.treespec, LeafSpec.*",
    "ignore:No seed found, seed set to 0",
    "ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning",  # of what Lightning calls
]
pytestmark = [pytest.mark.filterwarnings(noise) for noise in NOISE]


@pytest.fixture(autouse=True)
def _no_command_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["script.py"])  # LightningCLI warns where pytest has arguments of its own


def command_line(*arguments):
    return LightningCLI(BoringModel, BoringDataModule, args=list(arguments), save_config_callback=None)


def test_by_name(tmp_path):
    switches = ["logger", "enable_checkpointing", "enable_progress_bar"]
    quiet = [f"--trainer.{switch}=false" for switch in switches]
    places = ["--trainer.accelerator=cpu", f"--trainer.default_root_dir={tmp_path}", "--trainer.max_steps=2"]
    cli = command_line("fit", "--trainer.strategy", "ssd_offload", *places, *quiet)
    assert isinstance(cli.trainer.strategy, SSDOffloadStrategy)
    assert cli.trainer.global_step == 2


def test_by_class_with_nested_settings(tmp_path):
    (tmp_path / "config.yaml").write_text(YAML.format(directory=tmp_path))
    setting = "--trainer.strategy.init_args.policy.init_args.verify=full"
    cli = command_line("fit", "--config", str(tmp_path / "config.yaml"), setting)
    policy = OffloadPolicy(activations="offload", min_tensor_bytes="64KiB", verify="full")
    assert cli.trainer.strategy.policy == policy
    assert cli.trainer.strategy._ddp_arguments["static_graph"] is True
    assert [str(path) for path in cli.trainer.strategy.hardware.paths] == [str(tmp_path)]


@pytest.mark.parametrize(
    "package", [pytest.param("lightning.pytorch", marks=pytest.mark.exhaustive), "pytorch_lightning"]
)
def test_a_command_that_does_not_import_us(package, tmp_path):
    """As ``docs/your_application.md`` writes it."""
    code = f"""
        import sys
        from {package}.cli import LightningCLI
        from {package}.demos.boring_classes import BoringModel
        assert "lightning_ssd" not in sys.modules
        cli = LightningCLI(BoringModel, run=False, save_config_callback=None)
        strategy = cli.trainer.strategy
        print(type(strategy).__module__, strategy.policy.activations, *strategy.hardware.paths)
    """
    words = [f"--trainer.{word}" for word in ("accelerator=cpu", "logger=false", f"default_root_dir={tmp_path}")]
    ours = ("class_path=lightning_ssd.SSDOffloadStrategy", "policy.activations=offload", f"hardware.paths=[{tmp_path}]")
    words += [f"--trainer.strategy.{word}" for word in ours]
    told = run_python(code, *words)
    ours = (
        "lightning_ssd.strategies" if package == "lightning.pytorch" else "lightning_ssd.pytorch_lightning.strategies"
    )
    assert told.split() == [f"{ours}.ssd_offload", "offload", str(tmp_path)]
