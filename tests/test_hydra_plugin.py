"""Our options in Hydra applications of other people, and how little these pay for it."""

import re
import shlex
import textwrap
from functools import partial
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

import lightning_ssd
from recipes.schema import SCHEMA
from tests.support.processes import run_python

CONF = Path(lightning_ssd.__file__).parent / "conf"
REPOSITORY = Path(__file__).parents[1]
# Hydra's options of an application that knows nothing of us but the name of a group.
PRIMARY = """
defaults:
  - lightning_ssd/offload: auto
  - lightning_ssd/hardware: auto
  - _self_
trainer:
  _target_: lightning.Trainer
  max_steps: 1
  devices: 1
  accelerator: cpu
  logger: false
  enable_checkpointing: false
"""


def composed(directory, text, overrides, *, name="config", **more):
    """Of an application whose primary file has this text."""
    (directory / f"{name}.yaml").write_text(text)
    with initialize_config_dir(str(directory), version_base="1.3"):
        return compose(name, overrides, **more)


def test_an_application_takes_our_options(tmp_path):
    overrides = ["lightning_ssd/offload=ssd", "offload.min_tensor_bytes=64KiB", "hardware.paths=[here]"]
    config = composed(tmp_path, PRIMARY, overrides)
    trainer = instantiate(config.trainer, _convert_="all")
    assert isinstance(trainer.strategy, lightning_ssd.SSDOffloadStrategy)
    assert trainer.strategy.policy == lightning_ssd.OffloadPolicy(activations="offload", min_tensor_bytes="64KiB")
    assert [str(path) for path in trainer.strategy.hardware.paths] == ["here"]
    assert trainer.max_steps == 1


@pytest.mark.parametrize("group", ["offload", "hardware"])
def test_every_option_is_the_one_of_the_recipes(group, tmp_path):
    # "none" is plain Lightning, and takes our callback from the recipes' own group.
    options = [option for option in SCHEMA.groups[group] if option != "none"]
    assert sorted(path.stem for path in (CONF / "lightning_ssd" / group).glob("*.yaml")) == options
    for option in options:
        with initialize_config_dir(str(SCHEMA.config_dir), version_base="1.3"):
            ours = compose(SCHEMA.config_name, [f"{group}={option}"])
        theirs = composed(tmp_path, PRIMARY, [f"lightning_ssd/{group}={option}"])
        assert OmegaConf.to_container(theirs[group]) == OmegaConf.to_container(ours[group]), option
        assert "strategy" in theirs.trainer


# An application that trains already, and has never heard of us.
STRANGER = """
seed: 7
trainer:
  _target_: lightning.Trainer
  accelerator: cpu
  devices: 4
  num_nodes: 2
  precision: bf16-mixed
  max_steps: 1
  logger: false
  enable_checkpointing: false
  deterministic: true
callbacks:
  progress: {_target_: lightning.pytorch.callbacks.RichProgressBar}
logger: {csv: {save_dir: here}}
output_dir: elsewhere
hydra:
  run: {dir: runs}
  job: {name: mine}
  job_logging: {level: ERROR}
"""
OFFLOADS, HARDWARES = (
    [f"+lightning_ssd/{group}={path.stem}" for path in sorted((CONF / "lightning_ssd" / group).glob("*.yaml"))]
    for group in ("offload", "hardware")
)
TOGETHER = [["+lightning_ssd/offload=ssd", hardware] for hardware in HARDWARES]


of_a_stranger = partial(composed, text=STRANGER, return_hydra_config=True)


@pytest.mark.parametrize("overrides", [*([word] for word in OFFLOADS + HARDWARES), TOGETHER[0]], ids=" ".join)
def test_an_option_changes_nothing_but_our_keys(overrides, tmp_path):
    before, after = (
        OmegaConf.to_container(of_a_stranger(tmp_path, overrides=words), resolve=False) for words in ([], overrides)
    )
    strategy = after["trainer"].pop("strategy", None)
    ours = {key: after.pop(key) for key in ("offload", "hardware", "machine") if key in after}
    for config in (before, after):  # Hydra's own note of what was composed
        for note in (("overrides", "task"), ("job", "override_dirname"), ("runtime", "choices")):
            del config["hydra"][note[0]][note[1]]
    assert after == before
    is_offload, is_hardware = (any(f"/{group}=" in word for word in overrides) for group in ("offload", "hardware"))
    assert (strategy is not None) == ("offload" in ours) == is_offload
    assert ("hardware" in ours) == ("machine" in ours) == is_hardware


@pytest.mark.parametrize("overrides", [[OFFLOADS[0]], *TOGETHER[:2]], ids=" ".join)
def test_a_profile_reaches_the_strategy_and_is_not_needed(overrides, tmp_path):
    config = of_a_stranger(tmp_path, overrides=overrides)
    given = len(overrides) > 1
    expected = instantiate(config.hardware, _convert_="all") if given else lightning_ssd.HardwareProfile()
    assert instantiate(config.trainer.strategy, _convert_="all").hardware == expected


