"""Tensors of which each process has a part: DTensors, and what FSDP2 gathers from them for a while.

Note: FSDP2's unsharded parameters
    ``fully_shard`` keeps one ``FSDPParam`` per parameter. Its ``all_gather_outputs`` are made by the first all-gather
    and stay the same tensors from then on: resharding resizes their storages to nothing, the next all-gather resizes
    them back and writes into them. The parameter that a module's forward sees (``_unsharded_param``) is a view of them,
    and so is what autograd saves of it. With all-gather extensions (float8, say) it is made of
    ``_unsharded_inner_tensors``, which are resized in the same way. Holding such a tensor holds no memory; but
    whoever takes its storage for an activation's reads memory that has been freed meanwhile.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from lightning_ssd.common.tensors import place_of

__all__ = [
    "CutWatch",
    "Gathered",
    "ShardedGroup",
    "ShardedParameter",
    "address_of",
    "as_piece",
    "even_numel",
    "gathered_of",
    "has_groups_within",
    "has_shape",
    "is_shard",
    "local_of",
    "sharded_of",
    "spec_of",
    "wrap",
]


def _module() -> Any:
    """PyTorch's DTensors; ``None`` while nobody has imported them, so that there is none."""
    return sys.modules.get("torch.distributed.tensor")


def is_shard(value: object) -> bool:
    """Whether this is a DTensor."""
    module = _module()
    return module is not None and isinstance(value, module.DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has of a tensor: the local part of a DTensor, all of any other. Same memory."""
    if not is_shard(tensor):
        return tensor
    local: Any = tensor._local_tensor  # type: ignore[attr-defined]
    # The result of a collective may still be under way.
    part: torch.Tensor = local.wait() if hasattr(local, "wait") else local
    return part


def has_shape(tensor: torch.Tensor) -> bool:
    """Whether it is more than a lazy module's promise of a parameter."""
    return not isinstance(tensor, UninitializedParameter | UninitializedBuffer)


def address_of(tensor: torch.Tensor) -> int:
    """Where the storage of what this process has begins, as :func:`place_of`; 0: it has no memory that can be told."""
    if not has_shape(tensor):
        return 0
    local = local_of(tensor)
    try:
        return place_of(local) if local.layout == torch.strided and local.numel() > 0 else 0
    except (RuntimeError, NotImplementedError):
        return 0  # a subclass without a storage


def spec_of(tensor: torch.Tensor) -> Any:
    """How a DTensor is spread; ``None`` for any other tensor."""
    return tensor._spec if is_shard(tensor) else None  # type: ignore[attr-defined]


def wrap(local: torch.Tensor, spec: Any) -> torch.Tensor:
    """The DTensor of which ``local`` is this process' part; ``local`` itself if ``spec`` is ``None``.

    Not ``DTensor.from_local``, which would bring what is mapped from a file to the mesh's device.
    """
    if spec is None:
        return local
    if spec.tensor_meta.dtype != local.dtype:
        spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
    if local.storage_offset() == 0:
        tensor: torch.Tensor = _module().DTensor(local, spec, requires_grad=False)
        return tensor
    # It takes over the offset, by which deepcopy would take it for a tensor with a storage of its own.
    tensor = _module().DTensor(local.new_empty(0), spec, requires_grad=False)
    tensor._local_tensor = local  # type: ignore[attr-defined]
    return tensor


def as_piece(flat: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Contiguous ``flat``, a slice of this process' part of ``whole``, as a tensor of the same kind.

    Optimizers choose their implementation by the type of their parameters, so that slices of a DTensor have to be
    DTensors. Each process has its own; as "replicated" ones no elementwise operation talks to the others.
    """
    if not is_shard(whole):
        return flat
    spec = spec_of(whole)
    meta = spec.tensor_meta._replace(shape=flat.shape, stride=flat.stride(), dtype=flat.dtype)
    replicated = (_module().Replicate(),) * spec.mesh.ndim
    return wrap(flat, type(spec)(spec.mesh, replicated, tensor_meta=meta))


def even_numel(tensor: torch.Tensor) -> int:
    """Elements of the largest part of ``tensor`` that any process has: the same number in all of them."""
    spec = spec_of(tensor)
    if spec is None:
        return tensor.numel()
    num_parts = 1
    for number, placement in enumerate(spec.placements):
        # Not only `Shard`: what is sharded over two dimensions of a mesh has a class of its own.
        if hasattr(placement, "dim"):
            num_parts *= spec.mesh.size(number)
    return -(-tensor.numel() // num_parts)


class Gathered:
    """What one parameter of FSDP2 becomes while it is gathered; see the note above.

    Args:
        fsdp_param: FSDP2's ``FSDPParam``.
    """

    def __init__(self, fsdp_param: Any) -> None:
        self._fsdp_param = weakref.ref(fsdp_param)

    def tensors(self) -> list[torch.Tensor]:
        """Nothing before the first all-gather."""
        fsdp_param = self._fsdp_param()
        # Without defaults: should a PyTorch name them otherwise, an error is better than what would come of it.
        return [] if fsdp_param is None else [*fsdp_param.all_gather_outputs, *fsdp_param._unsharded_inner_tensors]


def gathered_of(module: torch.nn.Module) -> Iterator[Gathered]:
    """Of all parameters that FSDP2 manages in ``module`` and below; nothing where it does not."""
    for _, group in _groups_of(module):
        yield from map(Gathered, group.fsdp_params)


class ShardedGroup:
    """Parameters that FSDP2 gathers together, of one module or several.

    Args:
        name: of the first module.
        group: FSDP2's ``FSDPParamGroup``; ``None``: it is not made yet.
    """

    def __init__(self, name: str, group: Any) -> None:
        self.name = name
        self.group = group

    @property
    def is_alone(self) -> bool:
        """Whether no other process has shards of it: then nothing is gathered, and shards are copied."""
        return getattr(self.group.mesh_info, "shard_mesh_size", 1) == 1


class ShardedParameter:
    """A parameter of which FSDP2 has cut a shard for each process.

    Args:
        group: that it is gathered with.
        fsdp_param: FSDP2's ``FSDPParam``.
    """

    def __init__(self, group: ShardedGroup, fsdp_param: Any) -> None:
        self.group = group
        self._fsdp_param = fsdp_param

    @property
    def parameter(self) -> torch.Tensor:
        """The DTensor that optimizers get, whatever the module shows just now."""
        parameter: torch.Tensor = self._fsdp_param.sharded_param
        return parameter

    @property
    def names(self) -> list[tuple[torch.nn.Module, str]]:
        """Modules that have it, and as what."""
        info = self._fsdp_param._module_info
        return [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]

    def holders(self) -> list[torch.Tensor]:
        """The shard as the DTensor has it, and all other tensors of FSDP2's over the same memory.

        ``_sharded_param_data`` is what is gathered: the shard with zeros behind it where parts are uneven.
        """
        local = local_of(self.parameter)
        if local.is_meta:
            return [local]
        if self._fsdp_param._sharded_param_data.is_meta:
            # Parameters were made on the meta device, and their modules have got memory one by one. FSDP2 would look
            # for it in the first forward.
            self._fsdp_param.reset_sharded_param()
            local = local_of(self.parameter)
        flat = self._fsdp_param._sharded_param_data
        found = {id(t): t for tensor in (local, flat) for t in (tensor, tensor._base) if t is not None}
        return [
            tensor for tensor in found.values() if tensor.untyped_storage()._cdata == local.untyped_storage()._cdata
        ]


def sharded_of(module: torch.nn.Module) -> Iterator[ShardedParameter]:
    """All parameters that FSDP2 manages in ``module`` and below."""
    for name, group in _groups_of(module):
        own = ShardedGroup(name, group)
        for fsdp_param in group.fsdp_params:
            yield ShardedParameter(own, fsdp_param)


class CutWatch:
    """Tells of each shard as soon as FSDP2 has cut it, or has found other memory for it, until it is removed.

    Args:
        told: called with the shard.
    """

    _METHODS = ("_init_sharded_param", "reset_sharded_param")

    # Several may watch at once, and end in any order: one stand-in tells all. The lock is a leaf.
    _lock: ClassVar[threading.Lock] = threading.Lock()
    _all: ClassVar[list[CutWatch]] = []
    _put_back: ClassVar[list[Callable[[], None]]] = []

    def __init__(self, told: Callable[[ShardedParameter], None]) -> None:
        self.told = told
        fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param")
        with self._lock:
            self._all.append(self)
            if fsdp is not None and not self._put_back:
                for name in self._METHODS:
                    earlier = getattr(fsdp.FSDPParam, name)
                    self._put_back.append(functools.partial(setattr, fsdp.FSDPParam, name, earlier))
                    setattr(fsdp.FSDPParam, name, _telling(earlier, self._all))

    def remove(self) -> None:
        """Nothing is told any more. Idempotent."""
        with self._lock:
            if self in self._all:
                self._all.remove(self)
            while not self._all and self._put_back:
                self._put_back.pop()()


def _telling(method: Callable[..., Any], watches: Sequence[CutWatch]) -> Callable[..., Any]:
    @functools.wraps(method)
    def then_tell(fsdp_param: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(fsdp_param, *args, **kwargs)
        for watch in tuple(watches):
            watch.told(ShardedParameter(ShardedGroup("", None), fsdp_param))
        return result

    return then_tell


def has_groups_within(module: torch.nn.Module) -> bool:
    """Whether FSDP2 gathers parts of a module on their own while its forward runs."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind: Any = getattr(fsdp, "FSDPModule", None)
    return kind is not None and any(isinstance(child, kind) for child in module.modules() if child is not module)


def _groups_of(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """FSDP2's groups in ``module`` and below, each once, with the name of the first module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if not hasattr(fsdp, "FSDPModule"):
        return
    seen: set[int] = set()
    for name, child in module.named_modules():
        if isinstance(child, fsdp.FSDPModule):  # type: ignore[union-attr]
            state: Any = child._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            for group in [state._fsdp_param_group] if groups is None else groups:
                if group is not None and id(group) not in seen:
                    seen.add(id(group))
                    yield name, group
