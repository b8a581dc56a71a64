"""What of a model is brought in together, and which weights have to stay."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from lightning_ssd.common.tensors import PLAIN_TYPES, can_count_holders, holders, storage_of
from lightning_ssd.parameters.file_slices import FileSlices, file_slices
from lightning_ssd.parameters.guard import is_guarded
from lightning_ssd.parameters.weight_files import is_mapped
from lightning_ssd.recompute.block_discovery import belongs_to_compiler, find_blocks

__all__ = ["SharedWeights", "is_plain", "owners", "shared_weights", "why_it_stays"]


@dataclass(slots=True)
class SharedWeights:
    """All weights of a model that lie in one storage: tied ones, or parts of one larger tensor."""

    storage: torch.UntypedStorage
    names: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    has_buffers: bool = False
    slices: FileSlices | None = None
    """Where the storage is a part of a file that PyTorch has mapped: all such parts of the module."""

    @property
    def is_frozen(self) -> bool:
        """Whether none of them is trained."""
        return not any(tensor.requires_grad for tensor in self.tensors)


def shared_weights(module: nn.Module, min_nbytes: int, device: str = "cpu") -> list[SharedWeights]:
    """The storages under the parameters of ``module`` that are at least so large, in the order of ``parameters()``.

    Only dense tensors on a device of that type, of PyTorch's own classes. Buffers are looked at for those they share
    with parameters.
    """
    found: dict[int, SharedWeights] = {}
    for name, tensor in module.named_parameters(remove_duplicate=True):
        if is_plain(tensor, device):
            storage = storage_of(tensor)
            if storage.nbytes() >= max(min_nbytes, 1):
                weights = found.setdefault(storage._cdata, SharedWeights(storage))
                weights.names.append(name)
                weights.tensors.append(tensor)
    for buffer in module.buffers() if found else ():
        if is_plain(buffer, device) and (shared := found.get(buffer.untyped_storage()._cdata)) is not None:
            shared.has_buffers = True
    if any(not weights.storage.resizable() for weights in found.values()):
        tensors = (*module.parameters(), *module.buffers())
        slices = file_slices(storage_of(tensor) for tensor in tensors if is_plain(tensor))
        for weights in found.values():
            weights.slices = slices.get(weights.storage._cdata)
    return list(found.values())


def is_plain(tensor: torch.Tensor, device: str = "cpu") -> bool:
    """Whether a tensor is nothing but a view of ordinary memory of a device."""
    return (
        (type(tensor) in PLAIN_TYPES or is_guarded(tensor))
        and tensor.layout is torch.strided
        and tensor.device.type == device
        and not tensor.is_quantized
    )


def why_it_stays(weights: SharedWeights) -> str | None:
    """Why a storage cannot be exchanged for another one with the same bytes; ``None``: it can.

    Whoever holds the storage besides the parameters (a view, a slice in a list, an array of NumPy) would keep the old
    bytes and see no change of the weight any more.
    """
    if weights.has_buffers:
        return "a buffer lies in the same memory"
    if weights.storage.is_shared():
        return "it is in memory that processes share"
    if weights.slices is None and not (weights.storage.resizable() or is_mapped(weights.storage)):
        return (
            "its memory was not made by PyTorch (it shows an array of NumPy, or a file in a way that cannot be "
            "followed); give it memory of its own before, by weight.data = weight.data.clone()"
        )
    if not can_count_holders():
        return "this PyTorch does not tell who else holds its memory"
    if weights.slices is not None and (reason := weights.slices.why_it_stays(weights.storage)) is not None:
        return reason
    others = holders(weights.storage) - len(weights.tensors)
    if others:
        return f"something else holds its memory ({others} {'tensor' if others == 1 else 'tensors'})"
    if any(tensor._use_count() > 1 for tensor in weights.tensors):  # type: ignore[attr-defined]  # in no stub
        return "something outside of Python holds it (an array by DLPack, or a graph that has not been used yet)"
    if sys.getrefcount(weights.storage) > _references_of_one():
        return "something else holds its storage object"
    return None


@functools.cache
def _references_of_one() -> int:
    """To a storage object that only a :class:`SharedWeights` refers to, seen as in :func:`why_it_stays`."""
    tensor = torch.empty(1)
    weights = SharedWeights(tensor.untyped_storage())
    return sys.getrefcount(weights.storage)


def owners(
    module: nn.Module, names: Iterable[str], *, watches_compiled: bool = False
) -> dict[str, tuple[str, nn.Module | None]]:
    """For each weight, the name and the module of the unit that it is brought in with: its block, else its own module.

    The module is ``None`` where its forward belongs to the compiler: nobody tells then when it runs.
    """
    blocks, modules = find_blocks(module), dict(module.named_modules(remove_duplicate=False))
    return {name: _owner_of(name, modules, blocks, watches_compiled) for name in names}


def _owner_of(
    name: str, modules: dict[str, nn.Module], blocks: dict[str, nn.Module], watches_compiled: bool
) -> tuple[str, nn.Module | None]:
    """See :func:`owners`."""
    own = name.rpartition(".")[0]
    for path in _paths(own):
        if path in blocks:
            return path, blocks[path]
        if belongs_to_compiler(modules[path]):
            is_watched = watches_compiled and path and not isinstance(modules[path], torch.jit.ScriptModule)
            return path, modules[path] if is_watched else None
    return own, modules[own]


def _paths(name: str) -> list[str]:
    """``a.b`` -> "", "a", "a.b". No generator: one that is dropped halfway would swallow an interrupt."""
    parts = name.split(".") if name else []
    return [".".join(parts[:count]) for count in range(len(parts) + 1)]
