"""Register policies under names for ``strategy="..."``, for Trainers and Fabrics of both packages of Lightning."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_ssd.common.after_import import after_import
from lightning_ssd.common.validation import expect
from lightning_ssd.config import HardwareProfile, OffloadPolicy
from lightning_ssd.errors import ConfigError
from lightning_ssd.strategies.fabric import SSDOffloadFabricStrategy
from lightning_ssd.strategies.fsdp import SSDOffloadFSDPStrategy
from lightning_ssd.strategies.session import check_options
from lightning_ssd.strategies.ssd_offload import SSDOffloadStrategy

__all__ = ["POLICIES", "register", "register_strategy"]

POLICIES: dict[str, OffloadPolicy] = {
    "auto": OffloadPolicy(),
    "offload": OffloadPolicy(activations="offload"),
    "states": OffloadPolicy(optimizer_states="offload"),
    "everything": OffloadPolicy(
        activations="offload", parameters="offload", gradients="offload", optimizer_states="offload"
    ),
    "recompute": OffloadPolicy(activations="recompute"),
    "recompute_offload": OffloadPolicy(activations="recompute_offload"),
}
"""Policies that strategies and ``$LIGHTNING_SSD`` take by name."""
_STRATEGIES = {
    "ssd_offload": "auto",
    "ssd_offload_states": "states",
    "ssd_offload_everything": "everything",
    "ssd_recompute_offload": "recompute_offload",
}


def register() -> None:
    """Register the names of this package. An import of ``lightning_ssd`` calls it; further calls are no error."""
    for name, policy in _STRATEGIES.items():
        register_strategy(name, policy=POLICIES[policy])
    _register_for_trainers(SSDOffloadFSDPStrategy.strategy_name, SSDOffloadFSDPStrategy, {})


def register_strategy(
    name: str, *, policy: OffloadPolicy | None = None, hardware: HardwareProfile | None = None
) -> None:
    """Let ``Trainer(strategy=name)`` and ``Fabric(strategy=name)`` train with a policy, in both packages of Lightning.

    For programs that take a strategy only by its name, or make several Trainers with the same arguments: each Trainer
    gets a new :class:`SSDOffloadStrategy`, each Fabric a new :class:`SSDOffloadFabricStrategy`. The name is known in
    this process. Scripts that Lightning starts again for each device run the line again.

    Example::

        lightning_ssd.register_strategy("my_ssd", policy=lightning_ssd.OffloadPolicy(activation_budget="4GiB"))
        trainer = L.Trainer(strategy="my_ssd")

    Args:
        name: the name; case does not matter, as everywhere in Lightning.
        policy: says what is offloaded; default: ``OffloadPolicy()``.
        hardware: says where to; default: ``$LIGHTNING_SSD_PATHS``, else the Trainer's ``default_root_dir``.

    Raises:
        ConfigError: ``name`` is no text, or is the name of a strategy of another package.
    """
    expect("name", name, str, '"my_ssd"')
    checked_policy, checked_hardware = check_options(policy, hardware)
    settings = {"policy": checked_policy, "hardware": checked_hardware}
    _register_for_trainers(name.lower(), SSDOffloadStrategy, settings)
    _register_name(STRATEGY_REGISTRY, name.lower(), SSDOffloadFabricStrategy, settings)
    after_import(
        "lightning_fabric.strategies",
        partial(_serve_other, "STRATEGY_REGISTRY", name.lower(), SSDOffloadFabricStrategy, settings),
    )


def _register_for_trainers(name: str, strategy: type[Any], settings: dict[str, Any]) -> None:
    _register_name(StrategyRegistry, name, strategy, settings)
    after_import("pytorch_lightning.strategies", partial(_serve_other, "StrategyRegistry", name, strategy, settings))


def _serve_other(registry: str, name: str, strategy: type[Any], settings: dict[str, Any], other: ModuleType) -> None:
    """Let the other package of Lightning take a strategy, which ``become_counterpart`` then gives the class for it."""
    other.Strategy.register(strategy)
    _register_name(getattr(other, registry), name, strategy, settings)


def _register_name(registry: Any, name: str, strategy: type[Any], settings: dict[str, Any]) -> None:
    known = registry[name]["strategy"] if name in registry else strategy
    if (known.__module__, known.__qualname__) != (strategy.__module__, strategy.__qualname__):
        raise ConfigError(
            f"strategy name {name!r} belongs to {known.__module__}.{known.__qualname__} already. Write a name that no "
            'other strategy has, such as register_strategy("my_ssd", policy=...)'
        )
    registry.register(name, strategy, description=strategy.description, override=True, **settings)
