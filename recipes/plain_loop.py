"""The training of ``recipes.train`` as a plain PyTorch loop, with ``lightning_ssd.Offloader``.

    python -m recipes.plain_loop model=gpt offload=ssd
    python -m recipes.plain_loop model=llama offload=keep trainer.max_steps=5

Takes the overrides of ``recipes.train`` and uses its model, data, offload, hardware, seed and trainer.max_steps. With
the same ones, the weights at the end are bit for bit those of the Lightning run.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

import lightning_ssd
from lightning_ssd import OffloadStats
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
    torch.manual_seed(config.seed)
    recipe: LanguageModel = instantiate(config.model, _convert_="all")
    batches = endless(instantiate(config.data).train_dataloader())
    device = torch.device("cuda" if torch.cuda.is_available() and config.trainer.accelerator != "cpu" else "cpu")
    make_deterministic(device)
    network = recipe.make_network().to(device)
    optimizer = recipe.make_optimizer(network.parameters())
    meter = StepMeter(device, num_warmup=num_warmup(config.trainer.max_steps))
    losses: list[float] = []
    before = OffloadStats()
    with _offloader(config, device) as offloader:
        if offloader is not None:
            offloader.open(network)
        for step in range(config.trainer.max_steps):
            meter.start_step()
            with nullcontext() if offloader is None else offloader.saved_tensors():
                loss = compute_loss(network, next(batches).to(device), recipe.objective, mask_seed=step)
            optimizer.zero_grad()
            loss.backward()
            if offloader is not None:
                offloader.end_backward()
            optimizer.step()
            meter.end_step()
            if offloader is not None and meter.is_warm:
                offloader.reset_peaks()
                before = offloader.stats
            losses.append(loss.item())
            print(f"step {step + 1}: loss {losses[-1]:.6f}, {meter.step_s[-1]:.2f} s", flush=True)
        stats, backend = (None, "") if offloader is None else (offloader.stats, offloader.description)
    return RunSummary.of(
        meter,
        model=model,
        offload=offload,
        losses=losses,
        weights_digest=weights_digest(network),
        stats=stats,
        stats_before=before,
        backend=backend,
    )


def _offloader(config: DictConfig, device: torch.device) -> AbstractContextManager[lightning_ssd.Offloader | None]:
    if "offload" not in config:
        return nullcontext()
    # ``with`` opens it before it has seen the network, so that it could only guess the device, and would say the CPU.
    return lightning_ssd.Offloader(
        policy=instantiate(config.offload),
        hardware=instantiate(config.hardware, _convert_="all"),
        device=device,
        default_directory=config.output_dir,
    )


def main(arguments: Sequence[str] | None = None) -> RunSummary:
    """Entry point.

    Args:
        arguments: overrides; default: those of ``sys.argv``.
    """
    return run_command(train, arguments, output_dir="outputs/plain_loop", usage=__doc__ or "")


if __name__ == "__main__":
    main()
