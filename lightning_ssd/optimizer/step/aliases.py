"""Find out whether the program holds a tensor of a state, a view of its memory, or the state's dictionary.

Only reference counts can tell. They are read between steps and at their start; no code runs when an object dies. The
count of an object without other holders is measured on samples, because it differs between versions of Python.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_ssd.common.dtensor import is_shard, local_of
from lightning_ssd.common.tensors import place_of

__all__ = [
    "SHARE_MEMORY",
    "Span",
    "are_apart",
    "are_own",
    "is_held",
    "spans_of",
    "tensors_in",
]

Span = tuple[int, int]
"""First address, and the address after the last one."""
SHARE_MEMORY = (
    "share memory with each other, with a parameter or with a gradient, which would not follow them to a drive and back"
)
"""Clause of errors about states for which :func:`are_own` is false."""
_MAX_DEPTH = 8


def _references(owner: Mapping[Any, Any], key: Any) -> int:
    return sys.getrefcount(owner[key])


def _storage_references(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the references of a tensor's storage: those of tensors, and those of its Python object."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


def _alone() -> tuple[int, tuple[int, int]]:
    owner = {"": torch.empty(1)}
    return _references(owner, ""), _storage_references(owner[""])


_ALONE, _ALONE_STORAGE = _alone()


def is_held(owner: Mapping[Any, Any], key: Any) -> bool:
    """Return whether the program, or any object but ``owner``, holds a value, or a view of a tensor's memory."""
    if _references(owner, key) > _ALONE:
        return True
    if not isinstance(owner[key], torch.Tensor):
        return False
    if local_of(owner[key]).layout != torch.strided:
        return True  # unknown: assume it
    counts = _storage_references(local_of(owner[key]))
    return counts[0] > _ALONE_STORAGE[0] or counts[1] > _ALONE_STORAGE[1]


def tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value: itself, or those in containers within containers.

    A tensor whose data are other tensors (a quantized one: its codes and scales) counts as a container of these.
    """
    if isinstance(value, torch.Tensor):
        is_container: bool = is_traceable_wrapper_subclass(value)
        if is_container and not is_shard(value) and depth < _MAX_DEPTH:
            for name in value.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
                yield from tensors_in(getattr(value, name), depth + 1)
        else:
            yield value
    elif depth < _MAX_DEPTH and isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth + 1)
    elif depth < _MAX_DEPTH and isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from tensors_in(item, depth + 1)


def spans_of(value: Any) -> list[Span]:
    """Return the memory of all tensors in a value; tensors without memory take none.

    A storage whose bytes are offloaded has no address. Its tensors get spans that no other storage has, which are as
    good for a comparison.
    """
    spans = []
    for tensor in tensors_in(value):
        local = local_of(tensor)
        if local.layout == torch.strided and local.numel() > 0 and local.device.type != "meta":
            try:
                first = place_of(local) + int(local.storage_offset()) * local.element_size()
            except RuntimeError:  # a subclass that keeps its data elsewhere
                continue
            last = sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
            spans.append((first, first + (last + 1) * local.element_size()))
    return spans


def are_apart(owners: Sequence[Sequence[Span]]) -> bool:
    """Return whether no two owners share memory. Overlaps within one owner do not count."""
    marked = sorted((first, end, owner) for owner, spans in enumerate(owners) for first, end in spans)
    reach: list[Span] = []  # the two last ends so far, of two different owners, with these
    for first, end, owner in marked:
        if any(other != owner and first < other_end for other_end, other in reach):
            return False
        ends = {other: other_end for other_end, other in reach}
        ends[owner] = max(end, ends.get(owner, 0))
        reach = sorted(((e, o) for o, e in ends.items()), reverse=True)[:2]
    return True


def are_own(states: Iterable[Any], parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether no two tensors of the states share memory, and none does with a parameter or a gradient."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return are_apart([spans_of(list(parameters)), spans_of(gradients), *map(spans_of, tensors_in(list(states)))])
