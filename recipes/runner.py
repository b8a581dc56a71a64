"""One training run of a composed configuration, with what it cost."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from hydra.utils import instantiate
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.loggers import Logger, WandbLogger
from omegaconf import DictConfig

from lightning_ssd import Offloader, OffloadStats
from recipes.data import TokenData
from recipes.determinism import make_deterministic
from recipes.meter import StepMeter, num_warmup, weights_digest
from recipes.mistakes import ConfigMistake, make_directory
from recipes.models import LanguageModel
from recipes.schema import SCHEMA
from recipes.summary import RunSummary
from recipes.wandb_run import log_configuration, name_wandb_runs

__all__ = ["MeterCallback", "run"]


class MeterCallback(pl.Callback):
    """Feeds a :class:`StepMeter`, keeps the losses and the last counters; a step is a batch."""

    def __init__(self) -> None:
        self.meter = StepMeter()
        self.losses: list[float] = []
        self.stats: OffloadStats | None = None
        self.stats_before = OffloadStats()
        self.backend = self.weights_digest = ""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The device is known from here on."""
        self.meter = StepMeter(pl_module.device, num_warmup=num_warmup(trainer.max_steps))

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """Start of the step."""
        self.meter.start_step()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *args: Any) -> None:
        """End of the step."""
        self.meter.end_step()
        self.losses.append(outputs["loss"].item())
        offloader: Offloader | None = getattr(trainer.strategy, "offloader", None)
        if offloader is not None and self.meter.is_warm:
            offloader.reset_peaks()
            self.stats_before = offloader.stats

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Shards are still on their device, and the offloader is still open; Lightning's own strategies have none."""
        self.weights_digest = weights_digest(pl_module.network)
        offloader: Offloader | None = getattr(trainer.strategy, "offloader", None)
        if offloader is not None:
            self.stats, self.backend = offloader.stats, offloader.description


def run(config: DictConfig, *, model: str, offload: str) -> RunSummary:
    """Train once.

    Args:
        config: a composed configuration.
        model: what to call the model in the summary.
        offload: what to call the way of offloading in the summary.

    Raises:
        ConfigMistake: a key or an option is mistyped; nothing was built.
    """
    SCHEMA.check_config(config)
    make_directory("output_dir", Path(config.output_dir))  # the results come last, and are to have a place
    pl.seed_everything(config.seed, workers=True, verbose=False)
    data = instantiate(config.data)
    module = instantiate(config.model, _convert_="all")
    _check_together(module, data)
    callback = MeterCallback()
    loggers = list(instantiate(name_wandb_runs(config, model=model, offload=offload)).values())
    callbacks = [*instantiate(config.callbacks).values(), callback]
    trainer = instantiate(config.trainer, logger=loggers or False, callbacks=callbacks, _convert_="all")
    if config.trainer.get("deterministic") is None:  # else Lightning has done what it says
        make_deterministic("cuda" if isinstance(trainer.accelerator, CUDAAccelerator) else "cpu")
    with warnings.catch_warnings():
        # The windows are in memory already; worker processes would only copy them.
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        # Lightning asks PyTorch in a way that PyTorch has deprecated; nothing that the user of a recipe can change.
        warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")
        try:
            log_configuration(loggers, config)
            trainer.fit(module, datamodule=data)
        finally:
            _finish(loggers)
    return RunSummary.of(
        callback.meter,
        model=model,
        offload=offload,
        losses=callback.losses,
        weights_digest=callback.weights_digest,
        stats=callback.stats,
        stats_before=callback.stats_before,
        backend=callback.backend,
    )


def _check_together(module: LanguageModel, data: TokenData) -> None:
    """What neither the model nor the data can know alone."""
    limits = {"vocab_size": module.config.vocab_size}
    # T5 has no such limit.
    limits["sequence_length"] = getattr(module.config, "max_position_embeddings", None) or data.sequence_length
    for name, limit in limits.items():
        value = getattr(data, name)
        if value > limit:
            raise ConfigMistake(f"data.{name}={value} is more than the model takes; allowed: up to {limit}")
    heads, shared = (getattr(module.config, f"num_{kind}_heads", None) for kind in ("attention", "key_value"))
    if heads and shared and heads % shared:  # transformers finds it out in the middle of a forward
        raise ConfigMistake(
            f"model.config.num_key_value_heads={shared} does not divide model.config.num_attention_heads={heads}; "
            "allowed: a divisor of it"
        )


def _finish(loggers: list[Logger]) -> None:
    """End the W&B run: the next job of a sweep would write into it."""
    if any(isinstance(logger, WandbLogger) for logger in loggers):
        import wandb  # takes a second, and only its own logger needs it

        wandb.finish()
