"""``OffloadCallback`` with strategies that are not ours: the bits of the Trainer without it, in both packages."""

import copy
import logging
import pickle
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.strategies import FSDPStrategy

from lightning_ssd import HardwareProfile, OffloadCallback, OffloadPolicy, SSDOffloadStrategy
from lightning_ssd.activations import write_group
from lightning_ssd.callback import callbacks_from_environment
from lightning_ssd.errors import ConfigError
from lightning_ssd.optimizer.offloaded_optimizer import OffloadedOptimizer
from lightning_ssd.strategies.default_monitor import DefaultMonitor
from tests.parity.lightning_nets import Failing
from tests.support import trainers
from tests.support.helpers import assert_identical
from tests.support.leftovers import assert_nothing_left
from tests.support.second_package import over_pytorch_lightning

pytestmark = [pytest.mark.filterwarnings(noise) for noise in trainers.LIGHTNING_NOISE]
PACKAGES = {
    "lightning": (lightning.pytorch, trainers),
    "pytorch_lightning": (pytorch_lightning, over_pytorch_lightning("tests.support.trainers")),
}


@pytest.fixture(params=PACKAGES)
def package(request):
    """One of Lightning's packages, and the tests' Trainers and modules over it."""
    return PACKAGES[request.param]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr("lightning_ssd.planning.update_memory._MIN_SUBGROUP_BYTES", 192 << 10)


def offloading(directory, **policy):
    settings = {"activations": "offload", "optimizer_states": "offload"} | policy
    return trainers.offload_strategy(directory / "spill", OffloadCallback, **settings)


def assert_equal_with_it(tools, make, callback, directory, **settings):
    """Train without the callback and with it; return the second Trainer."""
    make_strategy = settings.pop("make_strategy", lambda: "auto")
    more = settings.pop("callbacks", [])
    plain = tools.fit(make, make_strategy(), directory, callbacks=[*more], **settings)
    trainer, module = tools.fit(make, make_strategy(), directory, callbacks=[*more, callback], **settings)
    assert module.losses
    assert_identical(tools.everything(trainer, module), tools.everything(*plain))
    assert callback.stats.bytes_saved > 0
    assert callback.stats.failures == 0
    assert not callback.offloader.is_open
    assert {"training_step", "teardown"} & set(vars(trainer.strategy)) == set()
    return trainer


# -- the same results -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Net", {"max_epochs": 2}),
        ("Net", {"accumulate_grad_batches": 4}),
        ("Net", {"gradient_clip_val": 0.01, "precision": "bf16-mixed"}),
        ("Net", trainers.BAREBONES),
        ("ManualNet", {}),
        ("ManualNet past Lightning", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value)[:40],
)
def test_bitwise_equal_to_the_trainer_without_it(package, tmp_path, name, settings, monkeypatch):
    monkeypatch.setattr(write_group, "_MIN_BYTES", 64 << 10)  # manual optimization goes back before its forward is over
    tools, callback = package[1], offloading(tmp_path)
    make = partial(tools.ManualNet, through_lightning=False) if "past" in name else getattr(tools, name)
    trainer = assert_equal_with_it(tools, make, callback, tmp_path, **settings)
    assert callback.stats.bytes_written > 0
    assert callback.stats.bytes_read + callback.stats.bytes_forwarded > 0
    assert all(isinstance(optimizer, OffloadedOptimizer) for optimizer in trainer.optimizers)
    assert sum(optimizer.stats.written_bytes for optimizer in trainer.optimizers) > 0
    assert_nothing_left(tmp_path)


def test_a_strategy_of_the_project(package, tmp_path):
    """That does what strategies do in its own way."""
    library, tools = package

    class Mine(library.strategies.SingleDeviceStrategy):
        steps = 0

        def __init__(self):
            super().__init__(device="cpu")

        def training_step(self, *args, **kwargs):
            self.steps += 1
            return self.lightning_module.training_step(*args, **kwargs)

        def backward(self, closure_loss, optimizer, *args, **kwargs):
            self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
            closure_loss.backward()
            return self.precision_plugin.post_backward(closure_loss, self.lightning_module)

        def teardown(self):
            super().teardown()
            self.steps = -self.steps

    callback = offloading(tmp_path)
    trainer = assert_equal_with_it(tools, tools.Net, callback, tmp_path, make_strategy=Mine, accelerator="auto")
    assert trainer.strategy.steps == -tools.NUM_BATCHES
    assert callback._num_ended == tools.NUM_BATCHES