# The layout of the templates that many applications begin with: the trainer is named behind `_self_`.
TEMPLATE = {
    "train.yaml": """
        # @package _global_
        defaults: [_self_, {model: net}, {callbacks: default}, {logger: null}, {trainer: default}, {experiment: null}]
        task_name: train
        seed: 7
    """,
    "model/net.yaml": "_target_: lightning.pytorch.demos.boring_classes.BoringModel",
    "callbacks/default.yaml": "progress: {_target_: lightning.pytorch.callbacks.TQDMProgressBar}",
    "trainer/default.yaml": """
        _target_: lightning.pytorch.trainer.Trainer
        accelerator: cpu
        devices: 1
        max_steps: 2
        logger: false
        enable_checkpointing: false
    """,
    "trainer/ddp.yaml": "{defaults: [default], strategy: ddp, devices: 4, precision: bf16-mixed}",
    "trainer/ddp_options.yaml": """
        defaults: [ddp]
        strategy: {_target_: lightning.pytorch.strategies.DDPStrategy, find_unused_parameters: true}
    """,
    "experiment/mine.yaml": """
        # @package _global_
        defaults: [{override /trainer: ddp}]
        trainer: {max_steps: 3}
    """,
}


def of_the_template(directory, words, defaults=""):
    for name, text in TEMPLATE.items():
        (directory / name).parent.mkdir(exist_ok=True)
        text = textwrap.dedent(text).lstrip()
        (directory / name).write_text(text.replace("{experiment: null}]", f"{{experiment: null}}{defaults}]"))
    with initialize_config_dir(str(directory), version_base="1.3"):
        return compose("train", words)


NAMED = (", {lightning_ssd/offload: null}", "")


@pytest.mark.parametrize(
    ("trainer", "defaults", "plus"),
    [
        ([], "", "+"),
        (["trainer=ddp"], *NAMED),
        (["trainer=ddp_options"], "", "+"),
        (["trainer=ddp_options"], *NAMED),
        (["experiment=mine"], "", "+"),
    ],
    ids=str,
)
def test_one_override_changes_the_strategy_alone(trainer, defaults, plus, tmp_path):
    ours = f"{plus}lightning_ssd/offload=ssd"
    words = [[*trainer, ours], [ours, *trainer]]
    before = OmegaConf.to_container(of_the_template(tmp_path, trainer, defaults))
    for config in (of_the_template(tmp_path, some, defaults) for some in words):
        strategy = instantiate(config.trainer.strategy, _convert_="all")
        assert type(strategy) is lightning_ssd.SSDOffloadStrategy
        assert strategy.policy == lightning_ssd.OffloadPolicy(activations="offload")
        assert strategy._ddp_arguments["find_unused_parameters"] is (trainer == ["trainer=ddp_options"])
        after = OmegaConf.to_container(config)
        assert after.pop("offload") is not None
        after["trainer"].pop("strategy")
        expected = {**before, "trainer": {key: value for key, value in before["trainer"].items() if key != "strategy"}}
        assert after == expected


def commands():
    """The command lines of the page, each with its overrides; of a sweep the last option."""
    page = (REPOSITORY / "docs" / "your_application.md").read_text(encoding="utf-8")
    lines = re.findall(r"^python train\.py (.+)$", page, re.MULTILINE)
    return [[re.sub(r"=(\w+,)+", "=", word) for word in shlex.split(line) if word != "-m"] for line in lines]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_the_commands_of_the_page(words, tmp_path):
    is_named = not any(word.startswith("+") for word in words)
    named = ", {lightning_ssd/offload: null}, {lightning_ssd/hardware: auto}" if is_named else ""
    trainer = instantiate(of_the_template(tmp_path, words, named).trainer, _convert_="all")
    assert isinstance(trainer.strategy, lightning_ssd.SSDOffloadStrategy)
    option = next(word.partition("=")[2] for word in words if "lightning_ssd/offload=" in word)
    assert trainer.strategy.policy.activations == {"ssd": "offload", "auto": "auto"}[option]
    budget = next((word.partition("=")[2] for word in words if word.startswith("offload.memory_budget=")), None)
    assert trainer.strategy.policy.memory_budget == budget


def test_there_are_commands_on_the_page():
    assert len(commands()) >= 3


def test_a_pytorch_lightning_application(tmp_path):
    words = ["+lightning_ssd/offload=ssd", "trainer._target_=pytorch_lightning.Trainer"]
    trainer = instantiate(of_the_template(tmp_path, words).trainer, _convert_="all")
    assert isinstance(trainer.strategy, lightning_ssd.SSDOffloadStrategy)
    assert type(trainer).__module__.startswith("pytorch_lightning")
    assert type(trainer.strategy).__module__.startswith("lightning_ssd.pytorch_lightning")


def test_applications_that_do_not_use_us_load_nothing_of_ours():
    code = """
        import sys
        from hydra.core.plugins import Plugins
        names = [plugin.__name__ for plugin in Plugins.instance().discover()]
        assert "LightningSSDSearchPath" in names, names
        assert not {"torch", "lightning", "lightning_ssd"} & set(sys.modules)
    """
    run_python(code, cwd=REPOSITORY)
