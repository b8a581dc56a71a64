"""Gives every Trainer and every Fabric of a pytest run our strategy, with every saved tensor offloaded.

    python -m pytest -p recipes.compat.lightning_plugin --ssd-offload=activations tests_pytorch/loops

For Lightning's own tests (``recipes/compat/lightning_suite.py``). Only where a test leaves the choice of the strategy
to Lightning, or asks for processes of ``DistributedDataParallel`` by name; a strategy that a test builds itself stays,
and so do accelerators that ours does not serve. What was saved and what reached a drive is a property of each test in
the JUnit report.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning.fabric
import lightning.pytorch
import pytest

from lightning_ssd import OffloadPolicy, SSDOffloadStrategy
from lightning_ssd.strategies.fabric import SSDOffloadFabricStrategy

__all__ = ["SAVED", "WRITTEN", "strategy_arguments"]

SAVED, WRITTEN = "bytes_saved", "bytes_written"
"""Names of the properties in the report."""

_ACCELERATORS = ("auto", "cpu", "gpu", "cuda")
_PROCESSES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp_spawn": {"start_method": "spawn"},
    "ddp_fork": {"start_method": "fork"},
    "ddp_find_unused_parameters_true": {"find_unused_parameters": True},
}
"""Strategies that a test asks for by name, for several processes: what ours is told, so that it does the same."""

_OFFLOADED: dict[str, dict[str, Any]] = {
    "activations": {},
    "all": {"optimizer_states": "offload"},
    "everything": {"optimizer_states": "offload", "parameters": "offload", "gradients": "offload"},
}
"""What ``--ssd-offload`` may be, and what is then offloaded besides activations."""

_made: list[Any] = []
"""Strategies of the test that runs."""


def strategy_arguments(settings: dict[str, Any]) -> dict[str, Any] | None:
    """Return what our strategy is built with for a Trainer or Fabric of these settings; ``None``: it is left alone."""
    strategy, accelerator = settings.get("strategy") or "auto", settings.get("accelerator") or "auto"
    if not isinstance(strategy, str) or not isinstance(accelerator, str) or accelerator not in _ACCELERATORS:
        return None
    if strategy == "auto":
        return {}
    # With one device ours is not distributed, on purpose; Lightning's DDPStrategy always is.
    return _PROCESSES.get(strategy) if settings.get("devices") in (2, "2", [0, 1]) else None


def _with_ours(init: Callable[..., None], ours: type, policy: OffloadPolicy) -> Callable[..., None]:
    @functools.wraps(init)
    def built(self: Any, *args: Any, **settings: Any) -> None:
        arguments = strategy_arguments(settings)
        if arguments and policy.gradients == "offload":
            arguments = None  # gradients wait in files of one process alone
        if arguments is not None and not args:
            settings["strategy"] = ours(policy=policy, **arguments)
            _made.append(settings["strategy"])
        init(self, *args, **settings)

    return built


def pytest_addoption(parser: pytest.Parser) -> None:
    """One option: what is offloaded."""
    parser.addoption(
        "--ssd-offload",
        choices=tuple(_OFFLOADED),
        default="activations",
        help="what every Trainer and Fabric offloads: saved activations; states as well; weights and gradients, too",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module is imported."""
    more = _OFFLOADED[config.getoption("--ssd-offload")]
    policy = OffloadPolicy(activations="offload", min_tensor_bytes=0, **more)
    for owner, ours in (
        (lightning.pytorch.Trainer, SSDOffloadStrategy),
        (lightning.fabric.Fabric, SSDOffloadFabricStrategy),
    ):
        owner.__init__ = _with_ours(owner.__init__, ours, policy)  # type: ignore[method-assign]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Tell what the test's strategies have moved in this process."""
    for strategy in _made:
        if isinstance(strategy, SSDOffloadFabricStrategy):
            strategy.close()  # a Fabric has no end of its own, so that its threads would be there in the next test
    stats = [strategy.stats for strategy in _made]
    item.user_properties.append((SAVED, sum(stat.bytes_saved for stat in stats)))
    item.user_properties.append((WRITTEN, sum(stat.bytes_written for stat in stats)))
    _made.clear()