def test_checkpoints_are_ordinary_ones_in_both_directions(package, tmp_path):
    library, tools = package
    found = []
    for writer in ([], [offloading(tmp_path)]):
        path = tmp_path / f"{len(writer)}"
        saving = library.callbacks.ModelCheckpoint(path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
        tools.fit(tools.Net, "auto", tmp_path, callbacks=[saving, *writer], enable_checkpointing=True)
        for reader in ([], [offloading(tmp_path)]):
            resumed = {"ckpt_path": path / "step=3.ckpt", "callbacks": reader, "max_epochs": 2}
            found.append(tools.everything(*tools.fit(tools.Net, "auto", tmp_path, **resumed)))
    assert len(found[0]["losses"]) > 0
    for other in found[1:]:
        assert_identical(other, found[0])


def test_a_finder_tries_plain_steps(tmp_path):
    finder = partial(lightning.pytorch.callbacks.BatchSizeFinder, steps_per_trial=2, init_val=16, max_trials=2)
    found = []
    for more in ([], [offloading(tmp_path)]):
        trainer, module = trainers.fit(trainers.Net, "auto", tmp_path, callbacks=[finder(), *more])
        found.append(trainers.everything(trainer, module) | {"batch_size": module.batch_size})
    assert_identical(found[1], found[0])
    assert isinstance(trainer.optimizers[0], OffloadedOptimizer)


@pytest.mark.parametrize("log_metrics", [True, False])
def test_a_logger_is_enough_for_numbers_and_verdict(log_metrics, package, tmp_path, caplog):
    callback, seen = offloading(tmp_path), []

    class Watched(package[1].Net):
        def on_train_start(self):
            seen.extend(type(one) for one in self.trainer.callbacks)

    callback.log_metrics = log_metrics
    logger = package[0].loggers.CSVLogger(tmp_path / "csv")
    checkpoint = package[0].callbacks.ModelCheckpoint(tmp_path / "checkpoints", save_last=True)
    settings = {"callbacks": [callback, checkpoint], "enable_checkpointing": True}
    with caplog.at_level(logging.INFO):
        trainer, _ = package[1].fit(Watched, "auto", tmp_path, logger=logger, log_every_n_steps=1, **settings)
    told = "io/stall_s" in Path(logger.log_dir, "metrics.csv").read_text(), "lightning_ssd: " in caplog.text
    assert told == (log_metrics, log_metrics)
    assert (DefaultMonitor in seen) is log_metrics
    assert issubclass(seen[-1], package[0].callbacks.ModelCheckpoint), "it sees the effects of others"
    assert DefaultMonitor not in map(type, trainer.callbacks)
    saved = torch.load(checkpoint.last_model_path, weights_only=False)
    assert not [key for key in saved["callbacks"] if "Monitor" in key]


# -- its life ---------------------------------------------------------------------------------------------------------


def test_a_second_trainer_of_the_same_arguments_and_copies(package, tmp_path):
    """And a second fit of one Trainer."""
    tools, callback = package[1], offloading(tmp_path)
    kwargs = {"callbacks": [callback]}
    found = []
    for arguments in (kwargs, kwargs, copy.deepcopy(kwargs), pickle.loads(pickle.dumps(kwargs))):
        trainer, module = tools.fit(tools.Net, "auto", tmp_path, **arguments)
        trainer.validate(module, verbose=False)
        found.append(tools.everything(trainer, module))
        assert isinstance(arguments["callbacks"][0], OffloadCallback)
        assert arguments["callbacks"][0].stats.bytes_written > 0
    for other in found[1:]:
        assert_identical(other, found[0])
    again = []
    for more in ([], [callback]):
        trainer, module = tools.fit(tools.Net, "auto", tmp_path, callbacks=more)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module)
        again.append(tools.everything(trainer, module))
    assert_identical(again[1], again[0])
    fresh = copy.deepcopy(callback)
    assert (fresh.policy, fresh.hardware, fresh.offloader) == (callback.policy, callback.hardware, None)
    assert_nothing_left(tmp_path)


