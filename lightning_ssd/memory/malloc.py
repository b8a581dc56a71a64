"""How to make glibc give freed memory back, or reuse it."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lightning_ssd.memory.mmap import PAGE_BYTES
from lightning_ssd.memory.readings import anonymous_bytes

__all__ = [
    "PAGES_VARIABLE",
    "MallocThreshold",
    "besides_blocks_bytes",
    "foreign_malloc",
    "free_heap_bytes",
    "has_whole_pages",
    "is_glibc",
    "malloc_name",
    "trim",
]

PAGES_VARIABLE = "THP_MEM_ALLOC_ENABLE"
"""Variable of PyTorch: set to 1, large CPU tensors begin with a page, and lie in huge pages."""

_C_LIBRARIES = ("libc.", "libc-", "ld-")
"""Beginnings of the file names of glibc and musl."""


def trim() -> bool:
    """Give the free memory inside glibc's heap back to the system; whether there was any. Costs milliseconds."""
    libc, _ = _glibc()
    return libc is not None and bool(libc.malloc_trim(0))


def free_heap_bytes() -> int:
    """Return what of glibc's heap is resident and free, as near as can be told; 0 where it is not glibc from 2.33 on.

    Pages that were given back in the middle of the heap count as free there, too, so that what is resident besides
    blocks in use is the upper bound. Takes some 0.2 ms.
    """
    heap = _heap()
    return 0 if heap is None else max(min(heap.fordblks, _besides_blocks(heap)), 0)


def besides_blocks_bytes() -> int | None:
    """Return what is resident besides malloc's blocks in use, and shows no file: what is free in the heap, and what no
    malloc has made. ``None`` where it is not glibc from 2.33 on. Takes some 0.5 ms, in which other threads wait for
    their memory.
    """
    heap = _heap()
    return None if heap is None else _besides_blocks(heap)


def _besides_blocks(heap: _MallInfo2) -> int:
    return anonymous_bytes() - int(heap.uordblks) - int(heap.hblkhd)


def _heap() -> _MallInfo2 | None:
    libc, _ = _glibc()
    if libc is None or not hasattr(libc, "mallinfo2"):
        return None
    libc.mallinfo2.restype = _MallInfo2
    heap: _MallInfo2 = libc.mallinfo2()
    return heap


class _DlInfo(ctypes.Structure):
    """``Dl_info``: which file an address belongs to."""

    _fields_: ClassVar = [("file", ctypes.c_char_p), ("others", ctypes.c_void_p * 3)]


@functools.cache
def foreign_malloc() -> str | None:
    """The library (tcmalloc, jemalloc ...) that this process has its malloc from; ``None``: the C library, or unknown.

    ``LD_PRELOAD`` may name what could not be loaded, and a library may come in other ways.
    """
    libc, found = ctypes.CDLL(None), _DlInfo()
    malloc = ctypes.cast(libc.malloc, ctypes.c_void_p)
    if not hasattr(libc, "dladdr") or not libc.dladdr(malloc, ctypes.byref(found)) or not found.file:
        return None
    path = os.fsdecode(found.file)
    own = (os.path.realpath(sys.executable), os.path.realpath("/proc/self/exe"))  # may stand in for what it imports
    name = os.path.basename(path)
    return None if name.startswith(_C_LIBRARIES) or os.path.realpath(path) in own else name


def is_glibc() -> bool:
    """Whether tensors are allocated by glibc's own malloc."""
    return _glibc()[0] is not None


@functools.cache
def has_whole_pages() -> bool:
    """Whether PyTorch has large CPU tensors begin with a page, and asks for huge pages there.

    It does where ``THP_MEM_ALLOC_ENABLE=1`` was in the environment before its first tensor, which importing Lightning
    makes. Nothing tells so; but otherwise glibc never returns such an address.
    """
    libc, _ = _glibc()
    with _disable_current_modes():  # of a program that fakes tensors meanwhile
        tensors = [torch.empty(nbytes, dtype=torch.uint8, device="cpu") for nbytes in (4 << 20, 5 << 20, 33 << 20)]
    return libc is not None and all(tensor.data_ptr() % PAGE_BYTES == 0 for tensor in tensors)


