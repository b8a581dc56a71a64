"""Read and build DTensors, and find the shards of FSDP2 and the parameters that it has gathered from them.

Note: FSDP2's unsharded parameters
    ``fully_shard`` keeps one ``FSDPParam`` per parameter. Its ``all_gather_outputs`` are made by the first all-gather
    and stay the same tensors from then on: resharding resizes their storages to nothing, the next all-gather resizes
    them back and writes into them. The parameter that a module's forward sees (``_unsharded_param``) is a view of them,
    and so is what autograd saves of it. With all-gather extensions (float8, say) it is made of
    ``_unsharded_inner_tensors``, which are resized in the same way. Holding such a tensor holds no memory. Code that
    takes its storage for an activation's would read memory that FSDP2 has freed.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from lightning_ssd.common.tensors import place_of

__all__ = [
    "CutWatch",
    "ShardedParameter",
    "address_of",
    "as_piece",
    "even_numel",
    "has_groups_within",
    "has_shape",
    "is_alone",
    "is_shard",
    "local_of",
    "sharded_of",
    "spec_of",
    "wrap",
]


def _module() -> Any:
    """Return PyTorch's DTensor module; ``None`` until the program has imported it, since no DTensor exists before."""
    return sys.modules.get("torch.distributed.tensor")


def is_shard(value: object) -> bool:
    """Return whether ``value`` is a DTensor."""
    module = _module()
    return module is not None and isinstance(value, module.DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process' part of a tensor: the local part of a DTensor, else the tensor itself. Copies nothing."""
    if not is_shard(tensor):
        return tensor
    local: Any = tensor._local_tensor  # type: ignore[attr-defined]
    # The result of a collective may still be under way.
    part: torch.Tensor = local.wait() if hasattr(local, "wait") else local
    return part


def has_shape(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` has a shape; an uninitialized parameter or buffer of a lazy module has none."""
    return not isinstance(tensor, UninitializedParameter | UninitializedBuffer)


def address_of(tensor: torch.Tensor) -> int:
    """Return :func:`place_of` for this process' part of a tensor; 0 if that has no strided memory."""
    if not has_shape(tensor):
        return 0
    local = local_of(tensor)
    try:
        return place_of(local) if local.layout == torch.strided and local.numel() > 0 else 0
    except (RuntimeError, NotImplementedError):
        return 0  # a subclass without a storage


def spec_of(tensor: torch.Tensor) -> Any:
    """Return the spec (mesh and placements) of a DTensor; ``None`` for any other tensor."""
    return tensor._spec if is_shard(tensor) else None  # type: ignore[attr-defined]


def wrap(local: torch.Tensor, spec: Any) -> torch.Tensor:
    """Return the DTensor of which ``local`` is this process' part; ``local`` itself if ``spec`` is ``None``.

    ``DTensor.from_local`` would copy memory that is mapped from a file to the mesh's device.
    """
    if spec is None:
        return local
    if spec.tensor_meta.dtype != local.dtype:
        spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
    if local.storage_offset() == 0:
        tensor: torch.Tensor = _module().DTensor(local, spec, requires_grad=False)
        return tensor
    # The constructor would take over the offset, and deepcopy would then copy it as a tensor with its own storage.
    tensor = _module().DTensor(local.new_empty(0), spec, requires_grad=False)
    tensor._local_tensor = local  # type: ignore[attr-defined]
    return tensor


def as_piece(flat: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return ``flat``, a contiguous slice of this process' part of ``whole``, as a DTensor if ``whole`` is one.

    Optimizers choose their implementation by the type of their parameters, so that slices of a DTensor have to be
    DTensors. Each process has other slices. They are marked as replicated, because elementwise operations on replicated
    DTensors do not communicate.
    """
    if not is_shard(whole):
        return flat
    spec = spec_of(whole)
    meta = spec.tensor_meta._replace(shape=flat.shape, stride=flat.stride(), dtype=flat.dtype)
    replicated = (_module().Replicate(),) * spec.mesh.ndim
    return wrap(flat, type(spec)(spec.mesh, replicated, tensor_meta=meta))


def even_numel(tensor: torch.Tensor) -> int:
    """Return the elements of the largest part that any process has of ``tensor``. All processes get the same number."""
    spec = spec_of(tensor)
    if spec is None:
        return tensor.numel()
    num_parts = 1
    for number, placement in enumerate(spec.placements):
        # Not only `Shard`: a placement that shards over two dimensions of a mesh has a class of its own.
        if hasattr(placement, "dim"):
            num_parts *= spec.mesh.size(number)
    return -(-tensor.numel() // num_parts)


def is_alone(group: Any) -> bool:
    """Return whether no other process has shards of a group of FSDP2's, which then copies them instead of gathering."""
    return getattr(group.mesh_info, "shard_mesh_size", 1) == 1


class ShardedParameter:
    """A parameter of which FSDP2 has cut a shard for each process.

    Args:
        fsdp_param: FSDP2's ``FSDPParam``.
        group: FSDP2's ``FSDPParamGroup`` that it is gathered with; ``None``: it is not made yet.
        group_name: name of the first module of the group.
    """

    def __init__(self, fsdp_param: Any, group: Any = None, group_name: str = "") -> None:
        self.group, self.group_name = group, group_name
        self.fsdp_param = fsdp_param

    @property
    def parameter(self) -> torch.Tensor:
        """The DTensor that the optimizer has, also while the module shows the gathered parameter."""
        parameter: torch.Tensor = self.fsdp_param.sharded_param
        return parameter

    @property
    def names(self) -> list[tuple[torch.nn.Module, str]]:
        """Each module that has the parameter, with the parameter's name in it."""
        info = self.fsdp_param._module_info
        return [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]

    def gathered(self) -> list[torch.Tensor]:
        """Return the tensors that hold it while it is gathered (see the note above); empty before the first time."""
        # No getattr() with a default: should a PyTorch rename them, an error is better than wrong bytes.
        return [*self.fsdp_param.all_gather_outputs, *self.fsdp_param._unsharded_inner_tensors]

    def holders(self) -> list[torch.Tensor]:
        """Return the local tensor of the DTensor, and all other tensors of FSDP2 over the same memory.

        FSDP2 gathers ``_sharded_param_data``: the shard, padded with zeros where parts are uneven.
        """
        local = local_of(self.parameter)
        if local.is_meta:
            return [local]
        if self.fsdp_param._sharded_param_data.is_meta:
            # The parameters were made on the meta device, and their modules have got memory since. FSDP2 itself would
            # take that memory over in the first forward.
            self.fsdp_param.reset_sharded_param()
            local = local_of(self.parameter)
        flat = self.fsdp_param._sharded_param_data
        found = {id(t): t for tensor in (local, flat) for t in (tensor, tensor._base) if t is not None}
        return [
            tensor for tensor in found.values() if tensor.untyped_storage()._cdata == local.untyped_storage()._cdata
        ]


def sharded_of(module: torch.nn.Module) -> Iterator[ShardedParameter]:
    """Yield all parameters that FSDP2 manages in ``module`` and its submodules."""
    for name, group in _groups_of(module):
        for fsdp_param in group.fsdp_params:
            yield ShardedParameter(fsdp_param, group, name)


class CutWatch:
    """Calls ``told`` with each shard as soon as FSDP2 has cut it, or has given it other memory, until it is removed.

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
        """Stop the calls. Idempotent."""
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
            watch.told(ShardedParameter(fsdp_param))
        return result

    return then_tell


def has_groups_within(module: torch.nn.Module) -> bool:
    """Return whether FSDP2 gathers submodules of ``module`` one by one while its forward runs."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind: Any = getattr(fsdp, "FSDPModule", None)
    return kind is not None and any(isinstance(child, kind) for child in module.modules() if child is not module)


def _groups_of(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield each group of FSDP2 in ``module`` and its submodules once, after the name of the group's first module."""
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
