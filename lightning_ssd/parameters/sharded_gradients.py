"""The gradients of FSDP2's shards, as FSDP2 leaves them after a backward.

All that a backward has made for a group lie in one memory, which the reduce-scatter has filled: each gradient is a
DTensor over a part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_ssd.common.dtensor import is_shard, local_of
from lightning_ssd.common.method_patch import MethodPatch

__all__ = ["Reduction", "gradients_of", "parameters_of"]


class Reduction(MethodPatch):
    """Tells when a group's gradients have been spread over the processes.

    Not a hook of the parameters: there FSDP2 itself still holds the gradient.

    Args:
        group: FSDP2's.
        reduced: called with it, and with the numbers (``id``) of the parameters whose gradients FSDP2 has just made.
            Nothing but their parameters has these: hooks that get one before are the only code that could.
    """

    __slots__ = ("_reduced",)

    def __init__(self, group: Any, reduced: Callable[[Any, set[int]], None]) -> None:
        self._reduced = reduced
        super().__init__(group, "post_backward", label="the group of shards")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        group = self.module
        without = {id(parameter) for parameter in parameters_of(group) if parameter.grad is None}
        result = self.__wrapped__(*args, **kwargs)
        if group is not None:
            hooked = any(getattr(p, "_post_accumulate_grad_hooks", None) for p in parameters_of(group))
            self._reduced(group, set() if hooked or group._all_reduce_hook is not None else without)
        return result


def parameters_of(group: Any) -> list[torch.Tensor]:
    """The sharded parameters of a group of FSDP2's."""
    return [] if group is None else [fsdp_param.sharded_param for fsdp_param in group.fsdp_params]


def gradients_of(group: Any) -> list[tuple[torch.Tensor, Any]]:
    """Sharded parameters, with their gradients, that have one of which this process has a plain part."""
    pairs = [(parameter, parameter.grad) for parameter in parameters_of(group)]
    return [(p, g) for p, g in pairs if g is not None and is_shard(g) and type(local_of(g)) is torch.Tensor]
