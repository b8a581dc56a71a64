"""Lay out the states of one subgroup in one block of memory, which is moved as a whole."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_ssd.common.dtensor import local_of, spec_of, wrap
from lightning_ssd.common.rounding import round_up
from lightning_ssd.memory.mmap import PAGE_BYTES
from lightning_ssd.optimizer.step.aliases import spans_of, tensors_in
from lightning_ssd.optimizer.step.copies import copied
from lightning_ssd.optimizer.step.types import State
from lightning_ssd.tiers.copy_paths import storage_bytes

__all__ = [
    "MIN_NBYTES",
    "MOVED",
    "Field",
    "Layout",
    "is_bare",
    "moved_out",
    "moves",
    "owned",
]

MIN_NBYTES = 4096
"""Bytes below which a state (a step count, a bias) stays in memory."""
_LINE_NBYTES = 64


class _Moved:
    """Marks a tensor that is not in the template, but in a subgroup's memory or on a drive."""

    def __repr__(self) -> str:
        return "<moved>"


MOVED = _Moved()


@dataclass(frozen=True, slots=True)
class Field:
    """The place of one state tensor."""

    part: int
    key: Hashable
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Bytes from the start of the memory."""
    nbytes: int
    spec: Any = None
    """Spec of the DTensor whose local part lies here; ``None``: it is a plain tensor."""

    def view(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor over its place in ``storage``; for a DTensor its local part."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset // self.dtype.itemsize, self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of all moved tensors of a subgroup, and the bytes of their memory (a multiple of ``block_bytes``)."""

    fields: tuple[Field, ...]
    nbytes: int

    @classmethod
    def of(cls, states: Sequence[State], device: torch.device, block_bytes: int, paged: Sequence[bool]) -> Layout:
        """Lay out the tensors of the parts' states that can be moved.

        Args:
            states: the state of each part.
            device: device of the tensors to move; others stay in memory.
            block_bytes: unit that the total is rounded up to.
            paged: whether the tensors of each part begin at a page, so that slices of one tensor can be mapped side by
                side.
        """
        fields, end = [], 0
        for part, state in enumerate(states):
            unit = PAGE_BYTES if paged[part] else _LINE_NBYTES
            for key, value in state.items():
                if moves(value, device):
                    start = round_up(end, unit)
                    local, spec = local_of(value), spec_of(value)
                    nbytes = local.numel() * local.dtype.itemsize
                    shape = tuple(local.shape)
                    fields.append(Field(part, key, local.dtype, shape, local.stride(), start, nbytes, spec))
                    end = start + nbytes
        return cls(tuple(fields), round_up(end, block_bytes))

    def fill(self, templates: Sequence[State], storage: torch.UntypedStorage) -> list[State]:
        """Return the parts' states with their tensors over ``storage``, in the places of :data:`MOVED` in templates."""
        states = [dict(template) for template in templates]
        for field in self.fields:
            states[field.part][field.key] = wrap(field.view(storage), field.spec)
        return states

    def templates(self, states: Sequence[State]) -> list[State]:
        """Return the parts' states with :data:`MOVED` in the place of each tensor of the layout."""
        result = [dict(state) for state in states]
        for field in self.fields:
            result[field.part][field.key] = MOVED
        return result

    def collect(self, states: Sequence[State], storage: torch.UntypedStorage) -> None:
        """Copy tensors that an optimizer has replaced to their places in ``storage``."""
        moved: list[tuple[Field, torch.Tensor]] = []
        for field in self.fields:
            value = local_of(states[field.part][field.key])
            if value.data_ptr() != storage.data_ptr() + field.offset:
                # Two tensors that have swapped places (or one that is a view of another) would overwrite each other.
                is_inside = value.untyped_storage().data_ptr() == storage.data_ptr()
                moved.append((field, value.clone() if is_inside else value))
        for field, value in moved:
            field.view(storage).copy_(value)


def moved_out(state: State, storage: torch.UntypedStorage | None, *, except_for: Collection[int] = ()) -> State:
    """Give the state's tensors in ``storage``, which do not overlap, their own memory. They stay the same objects."""
    if storage is None:
        return state
    for tensor in tensors_in(state):
        for first, end in () if id(tensor) in except_for else spans_of(tensor):
            if not storage.data_ptr() <= first < storage.data_ptr() + storage.nbytes():
                continue
            local = local_of(tensor)
            begin = first - (first - storage.data_ptr()) % _LINE_NBYTES
            own = storage_bytes(storage, begin - storage.data_ptr(), end - begin).clone().untyped_storage()
            with torch.no_grad():
                local.set_(own, (first - begin) // local.element_size(), local.shape, local.stride())
    return state


def owned(states: Sequence[State], device: torch.device) -> list[State]:
    """Copy the values that stay in memory, so that edits by another holder have no effect. A move copies the others."""
    # A clone of a view has the bytes of the view; a deepcopy has those of the whole storage.
    return [
        {
            key: value if moves(value, device) else value.detach().clone() if is_bare(value) else copied(value, {})
            for key, value in state.items()
        }
        for state in states
    ]


def moves(value: Any, device: torch.device) -> bool:
    """Return whether a value is moved: a plain dense tensor of :data:`MIN_NBYTES` or more on ``device``.

    For a DTensor, its local part has to be one.
    """
    if not is_bare(value):
        return False
    value = local_of(value)
    return (
        value.layout == torch.strided
        and value.device == device
        and value.numel() * value.dtype.itemsize >= MIN_NBYTES
        and not (value.is_conj() or value.is_neg())
        and bool(torch.ops.aten.is_non_overlapping_and_dense(value))
    )


def is_bare(value: Any) -> bool:
    """Return whether a value is a tensor of PyTorch's own class, without attributes and ``requires_grad``.

    Its bytes then say all about it.
    """
    if not isinstance(value, torch.Tensor) or value.requires_grad or vars(value):
        return False
    return type(local_of(value)) is torch.Tensor
