"""Makes a Fabric strategy for several devices one for a single device, once it is known that there is one only.

Fabric asks ``isinstance(strategy, SingleDeviceStrategy)`` to know whether ``launch()`` may be left out and
``no_backward_sync()`` has nothing to do. A strategy learns the number of its devices after it is built. Knows nothing
of offloading.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.single_device import SingleDeviceStrategy
from typing_extensions import override

__all__ = ["become_one_device"]


def become_one_device(strategy: DDPStrategy) -> None:
    """From now on ``strategy`` is a ``SingleDeviceStrategy`` too, which meets no other process. Idempotent."""
    if not isinstance(strategy, SingleDeviceStrategy):
        strategy.__class__ = _on_one_device(type(strategy))


class _OneDevice(SingleDeviceStrategy):
    """Stands before a strategy for several devices among the bases of a class."""

    parallel_devices: list[torch.device] | None
    # This process may still be one of many to somebody else (torchrun, SLURM); not to us.
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
        """There is nobody to meet."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (type(self).__bases__[1], self.__getstate__())


@functools.cache
def _on_one_device(strategy: type[DDPStrategy]) -> type[DDPStrategy]:
    names = {"__module__": strategy.__module__, "__qualname__": strategy.__qualname__, "__doc__": strategy.__doc__}
    return types.new_class(strategy.__name__, (_OneDevice, strategy), exec_body=lambda body: body.update(names))


def _unpickled(strategy: type[DDPStrategy], state: dict[str, Any]) -> DDPStrategy:
    made = object.__new__(_on_one_device(strategy))
    made.__dict__.update(state)
    return made
