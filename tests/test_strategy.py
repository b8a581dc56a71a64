import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch.utils.data import RandomSampler

from lightning_ssd import HardwareProfile, OffloadPolicy, OffloadStats
from lightning_ssd.errors import ConfigError, StorageError
from lightning_ssd.fsdp import SSDOffloadFSDPStrategy
from lightning_ssd.strategy import SSDOffloadStrategy, register
from tests.helpers import assert_identical
from tests.trainers import (
    LIGHTNING_NOISE,
    Block,
    LBFGSNet,
    ManualNet,
    Net,
    assert_same_training,
    fit,
    make_trainer,
    offload_strategy,
    one_thread,
    result,
)

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [pytest.mark.filterwarnings(noise) for noise in LIGHTNING_NOISE]


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


# -- the same results -------------------------------------------------------------------------------------------------


class WideNet(Net):
    """Activations of 1 MiB: large enough for the default policy."""

    def __init__(self):
        super().__init__(width=1024, batch_size=256)


@pytest.mark.parametrize("name", ["ssd_offload", "SSD_Offload_Activations"])
def test_by_name_with_all_defaults(spill_dir, name):
    _, expected = fit(WideNet, "auto", spill_dir)
    trainer, module = fit(WideNet, name, spill_dir)
    assert type(trainer.strategy) is SSDOffloadStrategy
    assert_identical(result(module), result(expected))
    stats, trace = trainer.strategy.stats, trainer.strategy.offloader.trace
    assert stats.bytes_kept > 0, "the first step was to be kept"
    assert trace is not None
    assert max(storage.nbytes for storage in trace.storages) >= 1 << 20
    assert stats.saved_peak_bytes > 1 << 20
    assert [path for path in spill_dir.rglob("*") if not path.is_dir()] == []


def test_with_all_defaults_but_that_everything_moves(spill_dir):
    _, expected = fit(WideNet, "auto", spill_dir)
    strategy = SSDOffloadStrategy(policy=OffloadPolicy(activations="offload"))
    _, module = fit(WideNet, strategy, spill_dir)
    assert_identical(result(module), result(expected))
    assert strategy.stats.bytes_written > 0
    assert [path for path in spill_dir.rglob("*") if not path.is_dir()] == []


def test_plans_are_followed_and_a_budget_is_kept(tmp_path):
    """Six batches, three epochs; the last steps follow a plan."""
    _, expected = fit(Net, "auto", tmp_path, max_epochs=3)
    budget = 400_000
    strategy = SSDOffloadStrategy(
        policy=OffloadPolicy(min_tensor_bytes=0, activation_budget=budget),
        hardware=HardwareProfile(paths=tmp_path, allow_unsuitable_paths=True),
    )
    _, module = fit(Net, strategy, tmp_path, max_epochs=3)
    assert_identical(result(module), result(expected))
    stats, report = strategy.stats, strategy.offloader.plan_report
    assert stats.saved_peak_bytes > budget >= stats.resident_peak_bytes
    assert report is not None
    assert report.num_plans >= 1
    assert_nothing_left(tmp_path)


NOT_WITH_BAREBONES = (
    "enable_progress_bar",
    "logger",
    "enable_checkpointing",
    "enable_model_summary",
    "num_sanity_val_steps",
)


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        pytest.param(Net, {"max_epochs": 2}, id="two-epochs-with-validation"),
        pytest.param(Net, {"accumulate_grad_batches": 4}, id="accumulation"),
        pytest.param(Net, {"gradient_clip_val": 0.01}, id="clipping"),
        pytest.param(Net, {"precision": "bf16-mixed"}, id="bf16-mixed"),
        pytest.param(Net, {"precision": "bf16-true"}, id="bf16-true"),
        pytest.param(Net, {"precision": "64-true"}, id="64-true"),
        pytest.param(Net, {"overfit_batches": 2, "max_epochs": 2}, id="overfit-batches"),
        pytest.param(Net, {"detect_anomaly": True, "max_steps": 2}, id="detect-anomaly"),
        pytest.param(Net, dict.fromkeys(NOT_WITH_BAREBONES) | {"barebones": True}, id="barebones"),
        pytest.param(lambda: Net(checkpointed=True), {}, id="checkpointed-blocks"),
        pytest.param(ManualNet, {}, id="manual-two-optimizers"),
        pytest.param(lambda: ManualNet(through_lightning=False), {}, id="manual-own-backward"),
        pytest.param(LBFGSNet, {"max_steps": 2}, id="lbfgs"),
    ],
)
@pytest.mark.filterwarnings("ignore:You requested to overfit but enabled train dataloader shuffling")
@pytest.mark.filterwarnings("ignore:.*no-op when using barebones")
@pytest.mark.filterwarnings("ignore:You are trying to `self.log.*barebones")
@pytest.mark.filterwarnings("ignore:.*no-op if `Trainer.barebones=True.`")
def test_bitwise_equal_to_plain_training(tmp_path, make, settings):
    assert_same_training(make, tmp_path, **settings)


