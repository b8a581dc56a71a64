"""Without a callback: a Trainer with a logger gets our numbers, and nothing else of it changes."""

import logging
import re
import warnings
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger

from lightning_ssd import OffloadCallback, OffloadMonitor
from lightning_ssd.errors import ConfigError
from lightning_ssd.strategies.default_monitor import DefaultMonitor
from lightning_ssd.strategies.fsdp import SSDOffloadFSDPStrategy
from lightning_ssd.strategies.ssd_offload import SSDOffloadStrategy
from tests.parity.lightning_nets import Failing
from tests.strategies.test_monitor import KEYS_ON_CPU, read_csv
from tests.support.loggers import RecordingLogger
from tests.support.trainers import BAREBONES, LIGHTNING_NOISE, Net, fit, make_trainer, offload_strategy

pytestmark = [pytest.mark.filterwarnings(noise) for noise in LIGHTNING_NOISE]


strategy_for = partial(offload_strategy, activations="offload")


class Watch(Callback):
    """Notes who is among the callbacks while the Trainer trains."""

    def on_train_start(self, trainer, pl_module):
        self.kinds = [type(callback) for callback in trainer.callbacks]


def test_a_logger_is_enough(tmp_path, caplog):
    logger = CSVLogger(tmp_path / "csv")
    with caplog.at_level(logging.INFO):
        fit(Net, strategy_for(tmp_path), tmp_path, logger=logger, log_every_n_steps=2)
    rows = read_csv(logger)
    assert set(rows[0]) >= KEYS_ON_CPU - {"io/overlap_ratio", "io/write_gib_per_s", "io/read_gib_per_s"}
    ours = [row["step"] for row in rows if row["wear/written_tb"]]
    theirs = [row["step"] for row in rows if row["train/loss"]]
    assert ours == theirs == ["1", "3", "5"]
    # On a busy machine no write of so small a model may have ended at the peak.
    assert re.search("lightning_ssd: (saved activations |nothing saved: at the peak )", caplog.text)


def test_a_logger_may_be_a_mock(tmp_path):
    """As in tests of users' own modules: its attributes are no strings."""
    logger = Mock(spec=Logger, version="0", save_dir=str(tmp_path), experiment=Mock())
    logger.name = "mock"
    fit(Net, strategy_for(tmp_path), tmp_path, logger=logger, log_every_n_steps=2)
    assert logger.log_metrics.called


def test_nothing_else_of_the_trainer_changes_and_checkpoints_stay_last(tmp_path):
    seen = {}
    for log_metrics in (True, False):
        checkpoint = ModelCheckpoint(tmp_path / f"ckpt-{log_metrics}", save_last=True)
        watch = Watch()
        trainer, module = fit(
            Net,
            strategy_for(tmp_path, log_metrics=log_metrics),
            tmp_path,
            callbacks=[watch, checkpoint],
            logger=RecordingLogger(),
            enable_checkpointing=True,
        )
        assert not log_metrics or watch.kinds[-2:] == [DefaultMonitor, ModelCheckpoint]
        saved = torch.load(checkpoint.last_model_path, weights_only=False)
        seen[log_metrics] = {
            "callbacks": [type(callback) for callback in trainer.callbacks],
            "states": {key.partition("{")[0] for key in saved["callbacks"]},
            "metrics": sorted(trainer.callback_metrics),
            "bar": sorted(trainer.progress_bar_metrics),
            "losses": [loss.item() for loss in module.losses],
        }
    assert seen[True] == seen[False]
    trainer = make_trainer(strategy_for(tmp_path), tmp_path, max_epochs=3, logger=RecordingLogger())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for noise in LIGHTNING_NOISE:
            warnings.filterwarnings("ignore", noise.removeprefix("ignore:").partition(":")[0])
        trainer.fit(Net(), ckpt_path=str(tmp_path / "ckpt-True" / "last.ckpt"))


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({"log_metrics": False}, {"logger": RecordingLogger()}),
        ({}, {"logger": False}),
        ({}, {"logger": RecordingLogger(), "fast_dev_run": True}),
        ({}, BAREBONES),
    ],
    ids=["switched off", "no logger", "a trial", "barebones"],
)
def test_where_nobody_reads_it_there_is_none(options, settings, tmp_path):
    kinds = []

    class Looking(Net):
        def on_train_start(self):
            kinds.append([type(callback) for callback in self.trainer.callbacks])

    fit(Looking, strategy_for(tmp_path, **options), tmp_path, **settings)
    assert DefaultMonitor not in kinds[0]


def test_a_monitor_of_the_user_stays_the_only_one(tmp_path):
    logger, watch = RecordingLogger(), Watch()
    callbacks = [watch, OffloadMonitor(verdict=False)]
    fit(Net, strategy_for(tmp_path), tmp_path, callbacks=callbacks, logger=logger, log_every_n_steps=2)
    assert DefaultMonitor not in watch.kinds
    assert [step for step, _ in logger.rows_of_ours()] == [1, 3, 5]


def test_after_a_failed_run_and_in_the_next_one(tmp_path):
    logger = RecordingLogger()
    trainer = make_trainer(strategy_for(tmp_path), tmp_path, logger=logger, log_every_n_steps=2)
    before = list(trainer.callbacks)
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        trainer.fit(Failing())
    assert trainer.callbacks == before
    trainer.fit_loop.max_epochs += 1
    trainer.fit(Net())
    assert logger.rows_of_ours()
    assert trainer.callbacks == before


@pytest.mark.parametrize(
    ("strategy", "wrong"), [(SSDOffloadStrategy, None), (SSDOffloadFSDPStrategy, "yes"), (OffloadCallback, 1)]
)
def test_the_switch_is_on_or_off(strategy, wrong):
    with pytest.raises(ConfigError, match=rf"{strategy.__name__}\.log_metrics={wrong!r} is .* type bool"):
        strategy(log_metrics=wrong)
