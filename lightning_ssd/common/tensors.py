"""Name, describe and rebuild a saved tensor, without holding its memory.

Three small classes, none of which moves a byte:

* :class:`StorageKey`: identity of the memory under a tensor, held weakly;
* :class:`TensorSpec`: how to rebuild one view over a storage;
* :class:`Region`: an address range, which is all that storage code gets.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

__all__ = [
    "PLAIN_TYPES",
    "Piece",
    "Region",
    "StorageKey",
    "TensorSpec",
    "class_of",
    "give_gradient",
    "holders",
    "is_released",
    "new_tuple",
    "place_of",
    "required_nbytes",
    "storage_of",
    "use_count",
]

new_tuple: Callable[..., Any] = tuple.__new__
"""Makes a named tuple in C: its own constructor is Python."""

PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
"""Tensors of exactly these types, not of subclasses, are plain views of a storage."""

# A ctypes array would do the same, but makes a new class for each length, which only the garbage collector frees.
_view_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view_memory.restype = ctypes.py_object
_WRITABLE = 0x200
_ADDRESS_BITS = 64


class Region(NamedTuple):
    """``nbytes`` bytes of memory at ``address``. Its maker keeps the memory alive while the region is used."""

    address: int
    nbytes: int

    @classmethod
    def of(cls, storage: torch.UntypedStorage) -> Region:
        """Return the region of a whole storage."""
        return cls(storage.data_ptr(), storage.nbytes())

    def view(self) -> memoryview:
        """Return a writable view of the bytes. It is valid as long as the memory."""
        view: memoryview = _view_memory(self.address, self.nbytes, _WRITABLE)
        return view


class Piece(NamedTuple):
    """A range of elements of a tensor's flat form; for a DTensor, of this process' part."""

    tensor: torch.Tensor
    start: int
    """First element."""
    stop: int
    """One after the last element."""


def class_of(tensor: torch.Tensor) -> type[torch.Tensor]:
    """Return the class of ``tensor``; for a weight that is offloaded from its device, the class that it has in use."""
    kind = type(tensor)
    return getattr(kind, "own_class_when_used", kind)


def give_gradient(tensor: torch.Tensor, gradient: torch.Tensor) -> None:
    """Set the gradient of a slice or a copy of a parameter, also one of another dtype than the parameter's."""
    if gradient.dtype != tensor.dtype:
        tensor.grad_dtype = gradient.dtype
    tensor.grad = gradient


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return the storage of ``tensor``. Bypasses ``__torch_function__``, by which a subclass might load its bytes."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage()


def place_of(tensor: torch.Tensor) -> int:
    """Return a number that identifies the memory of a tensor's storage: its address.

    A storage may have no memory for now (an offloaded weight, or a parameter that FSDP2 has resharded). Its number is
    no address, and no other storage has it.
    """
    storage = storage_of(tensor)
    return storage.data_ptr() if storage.nbytes() else storage._cdata << _ADDRESS_BITS


class StorageKey:
    """Weak identity of a storage.

    An address or a ``StorageImpl`` pointer alone is no identity: both are recycled within one forward. While a
    ``StorageKey`` lives, its ``StorageImpl`` struct (not its memory) stays allocated, so that ``cdata`` cannot
    name another storage.

    Note [dying in C]: no Python code runs when a key dies, because a ``KeyboardInterrupt`` in a finalizer would be
    lost. The key's weak reference appends itself to a queue, in C. The next key releases what the dead ones held.
    """

    __slots__ = ("__weakref__", "cdata", "weak")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.cdata: int = storage._cdata
        self.weak: int = storage._weak_ref()  # type: ignore[assignment]  # which its annotation denies
        _pointers[weakref.ref(self, _note_dead)] = self.weak
        if _dead:
            _give_back()

    def alive(self) -> bool:
        """Return whether the storage is still alive."""
        return not torch.UntypedStorage._expired(self.weak)

    def resolve(self) -> torch.UntypedStorage | None:
        """Return the storage itself, which the caller then holds, too; ``None`` if it is dead."""
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.weak)
        return storage


_pointers: dict[weakref.ref[StorageKey], int] = {}
_dead: deque[weakref.ref[StorageKey]] = deque()
_note_dead = _dead.append


def _give_back() -> None:
    while _dead:
        try:
            weak = _pointers.pop(_dead.popleft())
        except IndexError:  # another thread has taken the last one
            return
        torch.UntypedStorage._free_weak_ref(weak)  # type: ignore[no-untyped-call]


use_count: Callable[[int], int] = torch._C._storage_Use_Count
"""Returns the references to the storage whose struct is at an address."""


def required_nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a storage needs to contain ``tensor``."""
    if tensor.numel() == 0:
        return 0
    last = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.size(), strict=True))
    return (int(tensor.storage_offset()) + last + 1) * tensor.element_size()


def is_released(key: StorageKey) -> bool:
    """Return whether the program holds the storage no more. The key keeps the count readable after the storage's death.

    This package holds one reference, which all its objects share; after the write it holds none.
    """
    return use_count(key.cdata) <= 1


def holders(storage: torch.UntypedStorage) -> int:
    """Return how many tensors hold ``storage``: all Python objects for it hold one reference more."""
    return use_count(storage._cdata) - 1


class TensorSpec(NamedTuple):
    """The description from which one view of a storage is rebuilt.

    Two views with equal shape and stride may differ in the offset alone (``qkv.chunk(3)``), so that it belongs here.
    """

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """Describe ``tensor`` as a view of its storage; the offset counts elements."""
        return cls(
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def view(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return this view over another storage with the same bytes. Copies nothing."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        if self.is_conj:
            tensor = torch._conj(tensor)
        if self.is_neg:
            tensor = torch._neg_view(tensor)
        return tensor
