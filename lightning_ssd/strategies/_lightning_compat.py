"""Use Lightning's private parts (2.6). Each function names the place in Lightning that it depends on, and parts that
are used as they are get a name of ours in the imports.

``tests/strategies/test_lightning_compat.py`` asserts that each of these places is still as described here.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
from lightning.fabric.strategies.single_device import SingleDeviceStrategy as FabricSingleDeviceStrategy
from lightning.fabric.strategies.strategy import Strategy as FabricStrategy
from lightning.fabric.utilities.distributed import _get_default_process_group_backend_for_device as default_backend
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.fabric.utilities.distributed import _sync_ddp_if_available as reduce_over_processes
from lightning.fabric.utilities.imports import _IS_INTERACTIVE as is_interactive
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook as register_comm_hook
from lightning.pytorch.overrides.distributed import _sync_module_states as sync_module_states
from lightning.pytorch.strategies import ParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.ddp import _DDPForwardRedirection as DDPForwardRedirection
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.utilities.exceptions import _augment_message as explain
from typing_extensions import override

from lightning_ssd.errors import BudgetError

if TYPE_CHECKING:
    from lightning_ssd.strategies.processes import StartMethod

__all__ = [
    "DDPForwardRedirection",
    "allow_compiled_modules",
    "as_out_of_memory",
    "become_one_device",
    "default_backend",
    "explain",
    "is_compiled_by_lightning",
    "is_interactive",
    "is_named",
    "is_trying_a_size",
    "make_launcher",
    "reduce_over_processes",
    "register_comm_hook",
    "stands_for_base_backward",
    "start_process_group",
    "sync_module_states",
]

_F = TypeVar("_F", bound=Callable[..., Any])


# -- how Lightning recognises a strategy -------------------------------------------------------------------------------


def allow_compiled_modules(strategy: type[ParallelStrategy]) -> None:
    """Let the Trainer take compiled modules with a strategy that is none of Lightning's own.

    Answers ``_verify_strategy_supports_compile`` in ``lightning.pytorch.utilities.compile``, which refuses whatever is
    not a ``SingleDeviceStrategy``, ``DDPStrategy`` or ``FSDPStrategy``. The first of them it asks about nowhere else.
    """
    SingleDeviceStrategy.register(strategy)


def stands_for_base_backward(method: _F) -> _F:
    """Let a Fabric strategy's ``backward`` pass for the base class' one, so that ``loss.backward()`` is not refused.

    Answers ``_FabricModule._register_backward_hook`` in ``lightning.fabric.wrappers``, which asks ``is_overridden`` in
    ``lightning_utilities.core.overrides``; that one looks through ``__wrapped__``.
    """
    method.__wrapped__ = FabricStrategy.backward  # type: ignore[attr-defined]
    return method


def become_one_device(strategy: FabricDDPStrategy) -> None:
    """Make ``strategy`` also a ``SingleDeviceStrategy``, which communicates with no other process. Idempotent.

    Answers ``Fabric._validate_launched`` and ``Fabric.no_backward_sync`` in ``lightning.fabric.fabric``: only of such a
    strategy may ``launch()`` be left out, and has the second one nothing to do. But a strategy learns the number of its
    devices after it is built, so that its class is changed.
    """
    if not isinstance(strategy, FabricSingleDeviceStrategy):
        strategy.__class__ = _on_one_device(type(strategy))


class _OneDevice(FabricSingleDeviceStrategy):
    """Makes a strategy for several devices, which follows it among the bases of a class, one for a single device."""

    parallel_devices: list[torch.device] | None
    # The launcher (torchrun, SLURM) may have started more processes, each of which trains alone.
    global_rank = 0
    local_rank = 0
    node_rank = 0
    world_size = 1
    distributed_sampler_kwargs = None

    @property
    @override
    def root_device(self) -> torch.device:
        return self.parallel_devices[0] if self.parallel_devices else torch.device("cpu")

    def _setup_distributed(self) -> None:
        """Return at once: there is no other process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (type(self).__bases__[1], self.__getstate__())


@functools.cache
def _on_one_device(strategy: type[FabricDDPStrategy]) -> type[FabricDDPStrategy]:
    names = {"__module__": strategy.__module__, "__qualname__": strategy.__qualname__, "__doc__": strategy.__doc__}
    return types.new_class(strategy.__name__, (_OneDevice, strategy), exec_body=lambda body: body.update(names))


def _unpickled(strategy: type[FabricDDPStrategy], state: dict[str, Any]) -> FabricDDPStrategy:
    made = object.__new__(_on_one_device(strategy))
    made.__dict__.update(state)
    return made


# -- the batch-size finder ---------------------------------------------------------------------------------------------


class _TooLargeError(BudgetError, RuntimeError):
    """A :class:`BudgetError` that the finder understands."""


def as_out_of_memory(error: BudgetError) -> BudgetError:
    """Translate an error for the batch-size finder, which then tries a smaller size.

    Answers ``is_out_of_cpu_memory`` in ``lightning.pytorch.utilities.memory``, which knows memory that has run out by
    PyTorch's words in a ``RuntimeError`` with one argument, and by nothing else.
    """
    return _TooLargeError(f"{error} (to the batch-size finder: DefaultCPUAllocator: can't allocate memory)")


def is_trying_a_size(trainer: pl.Trainer, finders: Sequence[BatchSizeFinder]) -> bool:
    """Tell whether one of the Trainer's batch-size finders is at work.

    Answers ``__scale_batch_reset_params`` in ``lightning.pytorch.tuner.batch_size_scaling``, which takes all callbacks
    out of the Trainer, the finder too, while it tries a size.
    """
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return any(finder not in callbacks for finder in finders)


# -- what Lightning's own strategies use -------------------------------------------------------------------------------


def is_compiled_by_lightning(module: pl.LightningModule) -> bool:
    """Tell whether the module came to the Trainer as ``torch.compile(module)``.

    Answers ``from_compiled`` in ``lightning.pytorch.utilities.compile``, which notes it in ``_compiler_ctx``.
    """
    return module._compiler_ctx is not None


def is_named(value: object, name: str) -> bool:
    """Tell whether a class of that name, of either package, is among the value's classes."""
    return any(base.__name__ == name for base in type(value).__mro__)


def make_launcher(
    strategy: ParallelStrategy,
    environment: ClusterEnvironment,
    start_method: StartMethod,
    num_processes: int,
    num_nodes: int,
) -> _Launcher:
    """Make the launcher that starts the processes of a strategy for several.

    Answers ``Strategy.launcher`` in ``lightning.pytorch.strategies.strategy``, which returns ``_launcher``, and the two
    classes in ``lightning.pytorch.strategies.launchers``. ``DDPStrategy._configure_launcher`` does the same.
    """
    if start_method == "popen":
        return _SubprocessScriptLauncher(environment, num_processes, num_nodes)
    return _MultiProcessingLauncher(strategy, start_method=start_method)


def start_process_group(
    environment: ClusterEnvironment, backend: str, timeout: timedelta | None, device: torch.device
) -> None:
    """Meet the other processes: ``_init_dist_connection`` in ``lightning.fabric.utilities.distributed``."""
    device_id = None if device.type == "cpu" else device
    _init_dist_connection(environment, backend, timeout=timeout, device_id=device_id)
