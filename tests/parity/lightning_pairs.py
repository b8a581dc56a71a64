"""A Lightning training with everything on SSD, and its plain twin."""

import lightning as L
import pytest

from lightning_ssd.optimizer.offloaded_optimizer import OffloadedOptimizer
from tests.support.helpers import assert_identical
from tests.support.trainers import LIGHTNING_NOISE, everything, fit, offload_strategy

MARKS = [
    *(pytest.mark.filterwarnings(noise) for noise in LIGHTNING_NOISE),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:You have set log_momentum=True, but some optimizers do not"),
    pytest.mark.usefixtures("many_subgroups"),
]
ALL_AWAY = pytest.mark.parametrize(
    "what_is_away", ["everything", pytest.param("states", marks=pytest.mark.exhaustive)], indirect=True
)
"""For what changes the model; of the other tests states alone are the default."""
SHORT = {"limit_train_batches": 4, "limit_val_batches": 1}
AWAY = {
    "activations": {"optimizer_states": "keep"},
    "states": {},
    "everything": {"parameters": "offload", "gradients": "offload"},
}
"""What waits, where it is not activations and optimizer states."""
away = {}
"""One of them: the fixture ``what_is_away`` says which."""


class Drains(L.Callback):
    """Backward begins when everything has left, so that it is the drive that gives the bytes back."""

    def on_before_backward(self, trainer, pl_module, loss):
        trainer.strategy.offloader.flush()


def all_on_ssd(directory, *, states=True, endurance=None, **policy):
    settings = {"activations": "offload", "optimizer_states": "offload", "drive_endurance": endurance}
    settings |= (away if states else {"optimizer_states": "keep"}) | policy
    return offload_strategy(directory / "spill", **settings)


def assert_moved(trainer):
    """A test in which nothing took our way would show nothing."""
    states = trainer.strategy.policy.optimizer_states == "offload"
    stats = trainer.strategy.stats
    assert stats.bytes_written > 0
    assert stats.bytes_read + stats.bytes_forwarded > 0  # what is wanted before it has left is handed on
    assert stats.failures == 0
    for optimizer in trainer.optimizers:
        assert isinstance(optimizer, OffloadedOptimizer) == states
    if trainer.strategy.policy.parameters == "offload":
        assert trainer.strategy.stats.weights_bytes > 0
    if states:
        totals = [optimizer.stats for optimizer in trainer.optimizers]
        assert sum(total.written_bytes for total in totals) > 0
        assert all(total.resident_peak_bytes < total.state_bytes for total in totals if total.read_bytes)


def both(make, directory, settings=lambda directory: {}, *, states=True):
    """A plain training and ours, with the same losses, weights and states."""
    plain = fit(make, "auto", directory / "plain", **(SHORT | settings(directory / "plain")))
    mine = SHORT | settings(directory / "ours")
    mine["callbacks"] = [*mine.get("callbacks", ()), Drains()]
    ours = fit(make, all_on_ssd(directory, states=states), directory / "ours", **mine)
    assert plain[1].losses
    assert_identical(everything(*ours), everything(*plain))
    assert_moved(ours[0])
    return plain, ours
