"""Check options for several processes: how they start, what they may offload, and arguments of DDP."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import nn

from lightning_ssd.common.accelerators import device_types
from lightning_ssd.errors import ConfigError
from lightning_ssd.strategies._lightning_compat import is_interactive

__all__ = ["StartMethod", "check_launch", "check_model", "check_start_method", "ddp_arguments"]

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


def check_start_method(owner: object, start_method: str) -> None:
    """Refuse a start method that does not exist."""
    if start_method not in get_args(StartMethod):
        methods = ", ".join(map(repr, get_args(StartMethod)))
        raise ConfigError(f"{type(owner).__name__}.start_method={start_method!r} is unknown. Write one of {methods}")


def ddp_arguments(*, broadcast_buffers: bool | None, **others: Any) -> dict[str, Any]:
    """Return arguments of ``DistributedDataParallel``, without ``broadcast_buffers`` if that is ``None``."""
    if broadcast_buffers is None:  # PyTorch 2.13 warns whenever it is passed
        return others
    return {**others, "broadcast_buffers": broadcast_buffers}


def check_launch(strategy: Any, takes_it: str, device: torch.device) -> None:
    """Before processes are started, refuse devices and policies with which no model can be trained.

    Args:
        strategy: a strategy of ours for one device, or several with ``DistributedDataParallel``.
        takes_it: the class that has taken it, "Trainer" or "Fabric".
        device: the device of this process.
    """
    name, num_processes = type(strategy).__name__, strategy.num_nodes * strategy.num_processes
    if device.type not in device_types():
        raise ConfigError(
            f"{name} got a device of type {device.type!r}, and can only offload from "
            f"{', '.join(map(repr, device_types()))}. Pass accelerator='cpu' or another strategy to {takes_it}"
        )
    if num_processes <= 1:
        return
    if is_interactive and strategy._start_method != "fork":
        raise ConfigError(
            f"{name} got {strategy.num_processes} devices in an interactive session with "
            f"start_method={strategy._start_method!r}, which cannot run there. Write devices=1, or "
            f"{name}(start_method='fork')"
        )
    if strategy.policy.gradients != "keep":
        raise ConfigError(
            f"{name} with {num_processes} processes got OffloadPolicy.gradients={strategy.policy.gradients!r}: "
            "DistributedDataParallel keeps all gradients in its buckets. Write gradients='keep', or train shards with "
            "SSDOffloadFSDPStrategy, which offloads their gradients, too"
        )


def check_model(strategy: Any, module: nn.Module) -> None:
    """Before a model is moved to its device for training, refuse it if none of its weights could be offloaded."""
    policy, num_processes = strategy.policy, strategy.num_nodes * strategy.num_processes
    if num_processes <= 1 or policy.parameters == "keep" or policy.optimizer_states == "keep":
        return  # with optimizer_states="keep" the policy offloads no trained weights anyway
    if any(p.nbytes >= policy.min_tensor_nbytes and not p.requires_grad for p in module.parameters()):
        return
    raise ConfigError(
        f"{type(strategy).__name__} with {num_processes} processes got OffloadPolicy.parameters={policy.parameters!r} "
        "and no frozen weight of at least min_tensor_bytes: DistributedDataParallel holds trained weights, and their "
        "gradients in buckets. Freeze weights with requires_grad=False (LoRA), write parameters='keep', or train "
        "shards with SSDOffloadFSDPStrategy"
    )
