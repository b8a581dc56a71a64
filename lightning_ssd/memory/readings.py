"""How much memory there is, and how much is used.

Host numbers come from ``/proc`` and the cgroup files; where ``/proc`` is not mounted, they are ``None``. Device
numbers come from PyTorch's allocator there; asking never starts a device and never resets a peak that others read.
"""

from __future__ import annotations

import errno
import functools
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_ssd.common.accelerators import accelerator_of

__all__ = [
    "MemoryReadings",
    "anonymous_bytes",
    "available_bytes",
    "capacity_bytes",
    "cgroup_available_bytes",
    "cgroup_limit_bytes",
    "host_available_bytes",
    "is_out_of_memory",
    "level_bytes",
    "peak_bytes",
    "read_memory",
    "reset_device_peak",
    "reset_host_peak",
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
    """Bytes that PyTorch's allocator has handed out there."""
    device_peak_bytes: int | None = None
    """Its peak since the process started or since the latest ``reset_peak_memory_stats``."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether device or host memory could not be had."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # PyTorch's allocator for the CPU raises nothing more special than this.
    is_cpu_allocator = isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or is_cpu_allocator


def read_memory(device: torch.device | str | None = None) -> MemoryReadings:
    """Read what this process uses now and at most.

    Args:
        device: to include, if it is an accelerator; while it is not in use, its numbers are ``None``.
    """
    peak, host = _read_kib("/proc/self/status", "VmHWM", "VmRSS")
    stats = _allocator_stats(torch.device("cpu") if device is None else torch.device(device))
    return MemoryReadings(
        host_bytes=host,
        host_peak_bytes=peak,
        device_bytes=stats.get("allocated_bytes.all.current"),
        device_peak_bytes=stats.get("allocated_bytes.all.peak"),
    )


def _allocator_stats(device: torch.device) -> dict[str, int]:
    """Empty for a CPU, and while the device is not in use: PyTorch returns {} then, without starting it."""
    accelerator = accelerator_of(device)
    return {} if accelerator is None else dict(accelerator.memory_stats())


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
    """Let the allocator's peaks begin anew, for every reader of this process; ``False`` where none are kept."""
    accelerator = accelerator_of(torch.device(device))
    if accelerator is None or not accelerator.memory_stats():
        return False
    accelerator.reset_peak()
    return True


def level_bytes(device: torch.device) -> int:
    """Memory in use now: of an accelerator's allocator, else the resident set of this process; 0 if unknown."""
    if (accelerator := accelerator_of(device)) is not None:
        return accelerator.allocated_bytes()
    try:
        return int(_read_bytes("/proc/self/statm").split()[1]) * _PAGE
    except FileNotFoundError:
        return 0


def peak_bytes(device: torch.device) -> int:
    """The most memory that was in use, as :func:`level_bytes` counts it, since the peak began anew; 0 if unknown."""
    if accelerator_of(device) is not None:
        return _allocator_stats(device).get("allocated_bytes.all.peak", 0)
    return _read_kib("/proc/self/status", "VmHWM")[0] or 0


def anonymous_bytes() -> int:
    """Resident memory of this process that shows no file; 0 if unknown."""
    try:
        resident, shared = _read_bytes("/proc/self/statm").split()[1:3]
    except FileNotFoundError:
        return 0
    return (int(resident) - int(shared)) * _PAGE


def available_bytes(device: torch.device) -> int | None:
    """Memory of the device that could still be allocated; ``None`` if unknown. Starts the device."""
    if (accelerator := accelerator_of(device)) is not None:
        free, allowed, stats = accelerator.free_bytes(), accelerator.allowed_bytes(), accelerator.memory_stats()
        reserved = stats.get("reserved_bytes.all.current", 0)
        if allowed is not None:  # set_per_process_memory_fraction(), of which the device knows nothing
            free = _smaller(free, max(allowed - reserved, 0))
        return None if free is None else free + reserved - stats.get("allocated_bytes.all.current", 0)
    return host_available_bytes()


def capacity_bytes(device: torch.device) -> int | None:
    """All memory of the device; of a CPU what the machine has, or a cgroup allows. ``None`` if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type != "cpu":
        return None
    return _smaller(*_read_kib("/proc/meminfo", "MemTotal"), cgroup_limit_bytes())


def host_available_bytes(cached_bytes: int = 0) -> int | None:
    """Return the bytes that can still be allocated without swapping or being killed: the less of machine and cgroup.

    Args:
        cached_bytes: see :func:`cgroup_available_bytes`.
    """
    of_group = cgroup_available_bytes(cached_bytes=cached_bytes)
    return _smaller(*_read_kib("/proc/meminfo", "MemAvailable"), of_group)


def cgroup_limit_bytes(proc: Path = Path("/proc/self")) -> int | None:
    """The lowest memory limit from this process's cgroup up to the root, v1 and v2; ``None``: no limit.

    Args:
        proc: where ``cgroup`` and ``mountinfo`` are.
    """
    limits = (limit for limit, _ in _cgroup_levels(proc))
    return min(limits, default=None)


def cgroup_available_bytes(proc: Path = Path("/proc/self"), *, cached_bytes: int = 0) -> int | None:
    """The least room that any limited cgroup from this process's own up to the root has left; ``None``: no limit.

    Args:
        proc: where ``cgroup`` and ``mountinfo`` are.
        cached_bytes: of files in the page cache whose room is there to be taken, although they are read often.
    """
    rooms = (max(0, limit - used) for limit, used in _cgroup_levels(proc, cached_bytes))
    return min(rooms, default=None)


def _cgroup_levels(proc: Path, cached_bytes: int = 0) -> Iterator[tuple[int, int]]:
    """(limit, bytes used that cannot simply be dropped) of every limited level."""
    for limit_file, usage_file, stat_file, prefix in _memory_files(proc, tuple(_read_lines(f"{proc}/cgroup"))):
        limit = _read_number(limit_file)
        if limit is not None and limit < _UNLIMITED:
            stat = _read_table(stat_file)
            # Unused page cache counts against a cgroup, but the kernel drops it before it refuses memory.
            cache = stat.get(f"{prefix}inactive_file", 0) + min(stat.get(f"{prefix}active_file", 0), cached_bytes)
            yield limit, max(0, (_read_number(usage_file) or 0) - cache)


@functools.lru_cache(maxsize=8)
def _memory_files(proc: Path, memberships: tuple[str, ...]) -> tuple[tuple[str, str, str, str], ...]:
    """Files of each cgroup that may limit memory: limit, usage and statistics, with the prefix of keys in the latter.

    Remembered, since the mounts take longer to look through than all the rest, and each pass asks.
    """
    found = list[tuple[str, str, str, str]]()
    for mount, directory in _find_memory_cgroups(proc, memberships):
        is_v2 = (directory / "cgroup.controllers").exists()
        names = ("memory.max", "memory.current") if is_v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        for level in (directory, *directory.parents):
            limit, usage, stat = (str(level / name) for name in (*names, "memory.stat"))
            found.append((limit, usage, stat, "" if is_v2 else "total_"))
            if level == mount:
                break
    return tuple(found)


def _find_memory_cgroups(proc: Path, memberships: Sequence[str]) -> Iterator[tuple[Path, Path]]:
    """(mount point, this process's directory) of each hierarchy that may limit memory."""
    paths: dict[str, str] = {}
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            paths["cgroup" if controllers else "cgroup2"] = path
    for line in _read_lines(f"{proc}/mountinfo"):
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


def _read_lines(path: str) -> list[str]:
    """Lines of a kernel file; none where this system does not have it."""
    try:
        return _read_bytes(path).decode().splitlines()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def _read_bytes(path: str) -> bytes:
    """A kernel file, unbuffered: passes ask hundreds of times, and a buffer takes longer than the kernel.

    By a file object all the same: an interrupt right after the system has opened it leaves no descriptor.

    Raises:
        OSError: as ``open`` does.
    """
    with io.FileIO(path) as file:
        return file.readall()


def _read_number(path: str) -> int | None:
    """A file with one number; ``None`` for "max" and where the file is missing."""
    lines = _read_lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _read_table(path: str) -> dict[str, int]:
    """Lines such as ``inactive_file 0``; lines without a number are left out."""
    words = (line.split() for line in _read_lines(path))
    return {line[0]: int(line[1]) for line in words if len(line) >= 2 and line[1].isdigit()}


def _read_kib(path: str, *keys: str) -> list[int | None]:
    """Bytes of lines such as ``VmRSS:  1672 kB``, which are many and of which few are asked for."""
    try:
        text = b"\n" + _read_bytes(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return [None] * len(keys)
    found = [text.partition(b"\n%s:" % key.encode())[2].split(None, 1) for key in keys]
    return [int(words[0]) * _KIB if words else None for words in found]


def _smaller(*values: int | None) -> int | None:
    return min([value for value in values if value is not None], default=None)
