"""The life of the files of optimizer states in Lightning trainings, and what is counted of them."""

import lightning as L
import pytest
import torch

from lightning_ssd import OffloadMonitor
from lightning_ssd.errors import ConfigError
from tests.parity.lightning_pairs import MARKS, all_on_ssd, assert_moved
from tests.support.helpers import assert_identical
from tests.support.leftovers import assert_nothing_left
from tests.support.loggers import RecordingLogger
from tests.support.trainers import LBFGSNet, ManualNet, Net, everything, fit

pytestmark = MARKS


def test_fit_and_validate_twice_then_test_and_predict(spill_dir):
    """Each fit has states and files of its own, and what comes after finds none."""

    def all_of_it(strategy):
        trainer, module = fit(Net, strategy, spill_dir)
        first = trainer.optimizers
        outputs = [trainer.validate(module, verbose=False)]
        assert_nothing_left(spill_dir)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module)
        assert trainer.optimizers[0] is not first[0]
        outputs += [trainer.test(module, verbose=False), trainer.predict(module)]
        assert_nothing_left(spill_dir)
        assert len(trainer.optimizers[0].state_dict()["state"]) > 20
        return trainer, everything(trainer, module) | {"outputs": outputs}

    _, expected = all_of_it("auto")
    trainer, got = all_of_it(all_on_ssd(spill_dir))
    assert_identical(got, expected)
    assert_moved(trainer)


def test_what_couples_parameters_is_refused_before_the_first_step(spill_dir):
    module = LBFGSNet()
    with pytest.raises(ConfigError, match=r"LBFGS.*optimizer_states='keep'"):
        fit(lambda: module, all_on_ssd(spill_dir), spill_dir)
    assert not module.losses
    assert_nothing_left(spill_dir)


class Breaks(torch.optim.AdamW):
    """Fails half way through its second step."""

    num_left = None  # of the class: an attribute of the optimizer counts steps, as in plain training

    def step(self, closure=None):
        if Breaks.num_left == 0:
            raise ZeroDivisionError("sabotage")
        Breaks.num_left = None if Breaks.num_left is None else Breaks.num_left - 1
        return super().step(closure)


class Broken(Net):
    def configure_optimizers(self):
        return Breaks(self.parameters(), lr=1e-2)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_within_a_step_reaches_the_user_and_leaves_nothing(spill_dir, monkeypatch):
    """Half the parameters are updated: there is nothing to save, and the error must not be hidden by a second one."""
    trainers = []

    class Notes(L.Callback):
        def on_fit_start(self, trainer, pl_module):
            trainers.append(trainer)

        def on_train_batch_start(self, trainer, pl_module, batch, index):
            monkeypatch.setattr(Breaks, "num_left", 1 if index else None)  # the first step is rehearsed

    with pytest.raises(ZeroDivisionError, match="sabotage"):
        fit(Broken, all_on_ssd(spill_dir, per_parameter_optimizers="Breaks"), spill_dir, callbacks=[Notes()])
    assert_nothing_left(spill_dir)
    with pytest.raises(RuntimeError, match="incomplete"):
        trainers[0].save_checkpoint(spill_dir / "broken.ckpt")
    assert not list(spill_dir.glob("*.ckpt"))
    assert not list(spill_dir.glob(".*.ckpt*"))


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activations", ["keep", "offload"])
def test_the_monitor_counts_what_optimizers_write(activations, spill_dir):
    logger = RecordingLogger()
    strategy = all_on_ssd(spill_dir, activations=activations, endurance="600TB")
    monitor = OffloadMonitor()
    settings = {"logger": logger, "log_every_n_steps": 1, "callbacks": [monitor]}
    trainer, _ = fit(ManualNet, strategy, spill_dir, **settings)
    states = [optimizer.stats for optimizer in trainer.optimizers]
    written = strategy.stats.bytes_written + sum(stats.written_bytes for stats in states)
    read = strategy.stats.bytes_read + sum(stats.read_bytes for stats in states)
    # The last writes and reads may end after the last row.
    rows = [row for _, row in logger.rows_of_ours()]
    told = {key: 2**30 * sum(row[f"io.{key}_gib"] for row in rows) for key in ("write", "read")}
    assert written - 2 * states[0].state_bytes <= told["write"] <= written
    assert read - 2 * states[0].state_bytes <= told["read"] <= read
    assert told["read"] > 2 * states[0].state_bytes
    assert rows[-1]["wear.written_tb"] == pytest.approx(told["write"] / 1e12)
    assert rows[-1]["wear.drive_life_days"] > 0
    assert any("io.read_gib_per_s" in row for row in rows), "no event of an optimizer's tier"
    assert sum(row["io.stall_s"] for row in rows) >= 0.5 * sum(stats.stall_s for stats in states)
    assert "optimizer states: at most " in str(monitor.summary)
    assert told["write"] <= monitor.state_dict()["written_bytes"] <= written
    offloader = strategy.offloader
    assert offloader.optimizer_stats == tuple(states), "the numbers of the end are gone with the files"
