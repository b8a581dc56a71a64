"""Anonymous host memory in huge pages, straight from the system, and locking it for CUDA."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
from contextlib import AbstractContextManager
from typing import Any

import torch

__all__ = [
    "ADVISE_HUGE",
    "HUGE_PAGE_BYTES",
    "MAP_FAILED",
    "NO_ACCESS",
    "PAGE_BYTES",
    "POPULATE_WRITE",
    "READ_WRITE",
    "VECTOR_BYTES",
    "MappedBlock",
    "address_of",
    "array_type",
    "libc",
    "lock_memory",
    "map_anonymous",
    "on_device",
    "touch",
    "unlock_memory",
]

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
VECTOR_BYTES = 64
"""Memory that comes back, or takes the place of other, has an address that is the same modulo this: what a kernel
computes with vector instructions may depend on it in its last bits, such as MKL's products of a matrix and a vector."""

NO_ACCESS = 0  # PROT_NONE, which Python does not name everywhere
READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_PRIVATE_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_WIPEONFORK = 18  # MADV_WIPEONFORK, likewise
ADVISE_HUGE: int = getattr(mmap, "MADV_HUGEPAGE", 14)
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE (Linux 5.14), likewise
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
libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_read_buffer = ctypes.pythonapi.PyObject_AsReadBuffer
_read_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_ssize_t))


@functools.lru_cache(maxsize=256)
def array_type(nbytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    """Kept, because each is a class that only the garbage collector could free, and the same lengths come again."""
    return ctypes.c_char * nbytes


class MappedBlock:
    """Anonymous memory, freed with its last reference. Only bytes that are touched cost memory.

    Note [fork]: before Linux 6.3 a direct read into private memory may be lost when another thread forks meanwhile
    and two requests share a page (chunks of a tensor do). So children do not inherit what is in it. They do inherit the
    addresses, so that nothing else lies there when theirs are unmapped.

    Note [dying in C]: ``mmap.mmap`` unmaps it, since a ``KeyboardInterrupt`` in Python code that runs when something
    dies would be lost.

    Args:
        nbytes: how much.
        alignment: of the address; at least a page.
        usable: ``False`` takes addresses only, of which the system counts nothing; :meth:`make_usable` takes the
            memory, part by part.

    Raises:
        MemoryError: the system has no such memory (or addresses) left.
    """

    __slots__ = ("_map", "address", "nbytes")

    def __init__(self, nbytes: int, alignment: int = PAGE_BYTES, *, usable: bool = True) -> None:
        huge = nbytes >= HUGE_PAGE_BYTES
        alignment = max(alignment, HUGE_PAGE_BYTES if huge else PAGE_BYTES)
        length = nbytes + alignment - PAGE_BYTES
        self._map = map_anonymous(length, READ_WRITE if usable else NO_ACCESS)
        mapped = address_of(self._map)
        self.address = mapped + -mapped % alignment
        self.nbytes = nbytes
        # Advice: kernels without the feature refuse it, and everything still works.
        libc.madvise(mapped, length, _WIPEONFORK)
        if huge:
            # Whole huge pages only: the tail must not cost up to 2 MiB more than was asked for.
            libc.madvise(self.address, nbytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES, ADVISE_HUGE)

    def make_usable(self, start: int, nbytes: int) -> bool:
        """Take memory for a part (whole pages); ``False`` where the system refuses it."""
        refused: int = libc.mprotect(self.address + start, nbytes, READ_WRITE)
        return not refused

    def export(self) -> ctypes.Array[ctypes.c_char]:
        """The memory as an object that keeps it mapped and can be watched by a weak reference."""
        return array_type(self.nbytes).from_buffer(self._map, self.address - address_of(self._map))


def map_anonymous(nbytes: int, protection: int, flags: int = 0) -> mmap.mmap:
    """Fresh private memory that is unmapped with the last reference to it, in C.

    Raises:
        MemoryError: the system has no such memory (or addresses) left.
    """
    try:
        return mmap.mmap(-1, nbytes, _PRIVATE_ANONYMOUS | flags, protection)
    except OSError as error:
        raise MemoryError(
            f"the system has no {nbytes:,} bytes for a transfer buffer ({error}); free host memory, raise its limit "
            "(ulimit -v, control group), or lower HardwareProfile.host_memory"
        ) from error


def address_of(memory: mmap.mmap) -> int:
    """Where it is."""
    address, nbytes = ctypes.c_void_p(), ctypes.c_ssize_t()
    _read_buffer(memory, ctypes.byref(address), ctypes.byref(nbytes))
    return address.value or 0


def touch(address: int, nbytes: int) -> bool:
    """Have memory get its pages, filled with zeros. Blocks, without the GIL; return whether the system has them.

    Locking takes most of its time for this, and then inside the driver.

    Args:
        address: of anonymous memory that nothing was written to; a page.
        nbytes: whole pages.
    """
    if not libc.madvise(address, nbytes, POPULATE_WRITE):
        return True
    if ctypes.get_errno() != errno.EINVAL:
        return False
    ctypes.memset(address, 0, nbytes)
    return True


def lock_memory(address: int, nbytes: int, device: torch.device | None = None) -> int:
    """Lock (pin) memory for CUDA, which takes longer than one copy through it; return CUDA's code, 0 for success.

    Args:
        address: where; a page.
        nbytes: whole pages.
        device: whose context does it. ``None``: the calling thread's, which in a fresh thread is that of device 0.
    """
    with on_device(device):
        return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))  # type: ignore[no-untyped-call]


def unlock_memory(address: int, device: torch.device | None = None) -> None:
    """Undo :func:`lock_memory`, with the same address and device."""
    with on_device(device):
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def on_device(device: torch.device | None) -> AbstractContextManager[Any]:
    """Make a CUDA device the calling thread's current one within a context; leave it for any other."""
    return torch.cuda.device(device) if device is not None and device.type == "cuda" else contextlib.nullcontext()
