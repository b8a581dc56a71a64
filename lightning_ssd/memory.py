"""How much memory there is, how much is used, and how to make glibc give freed memory back.

Host numbers come from ``/proc`` and the cgroup files; where the system has none (macOS), they are ``None``. Device
numbers come from PyTorch's CUDA allocator; asking never initialises CUDA and never resets a peak that others read.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import torch

from lightning_ssd.errors import ConfigError

__all__ = [
    "MallocThreshold",
    "MemoryReadings",
    "available_bytes",
    "cgroup_available_bytes",
    "cgroup_limit_bytes",
    "host_available_bytes",
    "host_total_bytes",
    "level_bytes",
    "read_memory",
    "reset_device_peak",
    "reset_host_peak",
    "trim",
]

_KIB = 1024
_PAGE = os.sysconf("SC_PAGE_SIZE")
_UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as a number just under 2**63, rounded down to a page."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReadings:
    """Bytes at one moment; ``None`` where the machine does not tell."""

    host_bytes: int | None = None
    """Resident set size of this process."""
    host_peak_bytes: int | None = None
    """Its peak since the process started or since :func:`reset_host_peak`."""
    device_bytes: int | None = None
    """What PyTorch's CUDA allocator has handed out."""
    device_peak_bytes: int | None = None
    """Its peak since the process started or since anybody's ``torch.cuda.reset_peak_memory_stats``."""


def read_memory(device: torch.device | str | None = None) -> MemoryReadings:
    """Read what this process uses now and at most.

    Args:
        device: a CUDA device to include; anything else, or CUDA not in use yet, leaves its numbers at ``None``.
    """
    status = _read_kib_table(Path("/proc/self/status"))
    host, peak = status.get("VmRSS"), status.get("VmHWM")
    if peak is None and sys.platform == "darwin":
        import resource  # Not on every platform, and only needed where /proc is missing.

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stats = _allocator_stats(torch.device("cpu") if device is None else torch.device(device))
    return MemoryReadings(
        host_bytes=host,
        host_peak_bytes=peak,
        device_bytes=stats.get("allocated_bytes.all.current"),
        device_peak_bytes=stats.get("allocated_bytes.all.peak"),
    )


def _allocator_stats(device: torch.device) -> dict[str, int]:
    """Empty for other devices, and while CUDA is not in use: PyTorch returns {} then, without initialising it."""
    return dict(torch.cuda.memory_stats(device)) if device.type == "cuda" else {}


def reset_host_peak() -> bool:
    """Let the peak of the resident set begin anew, for every reader of this process.

    Returns:
        Whether the system could do it (Linux can, through ``/proc/self/clear_refs``).
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except (FileNotFoundError, PermissionError):
        return False
    return True


def reset_device_peak(device: torch.device | str) -> bool:
    """Let the CUDA allocator's peaks begin anew, for every reader of this process; ``False`` where CUDA is not used."""
    device = torch.device(device)
    if not _allocator_stats(device):
        return False
    torch.cuda.reset_peak_memory_stats(device)
    return True


def level_bytes(device: torch.device) -> int:
    """Memory in use now: of the device's allocator on CUDA, else the resident set of this process; 0 if unknown."""
    if device.type == "cuda":
        # Nested, because flattening it costs many times more, and a pass that is traced asks with each pack.
        stats = torch.cuda.memory_stats_as_nested_dict(device)
        return int(stats["allocated_bytes"]["all"]["current"]) if stats else 0
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * _PAGE
    except FileNotFoundError:
        return 0


def available_bytes(device: torch.device) -> int | None:
    """Memory of the device that could still be allocated; ``None`` if unknown. Initialises CUDA if it is meant."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        stats = _allocator_stats(device)
        cached = stats.get("reserved_bytes.all.current", 0) - stats.get("allocated_bytes.all.current", 0)
        return int(free) + cached
    return host_available_bytes()


def host_total_bytes() -> int | None:
    """The machine's memory, or the cgroup's limit where that is lower."""
    return _smaller(_read_kib_table(Path("/proc/meminfo")).get("MemTotal"), cgroup_limit_bytes())


def host_available_bytes() -> int | None:
    """What can still be allocated without swapping or being killed: machine and cgroup, whichever has less."""
    return _smaller(_read_kib_table(Path("/proc/meminfo")).get("MemAvailable"), cgroup_available_bytes())


def cgroup_limit_bytes(proc: Path = Path("/proc/self")) -> int | None:
    """The lowest memory limit from this process's cgroup up to the root, v1 and v2; ``None``: no limit.

    Args:
        proc: where ``cgroup`` and ``mountinfo`` are.
    """
    limits = (limit for limit, _ in _cgroup_levels(proc))
    return min(limits, default=None)


def cgroup_available_bytes(proc: Path = Path("/proc/self")) -> int | None:
    """The least room that any limited cgroup from this process's own up to the root has left; ``None``: no limit."""
    rooms = (max(0, limit - used) for limit, used in _cgroup_levels(proc))
    return min(rooms, default=None)


