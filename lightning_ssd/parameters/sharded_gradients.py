"""The gradients of FSDP2's shards, as FSDP2 leaves them after a backward.

All of a group lie in one memory, which the reduce-scatter has filled: each gradient is a DTensor over a part of it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from lightning_ssd.common.dtensor import is_shard, local_of
from lightning_ssd.common.method_patch import MethodPatch
from lightning_ssd.common.tensors import holders
from lightning_ssd.parameters.files.mapped_storage import is_mapped

__all__ = ["Reduction", "gradients_of", "owned_together", "parameters_of"]

_REFERENCES_OF_HELD = 2
"""References of what FSDP2 holds: its own, and our caller's."""
Pair = tuple[torch.Tensor, Any]
"""A sharded parameter and its gradient."""


class Reduction(MethodPatch):
    """Tells when a group's gradients have been spread over the processes.

    Not a hook of the parameters: there FSDP2 itself still holds the gradient.

    Args:
        group: FSDP2's.
        reduced: called with it.
    """

    __slots__ = ("_reduced",)

    def __init__(self, group: Any, reduced: Callable[[Any], None]) -> None:
        self._reduced = reduced
        super().__init__(group, "post_backward", label="the group of shards")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result, group = self.__wrapped__(*args, **kwargs), self.module
        if group is not None:
            self._reduced(group)
        return result


def parameters_of(group: Any) -> list[torch.Tensor]:
    """The sharded parameters of a group of FSDP2's."""
    return [] if group is None else [fsdp_param.sharded_param for fsdp_param in group.fsdp_params]


def gradients_of(group: Any) -> list[Pair]:
    """Sharded parameters that have a gradient of which this process has a plain part."""
    pairs = [(parameter, parameter.grad) for parameter in parameters_of(group)]
    return [(p, g) for p, g in pairs if g is not None and is_shard(g) and type(local_of(g)) is torch.Tensor]


def owned_together(gradients: Iterable[Pair], group: Any = None) -> list[list[Pair]]:
    """Return those that alone have their memory, by memory: another holder would be parted from them.

    Args:
        gradients: with their parameters.
        group: FSDP2's, which holds on to what copies of shards have reduced together until backward ends, and reads it
            no more. An ``all_reduce_hook`` of the user's gets the same tensor, and may keep it.
    """
    held = getattr(getattr(group, "_all_reduce_state", None), "all_reduce_input", None)
    by_storage: dict[int, list[Pair]] = {}
    for parameter, gradient in gradients:
        by_storage.setdefault(gradient._local_tensor.untyped_storage()._cdata, []).append((parameter, gradient))
    return [members for members in by_storage.values() if _are_alone(members, held)]


def _are_alone(members: Sequence[Pair], held: torch.Tensor | None) -> bool:
    if any(_references(gradient) > _references_of_one() for _, gradient in members):
        return False
    locals_ = [gradient._local_tensor for _, gradient in members]
    storage = locals_[0].untyped_storage()
    bases = {id(local._base): local._base for local in locals_ if local._base is not None}
    if (
        storage.is_shared()
        or not (storage.resizable() or is_mapped(storage))
        or holders(storage) != len(locals_) + len(bases)
    ):
        return False
    if any(
        tensor._use_count() > 1 + sum(local._base is tensor for local in locals_)
        for tensor in (*locals_, *bases.values())
    ):
        return False
    # References of Python show in no count of C++.
    for_held = sum(base is held for base in bases.values()) * _REFERENCES_OF_HELD
    del locals_, storage, bases, held
    of_storage, of_base = _memory_references(members[0][1])
    alone_storage, alone_base = _memory_references_of_one()
    return of_storage <= alone_storage and of_base <= alone_base + for_held


def _memory_references(gradient: Any) -> tuple[int, int]:
    """To the memory of a gradient, and to the tensor that the gradient is a view of, in Python."""
    base = gradient._local_tensor._base
    of_base = 0 if base is None else sys.getrefcount(base)
    del base
    return sys.getrefcount(gradient._local_tensor.untyped_storage()), of_base


@functools.cache
def _memory_references_of_one() -> tuple[int, int]:
    """Return the references where only the gradient has them."""
    whole = torch.empty(2)
    gradient = SimpleNamespace(_local_tensor=whole.as_strided((1,), (1,)))
    del whole
    return _memory_references(gradient)


def _references(gradient: Any) -> int:
    """To the local part of a DTensor, in Python."""
    return sys.getrefcount(gradient._local_tensor)


@functools.cache
def _references_of_one() -> int:
    """Return the references where only the DTensor has it."""
    return _references(SimpleNamespace(_local_tensor=torch.empty(1)))