def malloc_name() -> str:
    """Whose malloc this process has, with its version where it tells: ``"glibc 2.36"``."""
    libc, reason = _glibc()
    if libc is None:
        return foreign_malloc() or reason or "unknown"
    libc.gnu_get_libc_version.restype = ctypes.c_char_p
    version = libc.gnu_get_libc_version().decode()
    return f"glibc {version}" + (", tensors in whole pages" if has_whole_pages() else "")


def _glibc() -> tuple[Any, str | None]:
    """The C library if it is glibc and its malloc is in use, else the reason why not."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return None, "the C library is not glibc"
    if (name := foreign_malloc()) is not None:
        return None, f"{name} replaces glibc's malloc"
    libc.mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    libc.malloc_trim.argtypes = (ctypes.c_size_t,)
    return libc, None


class MallocThreshold:
    """Makes freed tensors leave the process: glibc then maps each allocation from 64 KiB up on its own.

    By default glibc raises that threshold to the size of whatever mapped block was freed last, up to 32 MiB. From then
    on tensors live in its heap, where a freed one stays resident as long as anything above it lives: on a CPU,
    offloading would free nothing. Mapping costs page faults on each allocation, so that small ones stay in the heap.
    Holes that the heap has by then would still be used first, so that :class:`_HeldHoles` occupies them meanwhile.

    Or, by :meth:`reuse`, it makes freed tensors stay in the heap, which its user then trims.

    The setting belongs to the process. Several users count, and :meth:`fix` comes before :meth:`reuse`. When the last
    one restores, the dynamic adjustment cannot be switched on again: thresholds are then fixed to where it ends up
    after a 32 MiB tensor was freed (map from 32 MiB, trim at 64 MiB), or to the user's own ``MALLOC_*_THRESHOLD_``
    variables.
    """

    # mallopt is process-wide, hence this bookkeeping. The lock is a leaf: nothing is called while it is held but libc.
    _lock: ClassVar[threading.Lock] = threading.Lock()
    _users: ClassVar[set[MallocThreshold]] = set()
    _reusers: ClassVar[set[MallocThreshold]] = set()
    _holes: ClassVar[_HeldHoles | None] = None
    _is_changed: ClassVar[bool] = False

    _M_TRIM_THRESHOLD = -1
    _M_TOP_PAD = -2
    _M_MMAP_THRESHOLD = -3
    _MAPPED_NBYTES = 64 << 10
    _RESTORED_MMAP_NBYTES = 32 << 20
    _RESTORED_TRIM_NBYTES = 64 << 20
    _RESTORED_TOP_PAD_NBYTES = 128 << 10
    _UNREACHED_NBYTES = 1 << 30
    _GROWTH_NBYTES = 64 << 20
    """The heap grows by so much at once, in order that huge pages fit."""
    _FIXED_TRIM_NBYTES = 1 << 20
    """Small tensors stay in the heap; below 1 MiB of free top, giving it back would cost a system call too often."""

    def __init__(self) -> None:
        self._libc, self.reason = _glibc()
        """The latter: why nothing can be set; ``None``: it can."""

    def fix(self) -> None:
        """Fix the threshold. Again from the same object: no effect."""
        if self._libc is None:
            return
        with self._lock:
            # Claimed first: wherever an interrupt comes, restore() makes it good.
            MallocThreshold._is_changed = True
            self._users.add(self)
            self._reusers.discard(self)
            if self._holes is None:
                MallocThreshold._holes = holes = _HeldHoles(self._libc)
                holes.hold(self._MAPPED_NBYTES)
            self._apply()

    def reuse(self) -> None:
        """Have tensors of any size lie in the heap, and freed ones stay there until :func:`trim`. Ends :meth:`fix`.

        Where glibc takes no such threshold (before 2.35), tensors from 32 MiB up are mapped as ever.
        """
        if self._libc is None:
            return
        with self._lock:
            # Again from the same object: set again, since an interrupt may have come between the claim and the setting.
            MallocThreshold._is_changed = True
            self._reusers.add(self)
            self._users.discard(self)
            self._settle()

    def restore(self) -> None:
        """End this object's claims. Without any claim: no effect."""
        if self._libc is None:
            return
        with self._lock:
            self._users.discard(self)
            self._reusers.discard(self)
            if self._is_changed:
                self._settle()
                MallocThreshold._is_changed = bool(self._users or self._reusers)

    def _settle(self) -> None:
        """Apply what the claims that are left ask for. Called with the lock held."""
        self._apply()
        if self._holes is not None and not self._users:
            self._holes.release()
            MallocThreshold._holes = None

    def _apply(self) -> None:
        """Called with the lock held."""
        pad_nbytes = _user_setting("top_pad", self._RESTORED_TOP_PAD_NBYTES)
        if self._users:
            mmap_nbytes = self._MAPPED_NBYTES
            trim_nbytes = self._FIXED_TRIM_NBYTES
        elif self._reusers:
            mmap_nbytes = trim_nbytes = self._UNREACHED_NBYTES
            pad_nbytes = self._GROWTH_NBYTES
        else:
            mmap_nbytes = _user_setting("mmap_threshold", self._RESTORED_MMAP_NBYTES)
            trim_nbytes = _user_setting("trim_threshold", self._RESTORED_TRIM_NBYTES)
        self._libc.mallopt(self._M_TOP_PAD, pad_nbytes)
        if not self._libc.mallopt(self._M_MMAP_THRESHOLD, mmap_nbytes):  # else what another claim has set would stay
            self._libc.mallopt(self._M_MMAP_THRESHOLD, self._RESTORED_MMAP_NBYTES)
        self._libc.mallopt(self._M_TRIM_THRESHOLD, trim_nbytes)