def _cgroup_levels(proc: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes used that cannot simply be dropped) of every limited level."""
    for mount, directory in _memory_cgroups(proc):
        is_v2 = (directory / "cgroup.controllers").exists()
        names = ("memory.max", "memory.current") if is_v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        inactive_key = "inactive_file" if is_v2 else "total_inactive_file"
        for level in (directory, *directory.parents):
            limit = _read_number(level / names[0])
            if limit is not None and limit < _UNLIMITED:
                cache = _read_table(level / "memory.stat").get(inactive_key, 0)
                # Unused page cache counts against a cgroup, but the kernel drops it before it refuses memory.
                yield limit, max(0, (_read_number(level / names[1]) or 0) - cache)
            if level == mount:
                break


def _memory_cgroups(proc: Path) -> Iterator[tuple[Path, Path]]:
    """(mount point, this process's directory) of each hierarchy that may limit memory."""
    paths: dict[str, str] = {}
    for line in _read_lines(proc / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            paths["cgroup" if controllers else "cgroup2"] = path
    for line in _read_lines(proc / "mountinfo"):
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind not in paths or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        root, mount = left.split(" ")[3:5]
        mount_path = Path(mount)
        # In a container the mount may show the subtree `root` only, or a namespace may hide where we are.
        relative = os.path.relpath(paths[kind], root)
        directory = mount_path if relative.startswith("..") else mount_path / relative
        yield mount_path, directory if directory.is_dir() else mount_path


def _read_lines(path: Path) -> list[str]:
    """Lines of a kernel file; none where this system does not have it."""
    try:
        return path.read_text().splitlines()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def _read_number(path: Path) -> int | None:
    """A file with one number; ``None`` for "max" and where the file is missing."""
    lines = _read_lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _read_table(path: Path) -> dict[str, int]:
    """Lines such as ``VmRSS:  1672 kB`` or ``inactive_file 0``; lines without a number are left out."""
    words = (line.split() for line in _read_lines(path))
    return {line[0].rstrip(":"): int(line[1]) for line in words if len(line) >= 2 and line[1].isdigit()}


def _read_kib_table(path: Path) -> dict[str, int]:
    return {key: value * _KIB for key, value in _read_table(path).items()}


def _smaller(first: int | None, second: int | None) -> int | None:
    known = [value for value in (first, second) if value is not None]
    return min(known, default=None)


def trim() -> bool:
    """Give the free memory inside glibc's heap back to the system; whether there was any. Costs milliseconds."""
    libc, _ = _glibc()
    return libc is not None and bool(libc.malloc_trim(0))


def _glibc() -> tuple[Any, str | None]:
    """The C library if it is glibc and its malloc is in use, else the reason why not."""
    if sys.platform != "linux":
        return None, f"the C library of {sys.platform} is not glibc"
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return None, "the C library is not glibc"
    preloaded = os.environ.get("LD_PRELOAD", "")
    for name in ("jemalloc", "tcmalloc", "mimalloc"):
        if name in preloaded:
            return None, f"{name} replaces glibc's malloc (LD_PRELOAD)"
    libc.mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    libc.malloc_trim.argtypes = (ctypes.c_size_t,)
    return libc, None


class MallocThreshold:
    """Makes freed tensors leave the process: glibc then maps each allocation from ``nbytes`` up on its own.

    By default glibc raises that threshold to the size of whatever mapped block was freed last, up to 32 MiB. From then
    on tensors live in its heap, where a freed one stays resident as long as anything above it lives: on a CPU,
    offloading would free nothing. Mapping costs page faults on each allocation, so that small ones stay in the heap.
    Holes that the heap has by then would still be used first, so that :class:`_HeldHoles` occupies them meanwhile.

    The setting belongs to the process. Several users count; the lowest ``nbytes`` among them holds. When the last one
    restores, the dynamic adjustment cannot be switched on again: thresholds are then fixed to where it ends up after
    a 32 MiB tensor was freed (map from 32 MiB, trim at 64 MiB), or to the user's own ``MALLOC_*_THRESHOLD_`` variables.

    Example::

        with MallocThreshold() as threshold:
            ...             # freed tensors leave the resident set
            print(threshold.reason or "fixed")
    """

    # mallopt is process-wide, hence this bookkeeping. The lock is a leaf: nothing is called while it is held but libc.
    _lock: ClassVar[threading.Lock] = threading.Lock()
    _users: ClassVar[set[MallocThreshold]] = set()
    _holes: ClassVar[_HeldHoles | None] = None

    _M_TRIM_THRESHOLD = -1
    _M_MMAP_THRESHOLD = -3
    _RESTORED_MMAP_NBYTES = 32 << 20
    _RESTORED_TRIM_NBYTES = 64 << 20
    _FIXED_TRIM_NBYTES = 1 << 20
    """Small tensors stay in the heap; below 1 MiB of free top, giving it back would cost a system call too often."""

    def __init__(self, nbytes: int = 64 * _KIB) -> None:
        """Changes nothing yet.

        Args:
            nbytes: allocations from this size up are mapped; 4 KiB to 32 MiB.
        """
        if not 4 * _KIB <= nbytes <= 32 << 20:
            raise ConfigError(f"MallocThreshold.nbytes={nbytes!r}; allowed: an integer from 4096 to {32 << 20}")
        self.nbytes = nbytes
        self._libc, self.reason = _glibc()

    def fix(self) -> bool:
        """Fix the threshold. Again from the same object: no effect.

        Returns:
            Whether the C library took it; if not, :attr:`reason` says why.
        """
        if self._libc is None:
            return False
        with self._lock:
            if not self._users:
                MallocThreshold._holes = _HeldHoles(self._libc, self.nbytes)
            self._users.add(self)
            taken = self._apply()
        self.reason = None if taken else "mallopt refused the value"
        return taken

    def restore(self) -> None:
        """End this object's claim. Without a claim: no effect."""
        if self._libc is None:
            return
        with self._lock:
            if self in self._users:
                self._users.remove(self)
                self._apply()
                if not self._users and self._holes is not None:
                    self._holes.release()
                    MallocThreshold._holes = None

    def _apply(self) -> bool:
        """Called with the lock held."""
        if self._users:
            mmap_nbytes = min(user.nbytes for user in self._users)
            trim_nbytes = self._FIXED_TRIM_NBYTES
        else:
            mmap_nbytes = _user_setting("mmap", self._RESTORED_MMAP_NBYTES)
            trim_nbytes = _user_setting("trim", self._RESTORED_TRIM_NBYTES)
        taken = self._libc.mallopt(self._M_MMAP_THRESHOLD, mmap_nbytes)
        return bool(taken and self._libc.mallopt(self._M_TRIM_THRESHOLD, trim_nbytes))

    def __enter__(self) -> Self:
        self.fix()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()


class _MallInfo2(ctypes.Structure):
    """glibc's ``struct mallinfo2``; only the first field, the bytes of all heaps, is of use here."""

    _fields_: ClassVar = [("arena", ctypes.c_size_t), ("others", ctypes.c_size_t * 9)]


class _HeldHoles:
    """Occupies the free holes of the heap without touching them, so that tensors do not land in them.

    glibc looks for a hole before it maps an allocation, whatever the threshold. After training without offloading the
    heap is full of large holes; a tensor that is freed there leaves its pages resident until somebody trims. A block
    that nobody writes to costs addresses only. Where glibc cannot tell its heap's size (before 2.33), nothing is held.
    """

    _M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
    _LARGEST = (32 << 20) - 4096  # from 32 MiB up glibc maps in any case

    def __init__(self, libc: Any, nbytes: int) -> None:
        """Hold every hole of at least ``nbytes``. Leaves both thresholds changed: the caller sets them next."""
        self._libc = libc
        self._blocks: list[int] = []
        if not hasattr(libc, "mallinfo2"):
            return
        libc.mallinfo2.restype = _MallInfo2
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
        libc.free.restype, libc.free.argtypes = None, (ctypes.c_void_p,)
        libc.malloc_trim(0)
        libc.mallopt(self._M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(self._M_TRIM_THRESHOLD, (1 << 31) - 1)
        size = self._LARGEST
        while size > nbytes:
            self._hold(size)
            size //= 2
        self._hold(nbytes)

    def _hold(self, size: int) -> None:
        """Take blocks of one size until the heap would have to grow for the next."""
        while True:
            before = self._libc.mallinfo2().arena
            block = self._libc.malloc(size)
            if not block:
                return
            if self._libc.mallinfo2().arena != before:
                self._libc.free(block)
                return
            self._blocks.append(block)

    def release(self) -> None:
        """Give the holes back to malloc."""
        for block in self._blocks:
            self._libc.free(block)
        self._blocks.clear()


def _user_setting(name: str, default: int) -> int:
    """What the user told glibc itself through the environment, if it is a number that mallopt can take."""
    settings = [os.environ.get(f"MALLOC_{name.upper()}_THRESHOLD_", "")]
    for tunable in os.environ.get("GLIBC_TUNABLES", "").split(":"):
        key, _, value = tunable.partition("=")
        if key == f"glibc.malloc.{name}_threshold":
            settings.append(value)
    for setting in settings:
        if setting.isdigit() and int(setting) < 1 << 31:
            return int(setting)
    return default