def test_an_error_leaves_nothing_behind(tmp_path):
    callback = offloading(tmp_path)
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        trainers.fit(Failing, "auto", tmp_path, callbacks=[callback])
    assert not callback.offloader.is_open
    assert_nothing_left(tmp_path)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["parameters", "gradients"])
def test_weights_and_gradients_need_a_strategy(name):
    policy = OffloadPolicy(optimizer_states="offload", **{name: "offload"})
    line = r"train with Trainer\(strategy=SSDOffloadStrategy\(policy=...\)\), or SSDOffloadFSDPStrategy for shards"
    with pytest.raises(ConfigError, match=rf"OffloadPolicy\.{name}='offload', .* Write {name}='keep', or {line}"):
        OffloadCallback(policy=policy)


def test_two_that_offload_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"and another OffloadCallback, and only one of them .* unset LIGHTNING_SSD"):
        trainers.fit(trainers.Net, "auto", tmp_path, callbacks=[offloading(tmp_path), offloading(tmp_path)])
    with pytest.raises(ConfigError, match=r"and strategy=SSDOffloadStrategy, and only one .*\. Remove the callback"):
        trainers.fit(trainers.Net, SSDOffloadStrategy(), tmp_path, callbacks=[offloading(tmp_path)])


@pytest.mark.parametrize("kind", [FSDPStrategy, pytorch_lightning.strategies.FSDPStrategy])
def test_strategies_that_have_not_been_tried_are_refused(kind, tmp_path):
    class Mine(kind):
        """Lightning asks for its own class alone whether it is on a GPU."""

    callback = offloading(tmp_path)
    trainer = SimpleNamespace(strategy=Mine(), callbacks=[callback])
    with pytest.raises(ConfigError, match=r"strategy=Mine: FSDPStrategy frees .*\. Use another .*\"ssd_offload_fsdp\""):
        callback.setup(trainer, trainers.Net(), "fit")
    callback.setup(trainer, trainers.Net(), "validate")


# -- from the environment ---------------------------------------------------------------------------------------------


def test_the_environment_names_a_policy_or_a_file(monkeypatch, tmp_path):
    named = {
        "offload": OffloadPolicy(activations="offload"),
        "auto": OffloadPolicy(),
        "states": OffloadPolicy(optimizer_states="offload"),
        "recompute_offload": OffloadPolicy(activations="recompute_offload"),
    }
    file = tmp_path / "mine.yaml"
    file.write_text("policy: {activations: offload, min_tensor_bytes: 64KiB}\nhardware: {paths: [/my/drive]}\n")
    for text, policy in (named | {str(file): OffloadPolicy(activations="offload", min_tensor_bytes="64KiB")}).items():
        monkeypatch.setenv("LIGHTNING_SSD", text)
        (callback,) = callbacks_from_environment()
        assert callback.policy == policy
    assert callback.hardware == HardwareProfile(paths=["/my/drive"])
    monkeypatch.setenv("LIGHTNING_SSD", "")
    assert callbacks_from_environment() == []


@pytest.mark.parametrize(
    ("text", "content", "message"),
    [
        ("ofload", None, r"'ofload' is no policy's name and no file\. Set it to one of 'auto', 'offload', .* `pol"),
        ("file", "policy: {", r"'file' is no file of settings: .*\. Write the sections .*, such as `policy: {"),
        ("file", "- 1", r"no file of settings: .*\. Write the sections policy and hardware"),
        ("file", "offload: {}", r"no file of settings: .*'offload'\. Write the sections policy and hardware"),
        ("file", "policy: {activation: offload}", r"policy\.activation='offload' is no setting\. Write one of acti"),
        ("file", "policy: {activations: of}", r"OffloadPolicy\.activations='of' is not possible"),
        ("everything", None, r"OffloadPolicy\.parameters='offload', .* Write parameters='keep'"),
    ],
)
def test_a_wrong_environment_is_refused(monkeypatch, tmp_path, text, content, message):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / text).write_text(content)
    monkeypatch.setenv("LIGHTNING_SSD", text)
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        callbacks_from_environment()
