"""The parts of a model that are brought in together, and which weights have to stay."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import repeat

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from lightning_ssd.common.dtensor import ShardedParameter, local_of, sharded_of
from lightning_ssd.common.sent_storages import is_in_other_processes
from lightning_ssd.common.tensors import PLAIN_TYPES, holders, storage_of
from lightning_ssd.memory.file_mapping import private_file_ranges
from lightning_ssd.parameters.files.mapped_storage import is_mapped
from lightning_ssd.parameters.guard.guard import is_guarded
from lightning_ssd.parameters.pager import Place
from lightning_ssd.recompute.block_discovery import belongs_to_compiler, find_blocks

__all__ = [
    "SharedWeights",
    "is_held_in_c",
    "is_plain",
    "owners",
    "sharded_by_name",
    "shared_weights",
    "weights_of",
    "why_it_stays",
]


@dataclass(slots=True)
class SharedWeights:
    """All weights of a model that lie in one storage: tied ones, parts of one larger tensor, or a shard of FSDP2's."""

    storage: torch.UntypedStorage
    names: list[str] = field(default_factory=list)
    parameters: list[torch.Tensor] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    """Whatever of the model shows the memory: the parameters, or what FSDP2 has of a shard."""
    has_buffers: bool = False
    shard: ShardedParameter | None = None
    """That it is, if FSDP2 has cut it."""
    shows_file: bool = False
    """Whether the storage is a part of a file that ``safetensors`` or ``torch.load(mmap=True)`` has mapped."""
    overlaps: bool = False
    """Whether that is so, and another storage of the module shows some of the same bytes."""

    @property
    def is_frozen(self) -> bool:
        return not any(parameter.requires_grad for parameter in self.parameters)

    @property
    def trained_bytes(self) -> int:
        """Bytes of those that are trained, as far as they are in this process."""
        return sum(local_of(parameter).nbytes for parameter in self.parameters if parameter.requires_grad)


def shared_weights(module: nn.Module, min_nbytes: int, device: str = "cpu") -> list[SharedWeights]:
    """The storages under the parameters of ``module`` that are at least so large, in the order of ``parameters()``.

    Only dense tensors on a device of that type, of PyTorch's own classes. Of a parameter that FSDP2 manages, the shard;
    what it has gathered for a while is left to it. Buffers are looked at for those they share with parameters.
    """
    found: dict[int, SharedWeights] = {}
    sharded = sharded_by_name(module)
    for name, tensor in module.named_parameters():
        shard = sharded.get(name)
        tensors = [tensor] if shard is None else shard.holders()
        if not is_plain(tensors[0], device):
            continue
        storage = storage_of(tensors[0])
        if storage.nbytes() < max(min_nbytes, 1) and not is_guarded(tensors[0]):  # such a one may be away
            continue
        weights = found.setdefault(storage._cdata, SharedWeights(storage))
        weights.names.append(name)
        weights.parameters.append(tensor if shard is None else shard.parameter)
        weights.tensors += tensors
        weights.shard = shard
    for buffer in module.buffers() if found else ():
        if is_plain(buffer, device) and (shared := found.get(buffer.untyped_storage()._cdata)) is not None:
            shared.has_buffers = True
    if any(not weights.storage.resizable() for weights in found.values()):
        _note_files(module, found)
    return list(found.values())


