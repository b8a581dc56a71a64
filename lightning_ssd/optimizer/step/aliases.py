"""Whether somebody else holds a tensor, a view of its memory, or the dictionary that it is in.

Only reference counts can tell, and they are asked at moments that we choose: nothing of ours runs when something dies.
What is alone is measured on objects that nobody else holds, since the counts differ between versions of Python.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from lightning_ssd.common.dtensor import local_of
from lightning_ssd.common.tensors import place_of

__all__ = ["Span", "are_apart", "have_elements_in_common", "is_held", "is_referred_to", "spans_of", "tensors_in"]

Span = tuple[int, int]
"""First address, and the first one behind."""
_MAX_DEPTH = 8


def _references(owner: Mapping[Any, Any], key: Any) -> int:
    return sys.getrefcount(owner[key])


def _storage_references(tensor: torch.Tensor) -> tuple[int, int]:
    """By tensors and by Python."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


def _alone() -> tuple[int, tuple[int, int]]:
    owner = {"": torch.empty(1)}
    return _references(owner, ""), _storage_references(owner[""])


_ALONE, _ALONE_STORAGE = _alone()


def is_referred_to(owner: Mapping[Any, Any], key: Any) -> bool:
    """Whether anybody but ``owner`` holds the value."""
    return _references(owner, key) > _ALONE


def is_held(owner: Mapping[Any, Any], key: Any) -> bool:
    """Whether anybody but ``owner`` holds the value, or (of a tensor) looks at its memory."""
    if is_referred_to(owner, key):
        return True
    if not isinstance(owner[key], torch.Tensor):
        return False
    if local_of(owner[key]).layout != torch.strided:
        return True  # cannot be told
    counts = _storage_references(local_of(owner[key]))
    return counts[0] > _ALONE_STORAGE[0] or counts[1] > _ALONE_STORAGE[1]


def tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """The tensors in a value: itself, or those in containers within containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < _MAX_DEPTH and isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth + 1)
    elif depth < _MAX_DEPTH and isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from tensors_in(item, depth + 1)


def spans_of(value: Any) -> list[Span]:
    """Which memory the tensors in a value take; those without memory of their own take none.

    Tensors over a storage whose bytes wait elsewhere are told apart, and together, by the storage: they stay there.
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
    """Whether no two owners share memory. What one owner has twice is its own affair."""
    marked = sorted((first, end, owner) for owner, spans in enumerate(owners) for first, end in spans)
    reach: list[Span] = []  # of the owner whose memory ends last, and of the one of all others that does
    for first, end, owner in marked:
        if any(other != owner and first < other_end for other_end, other in reach):
            return False
        ends = {other: other_end for other_end, other in reach}
        ends[owner] = max(end, ends.get(owner, 0))
        reach = sorted(((e, o) for o, e in ends.items()), reverse=True)[:2]
    return True


def have_elements_in_common(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether two of the tensors share memory. Columns of one matrix do not, though they lie within each other."""
    spans = [spans_of(tensor) for tensor in tensors]
    if are_apart(spans):
        return False
    # Mark the bytes that each one takes, over each stretch of memory that several lie in.
    inside = sorted((*span, number) for number, mine in enumerate(spans) for span in mine)
    stretch: list[tuple[int, int, int]] = []
    reach = 0
    for first, end, number in [*inside, (sys.maxsize, sys.maxsize, 0)]:
        if first >= reach:
            if len(stretch) > 1 and _meet([(at, local_of(tensors[n])) for at, _, n in stretch], stretch[0][0], reach):
                return True
            stretch = []
        stretch.append((first, end, number))
        reach = max(reach, end)
    return False


def _meet(tensors: Sequence[tuple[int, torch.Tensor]], begin: int, end: int) -> bool:
    taken = torch.zeros(end - begin, dtype=torch.bool, device="cpu")
    for first, tensor in tensors:
        nbytes = tensor.element_size()
        shape = [size if stride else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        strides = [stride * nbytes for stride in tensor.stride()]
        mine = taken.as_strided([*shape, nbytes], [*strides, 1], first - begin)
        if bool(mine.any()):
            return True
        mine.fill_(True)
    return False
