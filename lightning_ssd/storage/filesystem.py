"""Facts about a directory: what it lies on, what direct I/O wants there, and whether it will do."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lightning_ssd.errors import StorageError, UnsuitablePathError, as_storage_error
from lightning_ssd.memory.mmap import PAGE_BYTES

__all__ = [
    "DirectAlignment",
    "DirectoryFacts",
    "cannot_hold",
    "check_directory",
    "direct_alignment",
    "inspect_directory",
    "make_directory",
    "read_number",
]

_MEMORY_TYPES = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "rootfs"})
_NETWORK_TYPES = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "coda", "gpfs", "glusterfs", "lustre", "ncpfs", "nfs", "nfs4", "orangefs"}
    | {"panfs", "pvfs2", "smb3", "smbfs", "wekafs"}
    | {f"fuse.{name}" for name in ("beeond", "ceph-fuse", "davfs2", "gcsfuse", "glusterfs", "juicefs", "mount-s3")}
    | {f"fuse.{name}" for name in ("rclone", "s3fs", "sshfs")}
)

_REFUSALS = frozenset(
    {errno.ENOENT, errno.EPERM, errno.EACCES, errno.EROFS, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENAMETOOLONG}
)
"""Errors of the system where a directory takes no files, as those of /proc and /sys."""
_ADVICE = "name a directory on a local SSD"
_SETTINGS = "(HardwareProfile.paths, $LIGHTNING_SSD_PATHS)"

_BLOCK_DEVICES = Path("/sys/dev/block")

# struct statx of linux/stat.h: stx_mask at byte 0, stx_dio_mem_align and stx_dio_offset_align at byte 0x98 (Linux 6.1).
_STATX_NBYTES = 256
_STATX_DIO_AT = 0x98
_STATX_DIOALIGN = 0x2000
_AT_EMPTY_PATH = 0x1000
_statx: Any = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)


class DirectAlignment(NamedTuple):
    """The alignment that direct I/O wants of a memory address, and of an offset or length in the file."""

    memory: int
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DirectoryFacts:
    """Facts of the file system and the drive of a directory."""

    file_system: str
    """Type as in ``/proc/self/mountinfo``, such as "ext4"; "unknown" where that cannot be read."""
    device: str
    """Source of the mount, such as "/dev/nvme0n1p2"."""
    is_memory: bool
    is_network: bool
    is_rotational: bool | None
    """The kernel's belief; virtual disks often say ``True`` wrongly. ``None``: unknown."""
    free_bytes: int
    total_bytes: int

    @property
    def unsuitable(self) -> str | None:
        """Why spill files should not lie there; ``None``: they may."""
        if self.is_memory:
            return "which is memory: nothing would be saved"
        return "a network file system: slow, and shared with others" if self.is_network else None


def inspect_directory(path: str | os.PathLike[str]) -> DirectoryFacts:
    """Look, without writing. The directory must exist."""
    path = Path(path)
    file_system, device = _mount_of(path)
    space = os.statvfs(path)
    return DirectoryFacts(
        file_system=file_system,
        device=device,
        is_memory=file_system in _MEMORY_TYPES,
        is_network=file_system in _NETWORK_TYPES,
        is_rotational=_is_rotational(os.stat(path).st_dev),
        free_bytes=space.f_bavail * space.f_frsize,
        total_bytes=space.f_blocks * space.f_frsize,
    )


def check_directory(path: str | os.PathLike[str], *, allow_unsuitable: bool = False) -> DirectoryFacts:
    """Make the directory when missing and refuse it where it cannot serve, or should not.

    Raises:
        UnsuitablePathError: not a directory, not writable; without ``allow_unsuitable`` also memory and network file
            systems.
    """
    path = Path(path)
    make_directory(path)
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        raise _unsuitable(path, "lies on a file system that is mounted read-only", _ADVICE, errno.EROFS)
    if not os.access(path, os.W_OK | os.X_OK):
        raise _unsuitable(
            path, "is not writable for this user", "change its owner or mode, or name another", errno.EACCES
        )
    facts = inspect_directory(path)
    if facts.unsuitable is not None and not allow_unsuitable:
        raise _unsuitable(
            path,
            f"lies on {facts.file_system}, {facts.unsuitable}",
            f"{_ADVICE}, or set allow_unsuitable_paths=True",
            errno.EINVAL,
        )
    return facts


def make_directory(path: Path) -> None:
    """With its parents, where it is missing.

    Raises:
        UnsuitablePathError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if os.path.exists(path):  # not Path.exists(), which raises where a name is too long
            reason = "exists and is no directory"
        elif os.path.islink(path):
            reason = "is a symbolic link that leads nowhere"
        else:
            reason = f"cannot be made ({os.strerror(error.errno or 0)})"
        raise _unsuitable(path, reason, _ADVICE, error.errno) from error


def cannot_hold(path: Path, error: OSError) -> StorageError:
    """Return the error that says why a spill file was not made in a directory, and what to do."""
    what = f"cannot create a spill file in {path}"
    if error.errno not in _REFUSALS:
        return as_storage_error(error, what)
    place = f"{path} lies on {_mount_of(path)[0]}"
    return UnsuitablePathError(error.errno, f"{what} ({os.strerror(error.errno)}; {place}); {_ADVICE} {_SETTINGS}")


def _unsuitable(path: Path, reason: str, advice: str, code: int | None) -> UnsuitablePathError:
    return UnsuitablePathError(code, f"{path} {reason}; {advice} {_SETTINGS}")


def direct_alignment(fd: int) -> DirectAlignment | None:
    """Return what ``O_DIRECT`` wants for this file, or ``None`` where the file system says that it has no direct I/O.

    Asks ``statx``; where that does not know (before Linux 6.1), it assumes one page, which suits every drive.
    """
    buffer = ctypes.create_string_buffer(_STATX_NBYTES)
    if _statx is not None and _statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer) == 0:
        (mask,) = struct.unpack_from("=I", buffer, 0)
        if mask & _STATX_DIOALIGN:
            memory, offset = struct.unpack_from("=II", buffer, _STATX_DIO_AT)
            return DirectAlignment(memory, offset) if memory and offset else None
    return DirectAlignment(PAGE_BYTES, PAGE_BYTES)


def _is_rotational(device: int) -> bool | None:
    """Return what the queue of a block device says; a partition has none of its own, its parent has.

    ``None``: no block device is below (overlay, btrfs, zfs), or there is no sysfs.
    """
    node = _BLOCK_DEVICES / f"{os.major(device)}:{os.minor(device)}"
    own = read_number(node / "queue" / "rotational")
    number = read_number(node.resolve().parent / "queue" / "rotational") if own is None else own
    return None if number is None else bool(number)


def read_number(path: Path) -> int | None:
    """Return the number in a file of the kernel's. ``None``: there is no such file, or no number in it."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _mount_of(path: Path) -> tuple[str, str]:
    """File system type and source of the mount under ``path``, by mount id: paths may be mounted over one another."""
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
        finally:
            os.close(fd)
        mount_id = next(line.split()[1] for line in lines if line.startswith("mnt_id:"))
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            if line.split(" ", 1)[0] == mount_id:
                kind, source = line.rpartition(" - ")[2].split(" ")[:2]
                return kind, source
    except (OSError, StopIteration):
        pass  # no /proc here: the type stays unknown, and the probe's own reads and writes still have to pass
    return "unknown", "unknown"
