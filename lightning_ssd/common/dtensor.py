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

import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from lightning_ssd.common.tensors import place_of

__all__ = [
    "Gathered",
    "address_of",
    "as_piece",
    "even_numel",
    "gathered_of",
    "has_shape",
    "is_shard",
    "local_of",
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
    tensor: torch.Tensor = _module().DTensor(local, spec, requires_grad=False)
    return tensor


def as_piece(flat: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """One-dimensional ``flat``, a slice of this process' part of ``whole``, as a tensor of the same kind.

    Optimizers choose their implementation by the type of their parameters, so that slices of a DTensor have to be
    DTensors. Each process has its own; as "replicated" ones no elementwise operation talks to the others.
    """
    if not is_shard(whole):
        return flat
    spec = spec_of(whole)
    meta = spec.tensor_meta._replace(shape=flat.shape, stride=(1,), dtype=flat.dtype)
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
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if not hasattr(fsdp, "FSDPModule"):
        return
    for child in module.modules():
        if isinstance(child, fsdp.FSDPModule):  # type: ignore[union-attr]
            state: Any = child._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            for group in [state._fsdp_param_group] if groups is None else groups:
                yield from map(Gathered, () if group is None else group.fsdp_params)
