"""How a saved tensor is named, described and rebuilt, without holding its memory.

Three small things, none of which moves a byte:

* :class:`StorageKey`: identity of the memory under a tensor, held weakly;
* :class:`TensorSpec`: how to rebuild one view over a storage;
* :class:`Region`: an address range, which is all that storage code gets to see.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, cast

import torch

__all__ = [
    "PLAIN_TYPES",
    "Piece",
    "Region",
    "StorageKey",
    "TensorSpec",
    "can_count_holders",
    "class_of",
    "give_gradient",
    "holders",
    "is_released",
    "place_of",
    "required_nbytes",
    "storage_of",
    "use_count",
]

PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
"""Tensors of these very types, not of subclasses, are nothing but a view of a storage."""

# A ctypes array would do the same, but makes a new class for each length, which only the garbage collector frees.
_view_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view_memory.restype = ctypes.py_object
_WRITABLE = 0x200
_ADDRESS_BITS = 64


class Region(NamedTuple):
    """``nbytes`` bytes of memory at ``address``. Whoever makes one keeps its memory alive while it is used."""

    address: int
    nbytes: int

    @classmethod
    def of(cls, storage: torch.UntypedStorage) -> Region:
        """The whole of a storage."""
        return cls(storage.data_ptr(), storage.nbytes())

    def view(self) -> memoryview:
        """The bytes themselves, writable. Valid while the memory is."""
        view: memoryview = _view_memory(self.address, self.nbytes, _WRITABLE)
        return view


class Piece(NamedTuple):
    """Some elements of a tensor's flat form; of a DTensor, of what this process has of it."""

    tensor: torch.Tensor
    start: int
    """First element."""
    stop: int
    """One after the last element."""


def class_of(tensor: torch.Tensor) -> type[torch.Tensor]:
    """Its class; of a weight that waits away from its device, the class that it has wherever it is used."""
    kind = type(tensor)
    return getattr(kind, "own_class_when_used", kind)


def give_gradient(tensor: torch.Tensor, gradient: torch.Tensor) -> None:
    """Set the gradient of a slice or a copy of a parameter: of another type where the parameter may have such a one."""
    if gradient.dtype != tensor.dtype:
        tensor.grad_dtype = gradient.dtype
    tensor.grad = gradient


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Its storage. A subclass of tensors is not asked, which might bring bytes there that nobody wants."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage()


def place_of(tensor: torch.Tensor) -> int:
    """Where the memory of its storage begins: an address; of a storage whose memory is gone for now (a weight that
    waits, or what FSDP2 has resharded) a number that is no address, and that no other storage has.
    """
    storage = storage_of(tensor)
    return storage.data_ptr() if storage.nbytes() else storage._cdata << _ADDRESS_BITS


class StorageKey:
    """Weak identity of a storage.

    An address or a ``StorageImpl`` pointer alone is no identity: both are recycled within one forward. While a
    ``StorageKey`` lives, its ``StorageImpl`` struct (not its memory) stays allocated, so that ``cdata`` cannot
    name another storage.

    Note [dying in C]: no Python code runs when one dies, because a ``KeyboardInterrupt`` that came in there would be
    lost. The weak reference of Python notes the death, and the next key gives back what the dead ones held.
    """

    __slots__ = ("__weakref__", "_weak", "cdata")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.cdata: int = storage._cdata
        self._weak = cast(int, storage._weak_ref())
        _pointers[weakref.ref(self, _dead.append)] = self._weak
        if _dead:
            _give_back()

    def alive(self) -> bool:
        """Whether anyone still holds the storage."""
        return not torch.UntypedStorage._expired(self._weak)

    def resolve(self) -> torch.UntypedStorage | None:
        """The storage itself if anyone still holds it. From then on the caller holds it too."""
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._weak)
        return storage


_pointers: dict[weakref.ref[StorageKey], int] = {}
_dead: deque[weakref.ref[StorageKey]] = deque()


def _give_back() -> None:
    while _dead:
        try:
            weak = _pointers.pop(_dead.popleft())
        except IndexError:  # another thread has taken the last one
            return
        torch.UntypedStorage._free_weak_ref(weak)  # type: ignore[no-untyped-call]


_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def can_count_holders() -> bool:
    """Whether this PyTorch tells who holds a storage; else :func:`is_released` is always False."""
    return _use_count is not None


def required_nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a storage must have, so that the tensor lies in it."""
    if tensor.numel() == 0:
        return 0
    last = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.size(), strict=True))
    return (int(tensor.storage_offset()) + last + 1) * tensor.element_size()


def is_released(key: StorageKey) -> bool:
    """Whether nobody but us holds the storage. The key's weak reference keeps its count readable after its death.

    Ours is one reference, however many of our objects share it; after the write it is none.
    """
    return _use_count is not None and _use_count(key.cdata) <= 1


def use_count(cdata: int) -> int:
    """References to the storage at this address, which must be one. Only where :func:`can_count_holders`."""
    return 0 if _use_count is None else _use_count(cdata)


def holders(storage: torch.UntypedStorage) -> int:
    """How many tensors hold the storage. Only where :func:`can_count_holders`.

    The given object is one reference more, however many objects of Python there are for the same storage.
    """
    return 0 if _use_count is None else use_count(storage._cdata) - 1


class TensorSpec(NamedTuple):
    """How to rebuild one view of a storage.

    Two views with equal shape and stride may differ in nothing but the offset (``qkv.chunk(3)``), so it belongs here.
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
        """The same view over another storage with the same bytes. Copies nothing."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        if self.is_conj:
            tensor = torch._conj(tensor)
        if self.is_neg:
            tensor = torch._neg_view(tensor)
        return tensor