@pytest.mark.parametrize(
    "make_callback",
    [lambda: StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1), WeightAveraging],
    ids=["swa", "ema"],
)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
@pytest.mark.filterwarnings("ignore:Swapping scheduler")
def test_weight_averaging(tmp_path, make_callback):
    _, expected = fit(Net, "auto", tmp_path, max_epochs=3, callbacks=[make_callback()])
    trainer, module = fit(Net, offload_strategy(tmp_path), tmp_path, max_epochs=3, callbacks=[make_callback()])
    assert_identical(result(module), result(expected))
    assert trainer.strategy.stats.bytes_saved > 0


def test_a_step_that_returns_none_is_skipped(tmp_path):
    class Skips(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx % 2 else loss

    with pytest.warns(UserWarning, match="returned `None`"):
        assert_same_training(Skips, tmp_path)


# -- one device -------------------------------------------------------------------------------------------------------


def test_one_device_is_one_process_without_a_wrapper(tmp_path):
    seen = {}

    class Looks(Net):
        def training_step(self, batch, batch_idx):
            strategy = self.trainer.strategy
            seen["where"] = strategy.offloader.description
            seen["model"], seen["group"] = strategy.model, torch.distributed.is_initialized()
            seen["open"] = strategy.offloader.is_open
            seen["threads"] = [thread.name for thread in threading.enumerate()]
            return super().training_step(batch, batch_idx)

    trainer, module = fit(Looks, offload_strategy(tmp_path), tmp_path)
    assert seen["model"] is module
    assert not seen["group"]
    assert str(tmp_path / f"lightning_ssd-{os.geteuid()}-rank-0") in seen["where"]
    assert seen["open"]
    assert any(name.startswith("lightning_ssd") for name in seen["threads"])
    assert trainer.strategy.launcher is None
    assert isinstance(trainer.train_dataloader.sampler, RandomSampler)
    assert not isinstance(trainer.strategy, DDPStrategy)
    assert (trainer.world_size, trainer.global_rank, trainer.num_devices) == (1, 0, 1)


def test_torchruns_environment_does_not_make_one_device_a_part_of_something(tmp_path, monkeypatch):
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "GROUP_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    trainer = make_trainer(offload_strategy(tmp_path), tmp_path)
    assert trainer.is_global_zero
    assert trainer.strategy.root_device == torch.device("cpu")


def test_the_batch_size_finder_takes_one_device(tmp_path):
    finder = BatchSizeFinder(max_trials=2, steps_per_trial=1, init_val=8, margin=0.0)
    trainer, module = fit(Net, offload_strategy(tmp_path), tmp_path, callbacks=[finder])
    assert finder.optimal_batch_size == module.batch_size >= 16
    assert trainer.strategy.stats.bytes_saved > 0


INTERACTIVE = """
import warnings
warnings.simplefilter("ignore")
import lightning as L
import lightning_ssd
from lightning_ssd.strategy import SSDOffloadStrategy, register
register()
quiet = dict(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
print("one:", L.Trainer(strategy="ssd_offload", devices=1, **quiet).strategy.launcher)
forked = L.Trainer(strategy=SSDOffloadStrategy(start_method="fork"), devices=2, **quiet).strategy.launcher
print("fork:", forked.is_interactive_compatible)
L.Trainer(strategy="ssd_offload", devices=2, **quiet)
"""


def test_interactive_sessions(tmp_path):
    """What a notebook is to Lightning, without the minutes that a notebook takes."""
    done = subprocess.run(
        [sys.executable, "-i", "-c", INTERACTIVE],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert "one: None" in done.stdout, done.stderr
    assert "fork: True" in done.stdout
    assert "ConfigError: SSDOffloadStrategy got 2 devices in an interactive session" in done.stderr
    assert "SSDOffloadStrategy(start_method='fork')" in done.stderr


# -- the life of the offloader ----------------------------------------------------------------------------------------


def open_files(directory: Path) -> list[str]:
    """Descriptors of this process that lead into ``directory``; anonymous files show as deleted ones."""
    targets = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return [target for target in targets if target.startswith(str(directory))]


def assert_nothing_left(directory: Path) -> None:
    assert [t.name for t in threading.enumerate() if t.name.startswith("lightning_ssd")] == []
    assert open_files(directory) == []


def test_nothing_is_open_before_and_after_fit(tmp_path):
    strategy = offload_strategy(tmp_path)
    trainer = make_trainer(strategy, tmp_path)
    assert strategy.offloader is None
    assert strategy.stats == OffloadStats()
    assert_nothing_left(tmp_path)
    trainer.fit(Net())
    assert not strategy.offloader.is_open
    assert strategy.stats.bytes_saved > 0
    assert_nothing_left(tmp_path)


def test_validation_test_and_prediction_open_nothing(tmp_path):
    strategy = offload_strategy(tmp_path / "spill")
    trainer = make_trainer(strategy, tmp_path)
    module = Net()
    trainer.validate(module, verbose=False)
    trainer.test(module, verbose=False)
    assert len(trainer.predict(module)) == 6
    assert strategy.offloader is None
    assert not (tmp_path / "spill").exists()


def test_weights_are_real_after_fit(tmp_path):
    trainer, module = fit(Net, offload_strategy(tmp_path), tmp_path)
    module.losses.clear()
    trainer.validate(module, verbose=False)
    assert torch.isfinite(torch.stack(module.losses)).all()
    assert_identical(torch.cat(trainer.predict(module)), torch.cat(make_trainer("auto", tmp_path).predict(module)))


def test_fit_twice(tmp_path):
    def twice(strategy):
        trainer, module = fit(Net, strategy, tmp_path)
        trainer.fit_loop.max_epochs += 1
        trainer.fit(module)
        return trainer, module

    _, expected = twice("auto")
    trainer, module = twice(offload_strategy(tmp_path))
    assert_identical(result(module), result(expected))
    # Saved tensors of one epoch: counters begin anew with each fit.
    once, _ = fit(Net, offload_strategy(tmp_path), tmp_path)
    assert trainer.strategy.stats.bytes_saved == once.strategy.stats.bytes_saved
    assert_nothing_left(tmp_path)


class Sabotage(L.Callback):
    """Raises in one hook, in the third batch."""

    def __init__(self, hook, error):
        def fail(trainer, module, *args):
            if module.trainer.global_step >= 2:
                raise error

        setattr(self, hook, fail)


@pytest.mark.parametrize(
    "hook", ["on_train_batch_start", "on_before_backward", "on_after_backward", "on_before_optimizer_step"]
)
def test_an_exception_in_a_callback_reaches_the_user_and_leaves_nothing(tmp_path, hook):
    strategy = offload_strategy(tmp_path)
    with pytest.raises(ZeroDivisionError, match="sabotage"):
        fit(Net, strategy, tmp_path, callbacks=[Sabotage(hook, ZeroDivisionError("sabotage"))])
    assert not strategy.offloader.is_open
    assert_nothing_left(tmp_path)


def test_an_exception_while_the_optimizers_are_built_leaves_nothing(tmp_path):
    class Unbuildable(Net):
        def configure_optimizers(self):
            raise ZeroDivisionError("sabotage")

    with pytest.raises(ZeroDivisionError, match="sabotage"):
        fit(Unbuildable, offload_strategy(tmp_path), tmp_path)
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_an_exception_in_a_step_reaches_the_user_and_the_next_fit_is_exact(tmp_path, phase):
    class Fails(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 2:
                if phase == "forward":
                    raise ZeroDivisionError("sabotage")
                loss.register_hook(lambda grad: 1 / 0)
            return loss

    with pytest.raises(ZeroDivisionError):
        fit(Fails, offload_strategy(tmp_path), tmp_path)
    assert_nothing_left(tmp_path)
    _, module = fit(Net, offload_strategy(tmp_path), tmp_path)
    _, expected = fit(Net, "auto", tmp_path)
    assert_identical(result(module), result(expected))


def test_ctrl_c(tmp_path):
    strategy = offload_strategy(tmp_path)
    with pytest.raises(SystemExit):
        fit(Net, strategy, tmp_path, callbacks=[Sabotage("on_before_backward", KeyboardInterrupt())])
    assert_nothing_left(tmp_path)


def test_a_directory_that_cannot_serve_is_refused_before_the_optimizers_are_built(tmp_path):
    class Counts(Net):
        built = 0

        def configure_optimizers(self):
            Counts.built += 1
            return super().configure_optimizers()

    (tmp_path / "file").touch()
    strategy = SSDOffloadStrategy(hardware=HardwareProfile(paths=[tmp_path / "file"]))
    with pytest.raises(StorageError, match="file"):
        fit(Counts, strategy, tmp_path)
    assert Counts.built == 0
    assert_nothing_left(tmp_path)


def test_the_strategy_can_be_pickled_at_any_time(tmp_path):
    strategy = offload_strategy(tmp_path)
    copied = pickle.loads(pickle.dumps(strategy))
    assert copied.policy == strategy.policy
    trainer, _ = fit(Net, strategy, tmp_path)
    trainer.strategy._lightning_module = trainer.strategy.model = None
    assert pickle.loads(pickle.dumps(strategy)).offloader is None


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_checkpoints_are_ordinary_ones_in_both_directions(tmp_path):
    def saving(directory):
        return {"callbacks": [ModelCheckpoint(directory, save_last=True)], "enable_checkpointing": True}

    fit(Net, "auto", tmp_path, **saving(tmp_path / "plain"))
    fit(Net, offload_strategy(tmp_path), tmp_path, **saving(tmp_path / "ours"))
    resumed = {}
    for source in ("plain", "ours"):
        for strategy in ("auto", offload_strategy(tmp_path)):
            L.seed_everything(8, verbose=False)
            module = Net()
            make_trainer(strategy, tmp_path, max_epochs=2).fit(module, ckpt_path=tmp_path / source / "last.ckpt")
            resumed[source, strategy] = result(module)
    first, *others = resumed.values()
    for other in others:
        assert_identical(other, first)


# -- compiled modules -------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_lightning_module_is_accepted_with_a_warning(tmp_path):
    def compiled():
        module = Net()
        module.log = lambda *args, **kwargs: None  # logging inside a graph is Lightning's own trouble
        return torch.compile(module, backend="aot_eager")

    with pytest.warns(UserWarning, match=r"Net is compiled as a whole.*for block in model\.blocks: block\.compile"):
        trainer, _ = fit(compiled, offload_strategy(tmp_path), tmp_path, max_steps=2)
    assert trainer.strategy.stats.bytes_saved > 0


@pytest.mark.parametrize("how", ["torch.compile", "Module.compile"])
def test_a_compiled_trunk_warns(tmp_path, how):
    class Trunk(Net):
        def __init__(self):
            super().__init__()
            trunk = torch.nn.Sequential(*self.blocks)
            self.blocks = torch.nn.ModuleList([trunk])
            if how == "torch.compile":
                self.blocks[0] = torch.compile(trunk, backend="eager")
            else:
                trunk.compile(backend="eager")

    with pytest.warns(UserWarning, match=r"Trunk\.blocks\.0 is compiled as a whole"):
        fit(Trunk, offload_strategy(tmp_path), tmp_path, max_steps=1)


def test_compiled_blocks_do_not_warn_and_are_exact(tmp_path):
    class Regional(Net):
        def __init__(self):
            super().__init__()
            for block in self.blocks:
                block.compile(backend="eager")

    assert_same_training(Regional, tmp_path, max_steps=2)


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "offload"}, r'policy=\'offload\' is a str; allowed: .*OffloadPolicy\(activations="offload"\)'),
        ({"policy": {"activations": "offload"}}, r"is a dict; allowed: OffloadPolicy"),
        ({"hardware": "/mnt/nvme"}, r"hardware='/mnt/nvme' is a str; allowed: HardwareProfile"),
        ({"start_method": "thread"}, r"start_method='thread'; allowed: 'popen', 'spawn', 'fork', 'forkserver'"),
        ({"model_averaging_period": 4}, r"model_averaging_period=4 with ddp_comm_state=None"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments, message):
    with pytest.raises(ConfigError, match=message):
        SSDOffloadStrategy(**arguments)


def test_a_mistyped_argument_is_named():
    with pytest.raises(TypeError, match="polcy"):
        SSDOffloadStrategy(polcy=OffloadPolicy())
    with pytest.raises(TypeError, match="positional"):
        SSDOffloadStrategy(OffloadPolicy())


def test_devices_that_we_do_not_serve_are_refused():
    strategy = SSDOffloadStrategy(parallel_devices=[torch.device("mps")])
    with pytest.raises(ConfigError, match="got a device of type 'mps'; allowed: 'cpu', 'cuda'"):
        strategy._configure_launcher()


def test_before_a_trainer_took_it():
    strategy = SSDOffloadStrategy()
    assert not strategy.is_distributed
    assert strategy.launcher is None
    with pytest.raises(RuntimeError, match="it gets one from the Trainer"):
        _ = strategy.root_device
    with pytest.raises(RuntimeError, match=r"call Trainer\.fit"):
        strategy.training_step()


def test_restore_happens_before_setup():
    assert not SSDOffloadStrategy().restore_checkpoint_after_setup


CLI_TRAINER = {"accelerator": "cpu", "devices": 1, "logger": False}


@pytest.fixture
def cli_strategy(monkeypatch):
    pytest.importorskip("jsonargparse", reason="LightningCLI needs jsonargparse")
    from lightning.pytorch.cli import LightningCLI

    def build(strategy):
        arguments = {"trainer": {**CLI_TRAINER, "strategy": strategy}}
        cli = LightningCLI(Net, run=False, save_config_callback=None, seed_everything_default=False, args=arguments)
        return cli.trainer.strategy

    monkeypatch.setattr(sys, "argv", sys.argv[:1])
    return build


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lightning_cli_takes_names_and_plain_values(cli_strategy):
    assert type(cli_strategy("ssd_offload")) is SSDOffloadStrategy
    class_path = "lightning_ssd.strategy.SSDOffloadStrategy"
    settings = {
        "policy": {"activations": "offload", "min_tensor_bytes": "2MiB"},
        "hardware": {"paths": ["spill"]},
        "static_graph": True,
    }
    strategy = cli_strategy({"class_path": class_path, "init_args": settings})
    assert strategy.policy == OffloadPolicy(activations="offload", min_tensor_bytes="2MiB")
    assert strategy.hardware.paths == ("spill",)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lightning_cli_names_a_mistyped_argument(cli_strategy, capsys):
    with pytest.raises(SystemExit):
        cli_strategy({"class_path": "lightning_ssd.strategy.SSDOffloadStrategy", "init_args": {"polcy": 1}})
    assert "'polcy' is not accepted" in capsys.readouterr().err


# -- registration -----------------------------------------------------------------------------------------------------


def test_registering_again_changes_nothing():
    register()
    register()
    for name in ("ssd_offload", "ssd_offload_activations"):
        assert isinstance(StrategyRegistry.get(name), SSDOffloadStrategy)
    assert isinstance(StrategyRegistry.get("ssd_offload_fsdp"), SSDOffloadFSDPStrategy)


def test_a_name_that_belongs_to_somebody_else_is_not_taken():
    registry = type(StrategyRegistry)()
    registry.register("ssd_offload", DDPStrategy)
    with pytest.raises(ConfigError, match=r"'ssd_offload' belongs to lightning\.pytorch\.strategies\.ddp\.DDPStrategy"):
        SSDOffloadStrategy.register_strategies(registry)


def test_a_trainer_of_pytorch_lightning_gets_a_hint(tmp_path):
    other = pytest.importorskip("pytorch_lightning")
    register()
    with pytest.raises(ConfigError, match="import lightning as L"):
        other.Trainer(strategy="ssd_offload", accelerator="cpu", logger=False, default_root_dir=tmp_path)


def test_subclasses_keep_their_overrides(tmp_path):
    class Counting(SSDOffloadStrategy):
        steps = 0

        def training_step(self, *args, **kwargs):
            self.steps += 1
            return super().training_step(*args, **kwargs)

    trainer, _ = fit(Net, Counting(hardware=HardwareProfile(paths=[tmp_path], allow_unsuitable_paths=True)), tmp_path)
    assert trainer.strategy.steps == 6


def test_the_blocks_of_these_tests_are_large_enough():
    assert Block().up.weight.nbytes > 4096
