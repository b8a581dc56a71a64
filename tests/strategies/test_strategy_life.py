"""The offloader of a strategy: when it opens and closes, and that nothing is left of it."""

import pickle

import pytest

from lightning_ssd import HardwareProfile, OffloadStats
from lightning_ssd.errors import OffloaderClosedError, StorageError
from lightning_ssd.strategies.ssd_offload import SSDOffloadStrategy
from tests.support.helpers import assert_identical
from tests.support.leftovers import assert_nothing_left
from tests.support.trainers import (
    LIGHTNING_NOISE,
    LBFGSNet,
    ManualNet,
    Net,
    Unlogged,
    fit,
    make_trainer,
    offload_strategy,
    result,
    step_after_fit,
)

pytestmark = [pytest.mark.filterwarnings(noise) for noise in LIGHTNING_NOISE]


# -- the life of the offloader ----------------------------------------------------------------------------------------


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


class UnloggedLBFGS(Unlogged, LBFGSNet):
    pass


def fit_and_a_step(make, strategy, directory):
    trainer, module = fit(make, strategy, directory)
    step_after_fit(trainer)
    return trainer, result(module)


@pytest.mark.parametrize(
    ("make", "activations"),
    [(Unlogged, "offload"), (Unlogged, "recompute"), (UnloggedLBFGS, "offload"), (ManualNet, "offload")],
)
def test_a_loop_that_is_called_again_after_fit_trains_without_us(tmp_path, make, activations):
    """As some of Lightning's own tests do: its strategies take any step after ``teardown``."""
    _, expected = fit_and_a_step(make, "auto", tmp_path)
    strategy = offload_strategy(tmp_path, activations=activations)
    trainer, found = fit_and_a_step(make, strategy, tmp_path)
    assert_identical(found, expected)
    trained, _ = fit(make, offload_strategy(tmp_path, activations=activations), tmp_path)
    assert strategy.stats.num_saved == trained.strategy.stats.num_saved > 0  # the last step saved nothing through us
    assert_nothing_left(tmp_path)
    trainer.fit_loop.max_epochs += 1
    trainer.fit(trainer.lightning_module)
    assert strategy.stats.num_saved == trained.strategy.stats.num_saved  # those of the second fit


def test_a_step_after_fit_with_states_on_ssd_says_where_they_are(tmp_path):
    strategy = offload_strategy(tmp_path, activations="keep", optimizer_states="offload")
    with pytest.raises(OffloaderClosedError, match=r"files are closed; load its state_dict\(\) into another one"):
        fit_and_a_step(Unlogged, strategy, tmp_path)


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


def fails_in(where, error):
    """A module that fails in one of its methods, or within backward, in the third step or before the first one."""

    def fail(self):
        if where == "configure_optimizers" or self.trainer.global_step >= 2:
            raise error

    if where == "backward":
        return type(
            "Fails", (Net,), {"on_before_backward": lambda self, loss: loss.register_hook(lambda _: fail(self))}
        )
    return type("Fails", (Net,), {where: lambda self, *args: fail(self) or getattr(Net, where)(self, *args)})


HOOKS = ("on_train_batch_start", "on_before_backward", "on_before_optimizer_step")


@pytest.mark.parametrize(
    ("where", "error"),
    [
        *((where, ZeroDivisionError()) for where in ("configure_optimizers", "training_step", "backward", *HOOKS)),
        ("on_before_backward", KeyboardInterrupt()),
    ],
)
def test_what_fails_reaches_the_user_leaves_nothing_and_the_next_fit_is_exact(where, error, tmp_path):
    strategy = offload_strategy(tmp_path)
    with pytest.raises(SystemExit if isinstance(error, KeyboardInterrupt) else ZeroDivisionError):
        fit(fails_in(where, error), strategy, tmp_path)
    assert strategy.offloader is None or not strategy.offloader.is_open
    assert_nothing_left(tmp_path)
    if where in ("training_step", "backward"):
        _, module = fit(Net, offload_strategy(tmp_path), tmp_path)
        _, expected = fit(Net, "auto", tmp_path)
        assert_identical(result(module), result(expected))