def _note_files(module: nn.Module, found: Mapping[int, SharedWeights]) -> None:
    """Note which storages show files that were mapped privately, and which of these overlap."""
    tensors = filter(is_plain, (*module.parameters(), *module.buffers()))
    storages = {storage._cdata: storage for storage in map(storage_of, tensors)}
    spans = {key: (storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for key, storage in storages.items()}
    files = private_file_ranges()
    overlapping, farthest, reach = set[int](), 0, 0  # in order: each one with the one before that reaches farthest
    for key in sorted((key for key, (begin, end) in spans.items() if begin < end), key=spans.__getitem__):
        begin, end = spans[key]
        if begin < reach:
            overlapping |= {key, farthest}
        if end > reach:
            farthest, reach = key, end
    for key, weights in found.items():
        if key in spans and not weights.storage.resizable() and not is_mapped(weights.storage):
            begin, end = spans[key]
            weights.shows_file = any(first <= begin and end <= stop for first, stop in files)
            weights.overlaps = key in overlapping


def weights_of(shard: ShardedParameter, min_nbytes: int, device: str) -> SharedWeights | None:
    """A shard that FSDP2 has just cut; ``None``: it cannot wait."""
    tensors, (_, name) = shard.holders(), shard.names[0]
    if not is_plain(tensors[0], device) or tensors[0].untyped_storage().nbytes() < max(min_nbytes, 1):
        return None
    return SharedWeights(tensors[0].untyped_storage(), [name], [shard.parameter], tensors)


def sharded_by_name(module: nn.Module) -> dict[str, ShardedParameter]:
    """Parameters that FSDP2 manages, by each of their names in ``module``."""
    shards = {(id(owner), name): shard for shard in sharded_of(module) for owner, name in shard.names}
    if not shards:
        return {}
    modules = list(module.named_modules(remove_duplicate=False))
    return {
        f"{prefix}.{name}" if prefix else name: shard
        for prefix, owner in modules
        for name in owner._parameters
        if (shard := shards.get((id(owner), name))) is not None
    }


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

    A holder of the storage besides the parameters (a view, a slice in a list, an array of NumPy) would keep the old
    bytes and see no change of the weight any more.
    """
    if weights.has_buffers:
        return "a buffer lies in the same memory"
    if is_in_other_processes(weights.storage):
        return "it is in memory that processes share"
    if not (weights.shows_file or weights.storage.resizable() or is_mapped(weights.storage)):
        return (
            "its memory was not made by PyTorch (it shows an array of NumPy, or a file in a way that cannot be "
            "followed); give it memory of its own before, by weight.data = weight.data.clone()"
        )
    if weights.overlaps:
        return "another weight lies in the same bytes of the file that it shows"
    others = holders(weights.storage) - len(weights.tensors)
    if others:
        return f"something else holds its memory ({others} {'tensor' if others == 1 else 'tensors'})"
    if any(map(is_held_in_c, weights.tensors, repeat(weights.tensors))):
        return "something outside of Python holds it (an array by DLPack, or a graph that has not been used yet)"
    if sys.getrefcount(weights.storage) > _references_of_one():
        return "something else holds its storage object"
    return None


def is_held_in_c(tensor: torch.Tensor, known: Iterable[torch.Tensor] = ()) -> bool:
    """Whether code that is not Python holds a tensor, besides known ones that are views of it.

    A graph whose backward is over may live on with its loss. Where its gradients went to (``AccumulateGrad``) holds the
    parameter, and looks at no bytes: of this there is one at most, which is made here if there is none, and so counted.
    What was made in inference mode is in no graph.
    """
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.inference_mode(False):
        num_known = 1 + sum(other._base is tensor for other in known)
        is_counted = tensor.requires_grad and not tensor.is_inference()
        accumulator = torch.autograd.graph.get_gradient_edge(tensor).node if is_counted else None
        num_known += accumulator is not None and tensor.is_leaf
        return tensor._use_count() > num_known  # type: ignore[attr-defined,no-any-return]  # in no stub


@functools.cache
def _references_of_one() -> int:
    """To a storage object that only a :class:`SharedWeights` refers to, seen as in :func:`why_it_stays`."""
    tensor = torch.empty(1)
    weights = SharedWeights(tensor.untyped_storage())
    return sys.getrefcount(weights.storage)


def owners(module: nn.Module, found: Iterable[SharedWeights], *, watches_compiled: bool = False) -> dict[str, Place]:
    """For weights, by their first names, the unit that they are brought in with: their block, else their own module; of
    a shard, what FSDP2 gathers with it.

    The module is ``None`` where its forward belongs to the compiler, or is not known: it is unknown then when it runs.
    """
    blocks, modules = find_blocks(module), dict(module.named_modules(remove_duplicate=False))
    return {
        weights.names[0]: _owner_of(weights.names[0], modules, blocks, watches_compiled)
        if weights.shard is None
        else (f"the shards of {weights.shard.group_name or 'the model'}", weights.shard.group)
        for weights in found
    }


def _owner_of(name: str, modules: dict[str, nn.Module], blocks: dict[str, nn.Module], watches_compiled: bool) -> Place:
    """See :func:`owners`."""
    own = name.rpartition(".")[0]
    if own not in modules:  # a class that names its parameters in a way of its own
        return own, None
    parts = own.split(".") if own else []
    # "a.b" -> "", "a", "a.b". No generator: one that is dropped halfway would swallow an interrupt.
    for path in [".".join(parts[:count]) for count in range(len(parts) + 1)]:
        if path in blocks:
            return path, blocks[path]
        if belongs_to_compiler(modules[path]):
            is_watched = watches_compiled and path and not isinstance(modules[path], torch.jit.ScriptModule)
            return path, modules[path] if is_watched else None
    return own, modules[own]
