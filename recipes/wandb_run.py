"""What a run is called in W&B, and what it knows of its own configuration."""

from __future__ import annotations

from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.pytorch.loggers import Logger, WandbLogger
from omegaconf import DictConfig, OmegaConf

__all__ = ["log_configuration", "name_wandb_runs"]


def name_wandb_runs(config: DictConfig, *, model: str, offload: str) -> DictConfig:
    """Return the configuration of the loggers, with names for W&B runs where it has none.

    The name tells the jobs of a sweep apart, the group tells which belong together, and the job type is the way of
    offloading, so that W&B can colour by it.

    Args:
        config: the whole, composed configuration; not changed.
        model: the option of the group of that name.
        offload: the same.
    """
    loggers: DictConfig = OmegaConf.create(OmegaConf.to_container(config.logger, resolve=True))  # type: ignore[assignment]
    for logger in loggers.values():
        if logger.get("_target_") == "lightning.pytorch.loggers.WandbLogger":
            number = _job_number()
            names = {
                "name": f"{model}-{offload}-seed{config.seed}" + (f"-job{number}" if number is not None else ""),
                "group": _sweep() or f"{model}-seed{config.seed}",
                "job_type": offload,
            }
            logger.update({key: value for key, value in names.items() if logger.get(key) is None})
    return loggers


def log_configuration(loggers: list[Logger], config: DictConfig) -> None:
    """Put the composed configuration, with every value that the run begins with, beside the monitor's settings."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.log_hyperparams({"conf": OmegaConf.to_container(config, resolve=True)})


def _sweep() -> str | None:
    """Name of the sweep's directory; ``None``: this is a run of its own, or was not started by Hydra."""
    is_sweep = HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
    return Path(HydraConfig.get().sweep.dir).name if is_sweep else None


def _job_number() -> int | None:
    return None if _sweep() is None else int(HydraConfig.get().job.num)
