"""Every YAML is composed and built, its documented commands are right, and mistakes stop with a helpful message."""

import dataclasses
import itertools
import re
import shlex

import pytest
import torch
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.pytorch.strategies import SingleDeviceStrategy
from omegaconf import OmegaConf, open_dict

import lightning_ssd
from lightning_ssd.planning.machine_profile import MachineProfile
from recipes.models import LanguageModel
from recipes.schema import SCHEMA, ConfigMistake
from tests.support.pretrained import save_tiny

CONFIG_DIR = SCHEMA.config_dir
FILES = sorted(path for path in CONFIG_DIR.rglob("*.yaml") if path.parent.name != "local")
OPTIONS = [(path.parent.name, path.stem) for path in FILES if path.parent != CONFIG_DIR]
COMMAND = re.compile(r"^#   python -m recipes\.train(.*)$", re.MULTILINE)


def compose(overrides, output_dir):
    config, _ = SCHEMA.compose([*overrides, f"output_dir={output_dir}"])
    return config


def opening_comment(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    return "\n".join(itertools.takewhile(lambda line: line.startswith("#"), lines))


def test_a_file_opens_with_what_it_is_and_commands_that_work():
    for path in FILES:
        comment = opening_comment(path)
        assert len(comment.splitlines()) >= 2, path.name
        commands = COMMAND.findall(comment)
        assert commands, f"{path.name} names no command that runs it"
        for command in commands:
            words = shlex.split(command)
            overrides = [word for word in words if "=" in word]
            assert set(words) - set(overrides) <= {"-m", "--cfg", "job"}, command
            SCHEMA.check_overrides(overrides)
            named = any(re.fullmatch(rf"{path.parent.name}=\[?{path.stem}\]?", word) for word in overrides)
            assert named or path.parent == CONFIG_DIR, command


def rows():
    """Every option once at least: those of independent groups side by side, since composing takes a second."""
    groups = {group: [option for other, option in OPTIONS if other == group] for group, _ in OPTIONS}
    for group in ("experiment", "offload", "trainer"):
        yield from ({group: option} for option in groups.pop(group))
    for turn in range(max(map(len, groups.values()))):
        yield {group: options[turn % len(options)] for group, options in groups.items()}


@pytest.mark.parametrize("row", list(rows()), ids=lambda row: " ".join(row.values()))
def test_every_option_is_composed_and_built(row, tmp_path):
    # One device, because the machine of a test need not have those of the machine that is described.
    words = [*(f"{group}={option}" for group, option in row.items()), "data.batch_size=2", "trainer.devices=1"]
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        config = hydra_compose(SCHEMA.config_name, [*words, f"output_dir={tmp_path}"])
    if row.get("model") == "pretrained":
        save_tiny("gpt2", tmp_path / "model")
        config.model.path = str(tmp_path / "model")
    SCHEMA.check_config(config)
    assert isinstance(instantiate(config.model, _convert_="all"), LanguageModel)
    data = instantiate(config.data)
    assert data.batch_size == 2
    assert isinstance(instantiate(config.hardware, _convert_="all"), lightning_ssd.HardwareProfile)
    if "offload" in config:
        assert isinstance(instantiate(config.offload), lightning_ssd.OffloadPolicy)
    loggers = list(instantiate(config.logger).values())
    callbacks = list(instantiate(config.callbacks).values())
    build = lambda: instantiate(config.trainer, logger=loggers or False, callbacks=callbacks, _convert_="all")  # noqa: E731
    if config.trainer.accelerator == "cuda" and not torch.cuda.is_available():
        with pytest.raises(InstantiationException, match="CUDAAccelerator"):
            build()
        return
    trainer = build()
    expected = {"none": SingleDeviceStrategy, "fsdp": lightning_ssd.SSDOffloadFSDPStrategy}
    assert type(trainer.strategy) is expected.get(row.get("offload", "auto"), lightning_ssd.SSDOffloadStrategy)
    assert trainer.loggers == loggers
    assert set(callbacks) <= set(trainer.callbacks)


POLICIES = [path for path in sorted((CONFIG_DIR / "offload").glob("*.yaml")) if path.stem != "none"]


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.stem)
def test_a_policy_names_every_field_with_its_default(path, tmp_path):
    """So that each can be set without a plus sign, and a new field cannot be forgotten here."""
    config = compose([f"offload={path.stem}"], tmp_path)
    defaults = {field.name: field.default for field in dataclasses.fields(lightning_ssd.OffloadPolicy)}
    assert set(config.offload) == {"_target_", *defaults}
    policy = instantiate(config.offload)
    changed = {name for name, default in defaults.items() if getattr(policy, name) != default}
    more = {"auto": set(), "fsdp": set(), "budget": {"activation_budget"}, "states": {"optimizer_states"}}
    more["weights"] = {"parameters"}
    more["everything"] = {"activations", "parameters", "gradients", "optimizer_states"}
    expected = more.get(path.stem, {"activations"})
    assert changed == expected
    names = {"ssd": "offload", "budget": "auto", "states": "auto", "fsdp": "auto", "weights": "auto"}
    names["everything"] = "offload"
    assert policy.activations == names.get(path.stem, path.stem)
    assert policy.optimizer_states == ("offload" if path.stem in ("states", "everything") else "keep")
    assert policy.recompute_modules == ()


HARDWARE = sorted((CONFIG_DIR / "hardware").glob("*.yaml"))
WITHOUT_DRIVES = {"auto", "cpu", "h100", "h200"}


