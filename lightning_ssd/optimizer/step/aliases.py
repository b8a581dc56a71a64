"""Whether somebody else holds a tensor, a view of its memory, or the dictionary that it is in.

Only reference counts can tell, and they are asked at moments that we choose: nothing of ours runs when something dies.
What is alone is measured on objects that nobody else holds, since the counts differ between versions of Python.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_ssd.common.accelerators import accelerator_of
from lightning_ssd.common.dtensor import is_shard, local_of
from lightning_ssd.common.tensors import place_of, storage_of

__all__ = [
    "Onlookers",
    "Span",
    "are_apart",
    "have_elements_in_common",
    "is_held",
    "is_referred_to",
    "num_looking",
    "spans_of",
    "tensors_in",
]

Span = tuple[int, int]
"""First address, and the first one behind."""
_MAX_DEPTH = 8
_NUM_LOOKS = 100
_BETWEEN_LOOKS_S = 0.001
"""A worker lets go of memory soon after a move; nothing tells when."""


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


def is_held(owner: Mapping[Any, Any], key: Any, looking: Mapping[int, int] | None = None) -> bool:
    """Whether anybody but ``owner`` holds the value, or (of a tensor) looks at its memory.

    Args:
        owner: has the value.
        key: of it.
        looking: of storages that several tensors are known to be in, how many (:func:`num_looking`).
    """
    if is_referred_to(owner, key):
        return True
    if not isinstance(owner[key], torch.Tensor):
        return False
    if local_of(owner[key]).layout != torch.strided:
        return True  # cannot be told
    local = local_of(owner[key])
    counts = _storage_references(local)
    num = 1 if looking is None else looking.get(local.untyped_storage()._cdata, 1)
    return counts[0] > _ALONE_STORAGE[0] + num - 1 or counts[1] > _ALONE_STORAGE[1]


def _storage_in(tensor: torch.Tensor) -> int | None:
    """Which storage a tensor is in, if that can be told."""
    try:
        return storage_of(tensor)._cdata if tensor.layout == torch.strided else None
    except (RuntimeError, NotImplementedError):  # a subclass without one
        return None


def num_looking(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """By storage, how many of the tensors are in it, where these are several and have no memory in common."""
    found: dict[int, dict[int, torch.Tensor]] = {}
    for tensor in tensors:
        local = local_of(tensor)
        if (cdata := _storage_in(local)) is not None:
            found.setdefault(cdata, {})[id(local)] = local
    several = {cdata: list(mine.values()) for cdata, mine in found.items() if len(mine) > 1}
    return {cdata: len(mine) for cdata, mine in several.items() if are_apart(list(map(spans_of, mine)))}


class Onlookers:
    """Tells whether somebody has come to look at a piece of memory while an optimizer was called.

    Args:
        storage: the memory, with nobody else's tensors in it yet.
        known: the tensors in it, in whatever containers.
    """

    def __init__(self, storage: torch.UntypedStorage, known: Any) -> None:
        self._storage = storage
        # A worker may not have let go of what it has brought up.
        self._may_be_moving = self._num_others(known) > 0
        self._num_references = self._references()

    def _references(self) -> int:
        return sys.getrefcount(self._storage)

    def _num_others(self, known: Any) -> int:
        cdata = self._storage._cdata
        mine = {id(local) for local in map(local_of, tensors_in(known)) if _storage_in(local) == cdata}
        return torch._C._storage_Use_Count(cdata) - _ALONE_STORAGE[0] + 1 - len(mine)

    def have_come(self, known: Any) -> bool:
        """Whether there are others now.

        Args:
            known: the tensors that are ours, in whatever containers.
        """
        if self._may_be_moving and self._num_others(known) > 0:
            self._wait_for_moves(known)
        return self._num_others(known) > 0 or self._references() > self._num_references

    def _wait_for_moves(self, known: Any) -> None:
        accelerator = accelerator_of(self._storage.device)
        if accelerator is not None:
            accelerator.synchronize()  # its stream waits for what is brought up
        for _ in range(_NUM_LOOKS):
            if self._num_others(known) <= 0:
                return
            time.sleep(_BETWEEN_LOOKS_S)


def tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value: itself, or those in containers within containers.

    A tensor that others are the data of (a quantized one: its codes and scales) is a container of these.
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
    tensors = list(tensors_in(tensors))
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