class _MallInfo2(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks"),
            "keepcost",
        )
    ]


class _HeldHoles:
    """Occupies the free holes of the heap without touching them, so that tensors do not land in them.

    glibc looks for a hole before it maps an allocation, whatever the threshold. After training without offloading the
    heap is full of large holes; a tensor that is freed there leaves its pages resident until the heap is trimmed. A
    block that is never written to costs addresses only.
    """

    _M_MMAP_THRESHOLD = -3
    _LARGEST = 32 << 20
    _IS_MMAPPED = 2
    """In the size that glibc writes before each block (``malloc/malloc.c``)."""

    def __init__(self, libc: Any) -> None:
        self._libc = libc
        self._blocks: list[int] = []

    def hold(self, nbytes: int) -> None:
        """Hold every hole of at least ``nbytes``. Leaves the mmap threshold changed: the caller sets it next."""
        libc = self._libc
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
        libc.free.restype, libc.free.argtypes = None, (ctypes.c_void_p,)
        libc.malloc_trim(0)
        libc.mallopt(self._M_MMAP_THRESHOLD, nbytes)
        size = self._LARGEST
        while size > nbytes:
            self._hold(size)
            size //= 2
        self._hold(nbytes)

    def _hold(self, size: int) -> None:
        """Take blocks of one size until no hole has room for the next, which is mapped: the heap never grows."""
        while True:
            block = self._libc.malloc(size)
            if not block:
                return
            # By the block's header: mallinfo2 would walk all free chunks, for each block anew.
            if ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value & self._IS_MMAPPED:
                self._libc.free(block)
                return
            self._blocks.append(block)

    def release(self) -> None:
        """Give the holes back to malloc."""
        while self._blocks:
            self._libc.free(self._blocks.pop())


def _user_setting(name: str, default: int) -> int:
    """Return what the user told glibc itself through the environment, if it is a number that mallopt can take."""
    settings = [os.environ.get(f"MALLOC_{name.upper()}_", "")]
    for tunable in os.environ.get("GLIBC_TUNABLES", "").split(":"):
        key, _, value = tunable.partition("=")
        if key == f"glibc.malloc.{name}":
            settings.append(value)
    for setting in settings:
        if setting.isdigit() and int(setting) < 1 << 31:
            return int(setting)
    return default
