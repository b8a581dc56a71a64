"""Checkpoints of Lightning trainings that wait on SSD: those of plain ones, whoever goes on from them."""

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint, OnExceptionCheckpoint

from lightning_ssd.strategies.checkpoint_io import StreamedCheckpointIO
from tests.parity.lightning_nets import Failing, Mended
from tests.parity.lightning_pairs import ALL_AWAY, MARKS, all_on_ssd, assert_moved, both
from tests.support.helpers import assert_identical
from tests.support.trainers import NUM_BATCHES, Net, everything, fit

pytestmark = [*MARKS, pytest.mark.usefixtures("what_is_away")]


def strategy_named(name, directory):
    return "auto" if name == "plain" else all_on_ssd(directory)


@pytest.mark.parametrize("epochs", [1, 2], ids=["within an epoch", "after it"])
def test_a_resumed_training_goes_on_whoever_saved(epochs, spill_dir):
    """Plain to ours, ours to plain, ours to ours: the files hold the same, and so does what comes of them."""
    saved, results = {}, {}
    file = "step=4.ckpt" if epochs == 1 else "last.ckpt"
    for name in ("plain", "ours"):
        saving = ModelCheckpoint(
            spill_dir / name, every_n_train_steps=2, save_top_k=-1, save_last=True, filename="{step}"
        )
        fit(Net, strategy_named(name, spill_dir), spill_dir, callbacks=[saving], enable_checkpointing=True)
        paths = sorted(path.name for path in (spill_dir / name).iterdir())
        saved[name] = {path: torch.load(spill_dir / name / path, weights_only=False) for path in paths}
    assert len(saved["plain"]) == 4
    for key in ("state_dict", "optimizer_states", "loops", "global_step", "lr_schedulers"):
        mine, plain = ({path: one[key] for path, one in saved[name].items()} for name in ("ours", "plain"))
        assert_identical(mine, plain)
    for source in ("plain", "ours"):
        for name in ("plain", "ours"):
            strategy, path = strategy_named(name, spill_dir), spill_dir / source / file
            trainer, module = fit(Net, strategy, spill_dir, ckpt_path=path, max_epochs=epochs)
            results[source, name] = everything(trainer, module)
            if name == "ours":
                assert_moved(trainer)
    expected = results.pop(("plain", "plain"))
    assert expected["optimizers"][0]["state"][0]["step"] == 6 * epochs
    for got in results.values():
        assert_identical(got, expected)


@pytest.mark.filterwarnings(r"ignore:`.fit\(ckpt_path=None\)` was called without a model")
@pytest.mark.filterwarnings(r"ignore:.fit\(ckpt_path=.last.\) is set, but there is no last checkpoint")
def test_a_checkpoint_on_exception_is_the_plain_one_and_training_goes_on_within_the_epoch(tmp_path):
    results = {}
    for name in ("plain", "ours"):
        directory = tmp_path / name
        strategies = [strategy_named(name, directory) for _ in range(2)]
        callback = OnExceptionCheckpoint(directory, "failed")
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            fit(Failing, strategies[0], directory, callbacks=[callback], enable_checkpointing=True)
        saved = torch.load(directory / "failed.ckpt", weights_only=False)
        path = directory / "failed.ckpt"
        trainer, module = fit(Mended, strategies[1], directory, ckpt_path=path, max_epochs=2)
        assert trainer.global_step == 2 * NUM_BATCHES
        results[name] = {key: saved[key] for key in ("state_dict", "optimizer_states", "loops", "global_step")}
        results[name] |= everything(trainer, module)
    assert results["plain"]["global_step"] == 3
    assert len(results["plain"]["losses"]) > NUM_BATCHES
    assert_identical(results["ours"], results["plain"])


def test_save_after_fit_has_ended(spill_dir):
    """The files are closed then; the states are still there, and can be resumed from."""
    fit(Net, "auto", spill_dir)[0].save_checkpoint(spill_dir / "plain.ckpt")
    trainer, module = fit(Net, all_on_ssd(spill_dir), spill_dir)
    trainer.save_checkpoint(spill_dir / "ours.ckpt")
    trainer.save_checkpoint(spill_dir / "again.ckpt")
    saved = [torch.load(spill_dir / f"{name}.ckpt", weights_only=False) for name in ("plain", "ours", "again")]
    assert len(saved[0]["optimizer_states"][0]["state"]) > 20
    for one in saved[1:]:
        assert_identical(one["optimizer_states"], saved[0]["optimizer_states"])
        assert_identical(one["state_dict"], saved[0]["state_dict"])
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, ckpt_path=spill_dir / "ours.ckpt")
    assert trainer.global_step == 12


def test_checkpoints_are_streamed_unless_the_user_has_a_way_of_his_own(spill_dir):
    class Mine(StreamedCheckpointIO):
        pass

    trainer, _ = fit(Net, all_on_ssd(spill_dir), spill_dir, max_steps=1)
    assert type(trainer.strategy.checkpoint_io) is StreamedCheckpointIO
    trainer, _ = fit(Net, all_on_ssd(spill_dir), spill_dir, max_steps=1, plugins=[Mine()])
    assert type(trainer.strategy.checkpoint_io) is Mine


class Unfreezes(BaseFinetuning):
    """The first block joins after the first epoch, as a group of its own."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.blocks[0])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.blocks[0], optimizer, lr=1e-3)


@ALL_AWAY
def test_frozen_parameters_join_later(spill_dir):
    both(Net, spill_dir, lambda directory: {"callbacks": [Unfreezes()], "max_epochs": 3})


def test_a_resumed_finetuning_has_its_groups_and_states(spill_dir):
    """The callback puts groups into ``param_groups`` after the wrapping and before the states are loaded."""

    def settings(name, epochs):
        saving = ModelCheckpoint(spill_dir / name, save_last=True)
        return {"callbacks": [Unfreezes(), saving], "enable_checkpointing": True, "max_epochs": epochs}

    fit(Net, all_on_ssd(spill_dir), spill_dir, **settings("ours", 2))
    results = []
    for strategy in ("auto", all_on_ssd(spill_dir)):
        path = spill_dir / "ours" / "last.ckpt"
        more = {"ckpt_path": path, "weights_only": False} | settings("more", 3)
        trainer, module = fit(Net, strategy, spill_dir, **more)
        results.append(everything(trainer, module))
    expected, got = results
    assert len(expected["optimizers"][0]["param_groups"]) == 2
    assert len(expected["optimizers"][0]["state"]) == 22
    assert_identical(got, expected)
