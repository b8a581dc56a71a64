"""Checkpoints of Lightning trainings with optimizer states on SSD: those of plain ones, whoever goes on from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy

from lightning_ssd.strategies.checkpoint_io import StreamedCheckpointIO
from tests.parity.states_on_ssd import MARKS, assert_moved, everything, states_on_ssd
from tests.support.helpers import assert_identical
from tests.support.trainers import Net, fit, make_trainer

pytestmark = MARKS


def strategy_named(name: str, directory: Path) -> Strategy | str:
    return "auto" if name == "plain" else states_on_ssd(directory)


def test_a_resumed_training_goes_on_whoever_saved(spill_dir: Path) -> None:
    """Plain to ours, ours to plain, ours to ours: the files hold the same, and so does what comes of them."""
    saved = {}
    for name in ("plain", "ours"):
        saving = ModelCheckpoint(spill_dir / name, save_last=True)
        fit(Net, strategy_named(name, spill_dir), spill_dir, callbacks=[saving], enable_checkpointing=True)
        path = spill_dir / name / "last.ckpt"
        saved[name] = torch.load(path, weights_only=False)
    for key in ("state_dict", "optimizer_states", "loops", "global_step", "lr_schedulers"):
        assert_identical(saved["ours"][key], saved["plain"][key])
    results = {}
    for source in ("plain", "ours"):
        for name in ("plain", "ours"):
            L.seed_everything(8, verbose=False)
            module = Net()
            trainer = make_trainer(strategy_named(name, spill_dir), spill_dir, max_epochs=2)
            trainer.fit(module, ckpt_path=spill_dir / source / "last.ckpt")
            results[source, name] = everything(trainer, module)
            if name == "ours":
                assert_moved(trainer)
    expected = results.pop(("plain", "plain"))
    assert expected["optimizers"][0]["state"][0]["step"] == 12
    for got in results.values():
        assert_identical(got, expected)


def test_checkpoints_within_an_epoch_do_not_disturb(spill_dir: Path) -> None:
    def settings(name: str) -> dict[str, Any]:
        saving = ModelCheckpoint(spill_dir / name, every_n_train_steps=2, save_top_k=-1, filename="{step}")
        return {"callbacks": [saving], "enable_checkpointing": True}

    expected = everything(*fit(Net, "auto", spill_dir, **settings("plain")))
    trainer, module = fit(Net, states_on_ssd(spill_dir), spill_dir, **settings("ours"))
    assert_identical(everything(trainer, module), expected)
    paths = sorted(path.name for path in (spill_dir / "plain").iterdir())
    assert len(paths) == 3
    assert sorted(path.name for path in (spill_dir / "ours").iterdir()) == paths
    for path in paths:
        ours, plain = (torch.load(spill_dir / name / path, weights_only=False) for name in ("ours", "plain"))
        assert_identical(ours["optimizer_states"], plain["optimizer_states"])


def test_save_after_fit_has_ended(spill_dir: Path) -> None:
    """The files are closed then; the states are still there, and can be resumed from."""
    fit(Net, "auto", spill_dir)[0].save_checkpoint(spill_dir / "plain.ckpt")
    trainer, module = fit(Net, states_on_ssd(spill_dir), spill_dir)
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


def test_checkpoints_are_streamed_unless_the_user_has_a_way_of_his_own(spill_dir: Path) -> None:
    class Mine(StreamedCheckpointIO):
        pass

    trainer, _ = fit(Net, states_on_ssd(spill_dir), spill_dir, max_steps=1)
    assert type(trainer.strategy.checkpoint_io) is StreamedCheckpointIO
    trainer, _ = fit(Net, states_on_ssd(spill_dir), spill_dir, max_steps=1, plugins=[Mine()])
    assert type(trainer.strategy.checkpoint_io) is Mine
