"""Refuse policies that ``DistributedDataParallel`` prevents, because it holds trained weights and their gradients."""

from __future__ import annotations

from torch import nn

from lightning_ssd.config import OffloadPolicy
from lightning_ssd.errors import ConfigError

__all__ = ["check_model", "check_policy"]


def check_policy(owner: str, num_processes: int, policy: OffloadPolicy) -> None:
    """Before processes are started, refuse a policy that works with no model.

    Raises:
        ConfigError: the policy offloads gradients; the error names the owner.
    """
    if policy.gradients != "keep":
        raise ConfigError(
            f"{owner} with {num_processes} processes got OffloadPolicy.gradients={policy.gradients!r}: "
            "DistributedDataParallel keeps all gradients in its buckets. Write gradients='keep', or train shards with "
            "SSDOffloadFSDPStrategy, which offloads their gradients, too"
        )


def check_model(owner: str, num_processes: int, policy: OffloadPolicy, module: nn.Module) -> None:
    """Before a model is moved to its device for training, refuse it if none of its weights could be offloaded.

    Raises:
        ConfigError: the model has no frozen weight that is large enough; the error names the owner.
    """
    if policy.parameters == "keep" or policy.optimizer_states == "keep":
        return  # with optimizer_states="keep" the policy offloads no trained weights anyway
    if any(p.nbytes >= policy.min_tensor_nbytes and not p.requires_grad for p in module.parameters()):
        return
    raise ConfigError(
        f"{owner} with {num_processes} processes got OffloadPolicy.parameters={policy.parameters!r} and no frozen "
        "weight of at least min_tensor_bytes: DistributedDataParallel holds trained weights, and their gradients in "
        "buckets. Freeze weights with requires_grad=False (LoRA), write parameters='keep', or train shards with "
        "SSDOffloadFSDPStrategy"
    )
