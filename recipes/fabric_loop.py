"""The training of ``recipes.train`` as a loop of one's own in Lightning Fabric, with ``SSDOffloadFabricStrategy``.

    python -m recipes.fabric_loop
    python -m recipes.fabric_loop model=gpt offload=ssd trainer.max_steps=5
    python -m recipes.fabric_loop offload=ssd offload.optimizer_states=offload trainer.precision=bf16-mixed

Trains a small GPT on the text that every Python carries. Takes the overrides of ``recipes.train`` and uses its model,
data, offload, hardware, seed and trainer.max_steps, accelerator, devices and precision. With the same ones, the weights
at the end are bit for bit those of the Lightning run. Loss and metrics of each step go to ``csv/version_*/metrics.csv``
in the output directory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from hydra.utils import instantiate
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from omegaconf import DictConfig

from lightning_ssd import HardwareProfile, Offloader, OffloadStats, SSDOffloadFabricStrategy
from lightning_ssd._environment import PATHS_VARIABLE
from recipes.determinism import make_deterministic
from recipes.meter import StepMeter, num_warmup, weights_digest
from recipes.models import LanguageModel, compute_loss
from recipes.own_loop import endless, run_command
from recipes.summary import RunSummary

__all__ = ["main", "train"]


def train(config: DictConfig, *, model: str = "", offload: str = "") -> RunSummary:
    """Train once.

    Args:
        config: a composed configuration; without an ``offload`` part nothing is offloaded or counted.
        model: what to call the model in the summary.
        offload: what to call the way of offloading in the summary.
    """
    fabric = _fabric(config)
    fabric.launch()
    make_deterministic(fabric.device)
    torch.manual_seed(config.seed)
    recipe: LanguageModel = instantiate(config.model, _convert_="all")
    loader = fabric.setup_dataloaders(instantiate(config.data).train_dataloader())
    raw = recipe.make_network()
    optimizer = recipe.make_optimizer(raw.parameters())
    network, optimizer = fabric.setup(raw, optimizer)
    meter = StepMeter(fabric.device, num_warmup=num_warmup(config.trainer.max_steps))
    batches, losses, before = endless(loader), [], OffloadStats()
    for step in range(config.trainer.max_steps):
        meter.start_step()
        loss = compute_loss(network, next(batches), recipe.objective, mask_seed=step)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        meter.end_step()
        losses.append(loss.item())
        fabric.print(f"step {step + 1}: loss {losses[-1]:.6f}, {meter.step_s[-1]:.2f} s", flush=True)
        offloader = _offloader(fabric)
        metrics = {} if offloader is None else offloader.drain_metrics()
        fabric.log_dict({"train/loss": losses[-1], **metrics}, step=step + 1)
        if offloader is not None and meter.is_warm:
            offloader.reset_peaks()
            before = offloader.stats
    fabric.logger.finalize("success")
    offloader = _offloader(fabric)
    summary = RunSummary.of(
        meter,
        model=model,
        offload=offload,
        losses=losses,
        weights_digest=weights_digest(raw),
        stats=None if offloader is None else offloader.stats,
        stats_before=before,
        backend="" if offloader is None else offloader.description,
    )
    if isinstance(fabric.strategy, SSDOffloadFabricStrategy):
        fabric.strategy.close()  # the end of the process would do it, too
    return summary


def _offloader(fabric: Fabric) -> Offloader | None:
    strategy = fabric.strategy
    return strategy.offloader if isinstance(strategy, SSDOffloadFabricStrategy) else None


def _fabric(config: DictConfig) -> Fabric:
    strategy: SSDOffloadFabricStrategy | str = "auto"
    if "offload" in config:
        hardware: HardwareProfile = instantiate(config.hardware, _convert_="all")
        if not hardware.paths and PATHS_VARIABLE not in os.environ:
            Path(config.output_dir).mkdir(parents=True, exist_ok=True)
            hardware = replace(hardware, paths=(config.output_dir,))
        strategy = SSDOffloadFabricStrategy(policy=instantiate(config.offload), hardware=hardware)
    return Fabric(
        strategy=strategy,
        accelerator=config.trainer.accelerator,
        devices=config.trainer.devices,
        precision=config.trainer.precision,
        loggers=CSVLogger(config.output_dir, name="csv"),
    )


def main(arguments: Sequence[str] | None = None) -> RunSummary:
    """Entry point.

    Args:
        arguments: overrides; default: those of ``sys.argv``.
    """
    return run_command(train, arguments, output_dir="outputs/fabric_loop", usage=__doc__ or "")


if __name__ == "__main__":
    main()