@pytest.mark.parametrize("path", HARDWARE, ids=lambda path: path.stem)
def test_hardware_names_every_field_and_the_source_of_its_facts(path, tmp_path):
    """So that each can be set without a plus sign, and a new field cannot be forgotten here."""
    config = compose([f"hardware={path.stem}"], tmp_path)
    for node, cls in ((config.hardware, lightning_ssd.HardwareProfile), (config.machine, MachineProfile)):
        assert set(node) == {"_target_", *(field.name for field in dataclasses.fields(cls))}
    for key, fact in (("accelerator", "accelerator"), ("devices", "num_devices"), ("precision", "precision")):
        assert config.trainer[key] == config.machine[fact]

    machine = instantiate(config.machine, _convert_="all")
    assert isinstance(machine, MachineProfile)
    assert (machine.tiers(machine.num_devices) is None) == (path.stem in WITHOUT_DRIVES)
    text = path.read_text(encoding="utf-8")
    if machine != MachineProfile(accelerator=machine.accelerator, precision=machine.precision):
        assert re.search(r"https://|data sheet|docs/results/|Measured by", text)
    if machine.device_peak_tflops is not None:  # in which precision?
        assert machine.precision == ("32-true" if machine.link_gb_per_s is None else "bf16-mixed")


# The size of "pretrained" is that of its folder.
SIZED_MODELS = [path for path in sorted((CONFIG_DIR / "model").glob("*.yaml")) if path.stem != "pretrained"]


@pytest.mark.parametrize("path", SIZED_MODELS, ids=lambda path: path.stem)
def test_a_published_model_has_its_published_size(path, tmp_path):
    """The weights are made on the meta device, so that no memory is needed."""
    config = compose([f"model={path.stem}"], tmp_path)
    model = instantiate(config.model, _convert_="all")
    with torch.device("meta"):
        model.configure_model()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    documented = re.search(r"([\d,]+) parameters", opening_comment(path))
    if documented is None:
        assert num_parameters < 10_000_000, f"{path.name} is not small; its comment must name the number of parameters"
    else:
        assert num_parameters == int(documented[1].replace(",", ""))


@pytest.mark.parametrize(
    ("overrides", "full_key", "nearest", "allowed"),
    [
        (["modle=gpt"], "modle", "model", "callbacks, data, experiment"),
        (["model=gpt,bertt"], "model=bertt", "model=bert", "bert, bert_base"),
        (["offload=sdd"], "offload=sdd", "offload=ssd", "auto, budget, everything, fsdp, keep, none, recompute"),
        (["callbacks=[offload_monitr]"], "callbacks=offload_monitr", "callbacks=offload_monitor", "none, offload_mon"),
        (["++offload.min_tensor_byte=4"], "offload.min_tensor_byte", "offload.min_tensor_bytes", "activation_budget"),
        (["min_tensor_bytes=4"], "min_tensor_bytes", "offload.min_tensor_bytes", "callbacks, data"),
        (["~trainer.max_step"], "trainer.max_step", "trainer.max_steps", "accelerator"),
        (["model=bert,gpt", "model.config.n_layer=2"], "model.config.n_layer", None, "num_hidden_layers"),
        (["trainer.strategy.polcy=1"], "trainer.strategy.polcy", "trainer.strategy.policy", "hardware"),
        (["data=synthetic", "data.path=x"], "data.path", None, "num_batches"),
        (["offload.activations=ofload"], "offload.activations=ofload", "offload.activations=offload", "auto, offload"),
        (["offload.verify=off,ful"], "offload.verify=ful", "offload.verify=full", "off, sampled, full"),
        (
            ["offload=none", "offload.verify=full"],
            "offload.verify",
            None,
            "auto, budget, everything, fsdp, keep, none, recompute",
        ),
        (["+local=machine"], "local", None, "callbacks, data"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_names_key_nearest_match_and_what_is_allowed(overrides, full_key, nearest, allowed):
    with pytest.raises(ConfigMistake) as caught:
        SCHEMA.check_overrides(overrides)
    message = str(caught.value)
    assert message.startswith(full_key)
    assert (f"Did you mean {nearest}?" in message) == (nearest is not None)
    assert allowed in message
    assert len(message.splitlines()) == 2


def test_what_is_right_is_accepted():
    for overrides in (
        ["model=gpt,bert,t5", "offload=keep,ssd", "seed=range(1,3)"],
        ["+trainer.gradient_clip_algorithm=norm", "trainer.max_steps=3"],
        ["+callbacks.rate._target_=lightning.pytorch.callbacks.LearningRateMonitor"],
        ["callbacks=[offload_monitor,none]", "experiment=null", "hydra.verbose=true"],
        ["offload.min_tensor_bytes='4KiB'", "hardware.paths=[one,two]", "~trainer.gradient_clip_val"],
        ["+model.config.n_inner=64", "logger=wandb", "logger.wandb.group=mine"],
        [],
    ):
        SCHEMA.check_overrides(overrides)


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("offload.min_tensor_byte", 4, "Did you mean offload.min_tensor_bytes"),
        ("offload.activations", "ofload", "Did you mean offload.activations=offload"),
        ("trainer.max_step", 4, "Did you mean trainer.max_steps"),
        ("ofload", {"verify": "full"}, "Did you mean offload"),
        ("callbacks.mine", {"every": 3}, "callbacks.mine=.* names nothing to build"),
        ("data._target_", "recipes.data.TextDta", "data._target_=recipes.data.TextDta: cannot be imported"),
    ],
)
def test_a_mistake_in_a_file_is_found_too(key, value, match, tmp_path):
    """As an experiment or conf/local/default.yaml would write it: Hydra merges any key from there."""
    config = compose([], tmp_path)
    with open_dict(config):
        OmegaConf.update(config, key, value)
    with pytest.raises(ConfigMistake, match=match):
        SCHEMA.check_config(config)
