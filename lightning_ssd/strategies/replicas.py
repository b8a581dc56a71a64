"""Checks of what cannot wait on drives where ``DistributedDataParallel`` trains all of the model in each process."""

from __future__ import annotations

from torch import nn

from lightning_ssd.config import OffloadPolicy
from lightning_ssd.errors import ConfigError

__all__ = ["check_model", "check_policy"]


def check_policy(owner: str, num_processes: int, policy: OffloadPolicy) -> None:
    """Before processes are started: refuse what no model could have.

    Raises:
        ConfigError: with the name of the owner.
    """
    if policy.gradients != "keep":
        raise ConfigError(
            f"{owner} with {num_processes} processes got OffloadPolicy.gradients={policy.gradients!r}: "
            "DistributedDataParallel keeps all gradients in its buckets; allowed: gradients='keep' with weights that "
            "are not trained (LoRA), or SSDOffloadFSDPStrategy, whose shards wait with their gradients"
        )


def check_model(owner: str, num_processes: int, policy: OffloadPolicy, module: nn.Module) -> None:
    """Before the model is moved anywhere: refuse one of which nothing could wait, where it is to be trained.

    Raises:
        ConfigError: with the name of the owner.
    """
    if policy.parameters == "keep" or policy.optimizer_states == "keep":
        return  # the latter: trained weights were not asked for
    if any(p.nbytes >= policy.min_tensor_nbytes and not p.requires_grad for p in module.parameters()):
        return
    raise ConfigError(
        f"{owner} with {num_processes} processes got OffloadPolicy.parameters={policy.parameters!r} and no frozen "
        "weight of at least min_tensor_bytes: DistributedDataParallel holds what is trained, and its gradients in "
        "buckets; allowed: weights with requires_grad=False (LoRA), parameters='keep', or SSDOffloadFSDPStrategy, "
        "whose shards wait"
    )
