"""Anonymous host memory in huge pages, straight from the system, and locking it for CUDA."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
from contextlib import AbstractContextManager
from typing import Any

import torch

__all__ = [
    "HUGE_PAGE_BYTES",
    "MAP_FAILED",
    "PAGE_BYTES",
    "READ_WRITE",
    "MappedBlock",
    "array_type",
    "libc",
    "lock_memory",
    "unlock_memory",
]

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20

_NO_ACCESS = 0  # PROT_NONE, which Python does not name
READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_PRIVATE_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_DONTFORK: int = getattr(mmap, "MADV_DONTFORK", 10)
_HUGEPAGE: int = getattr(mmap, "MADV_HUGEPAGE", 14)
_PORTABLE = 1  # cudaHostRegisterPortable: locked for every device of the process
MAP_FAILED = ctypes.c_void_p(-1).value

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@functools.lru_cache(maxsize=256)
def array_type(nbytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    """Kept, because each is a class that only the garbage collector could free, and the same lengths come again."""
    return ctypes.c_char * nbytes


class MappedBlock:
    """Anonymous memory, freed with its last reference. Only bytes that are touched cost memory.

    Note [fork]: before Linux 6.3 a direct read into private memory may be lost when another thread forks meanwhile
    and two requests share a page (chunks of a tensor do). So children do not inherit the memory; and since something
    else may lie at its address there, only the process that mapped it unmaps it, which ``mmap.mmap`` cannot promise.

    Args:
        nbytes: how much.
        alignment: of the address; at least a page.
        usable: ``False`` takes addresses only, of which the system counts nothing; :meth:`make_usable` takes the
            memory, part by part.

    Raises:
        MemoryError: the system has no such memory (or addresses) left.
    """

    __slots__ = ("_length", "_mapped", "_pid", "address", "locked", "nbytes")

    def __init__(self, nbytes: int, alignment: int = PAGE_BYTES, *, usable: bool = True) -> None:
        huge = nbytes >= HUGE_PAGE_BYTES
        alignment = max(alignment, HUGE_PAGE_BYTES if huge else PAGE_BYTES)
        self._pid = os.getpid()
        self._length = nbytes + alignment - PAGE_BYTES
        self._mapped = 0
        mapped = libc.mmap(None, self._length, READ_WRITE if usable else _NO_ACCESS, _PRIVATE_ANONYMOUS, -1, 0)
        if mapped == MAP_FAILED:
            raise MemoryError(
                f"the system has no {self._length:,} bytes for a transfer buffer; free host memory, raise its limit "
                "(ulimit -v, control group), or lower HardwareProfile.host_memory"
            )
        self._mapped = mapped
        self.address = mapped + -mapped % alignment
        self.nbytes = nbytes
        self.locked = False
        # Advice: kernels without the feature refuse it, and everything still works.
        libc.madvise(mapped, self._length, _DONTFORK)
        if huge:
            # Whole huge pages only: the tail must not cost up to 2 MiB more than was asked for.
            libc.madvise(self.address, nbytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES, _HUGEPAGE)

    def __del__(self, _unmap: Any = libc.munmap, _getpid: Any = os.getpid) -> None:
        # Both are bound early: at interpreter exit the modules may be gone before us.
        if self._mapped and _getpid() == self._pid:
            _unmap(self._mapped, self._length)

    def make_usable(self, start: int, nbytes: int) -> bool:
        """Take memory for a part (whole pages); ``False`` where the system refuses it."""
        refused: int = libc.mprotect(self.address + start, nbytes, READ_WRITE)
        return not refused

    def export(self) -> ctypes.Array[ctypes.c_char]:
        """The memory as an object that keeps it mapped and can be watched by a weak reference."""
        array = array_type(self.nbytes).from_address(self.address)
        array.block = self  # type: ignore[attr-defined]
        return array


def lock_memory(address: int, nbytes: int, device: torch.device | None = None) -> int:
    """Lock (pin) memory for CUDA, which takes longer than one copy through it; return CUDA's code, 0 for success.

    Args:
        address: where; a page.
        nbytes: whole pages.
        device: whose context does it. ``None``: the calling thread's, which in a fresh thread is that of device 0.
    """
    with _on(device):
        return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))  # type: ignore[no-untyped-call]


def unlock_memory(address: int, device: torch.device | None = None) -> None:
    """Undo :func:`lock_memory`, with the same address and device."""
    with _on(device):
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def _on(device: torch.device | None) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device is not None and device.type == "cuda" else contextlib.nullcontext()
