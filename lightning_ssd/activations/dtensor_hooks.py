"""Lets saved-tensor hooks that know plain tensors alone see the local parts of DTensors.

With tensor parallelism half of what autograd saves are DTensors. Their memory is that of a plain tensor, which the
hooks below us move like any other; only how it is spread, and whether it has been edited, is known to the DTensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch

from lightning_ssd.activations.kept_tensor import keep
from lightning_ssd.activations.saved_pass import SavedPass
from lightning_ssd.common.dtensor import is_shard
from lightning_ssd.common.inplace_edits import inplace_error
from lightning_ssd.common.tensors import PLAIN_TYPES, StorageKey

__all__ = ["shards_unwrapped"]


class _SavedShard(NamedTuple):
    """A DTensor without its memory, and what the hooks below have made of its local part."""

    packed: Any
    alias: Any
    """Shares the DTensor's version counter, and how it is spread."""


@contextmanager
def unwrapped_within(saving: AbstractContextManager[None]) -> Iterator[None]:
    """Enter :func:`shards_unwrapped` around a forward within these hooks of ours, which are entered by then."""
    if isinstance(saving, SavedPass) and saving.is_plain:  # those below are the user's, who expects DTensors
        yield
        return
    with shards_unwrapped():
        yield


@contextmanager
def shards_unwrapped() -> Iterator[None]:
    """While it lasts, the innermost saved-tensor hooks get the local tensor wherever a DTensor is saved."""
    below: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if below is None:
        yield
        return
    pack_below, unpack_below = below

    edits = _Edits()

    def pack(tensor: torch.Tensor) -> Any:
        if is_shard(tensor) and _may_unwrap(tensor):
            local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
            if not edits.are_known(local):
                saved = _pack_shard(tensor, pack_below)
                edits.watch(local, saved.alias)
                return saved
        elif edits and type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided and edits.are_known(tensor):
            return keep(tensor)
        return pack_below(tensor)

    def unpack(packed: Any) -> torch.Tensor:
        if type(packed) is _SavedShard:
            return _unpack_shard(packed, unpack_below)
        tensor: torch.Tensor = unpack_below(packed)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


class _Edits:
    """Remembers which memory was saved as part of a DTensor, to notice edits that only that DTensor has counted.

    Another DTensor over the same memory (``redistribute``, ``from_local``), or the plain tensor of ``to_local``, begins
    to count anew. The hooks below, which know memory by its storage and its counter, would take it for what they saved
    before the edit. So it stays in memory.
    """

    def __init__(self) -> None:
        self._watched: dict[int, tuple[StorageKey, list[tuple[Any, int]]]] = {}

    def __bool__(self) -> bool:
        return bool(self._watched)

    def watch(self, local: torch.Tensor, alias: Any) -> None:
        """``alias`` has the counter of a DTensor that was saved just now."""
        storage = local.untyped_storage()
        known = self._watched.setdefault(storage._cdata, (StorageKey(storage), []))
        known[1].append((alias, alias._version))

    def are_known(self, local: torch.Tensor) -> bool:
        """Whether the memory was edited since a DTensor over it was saved."""
        known = self._watched.get(local.untyped_storage()._cdata)
        return known is not None and any(alias._version != version for alias, version in known[1])


def _may_unwrap(tensor: Any) -> bool:
    """Parameters stay what they are. So does what has been edited in place: the local tensor knows nothing of it, so
    that an earlier version of the same memory could not be told from this one.
    """
    is_parameter = tensor.is_leaf and tensor.requires_grad
    return type(tensor._local_tensor) in PLAIN_TYPES and tensor._version == 0 and not is_parameter


def _pack_shard(tensor: Any, pack: Callable[[Any], Any]) -> _SavedShard:
    alias: Any = tensor.detach()
    alias._local_tensor = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return _SavedShard(pack(tensor._local_tensor), alias)


def _unpack_shard(saved: _SavedShard, unpack: Callable[[Any], Any]) -> torch.Tensor:
    """The DTensor again, with its own version counter.

    Raises:
        RuntimeError: it was edited in place since.
    """
    alias = saved.alias
    if alias._version != 0:
        description = alias.dtype, alias.device, alias.size()
        raise inplace_error(description, version=alias._version, expected=0)
    tensor: Any = alias.detach()
    tensor._local_tensor = unpack(saved.packed)
    rebuilt: torch.Tensor = tensor
    return rebuilt
