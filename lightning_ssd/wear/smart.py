"""How much a drive has been written already, as it tells itself: the SMART / health log of NVMe drives.

Reading it needs administrator rights and the controller's device file, so that on most machines there is only a reason
why not. Nothing here is needed to train; it makes the drive life that is told truer.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lightning_ssd.errors import StorageError
from lightning_ssd.storage.filesystem import inspect_directory

__all__ = ["DriveHealth", "HealthReport", "capacity_bytes", "parse_health_page", "read_health"]

# NVM Express base specification, Get Log Page (command 02h), SMART / Health Information (log page 02h).
_GET_LOG_PAGE = 0x02
_HEALTH_PAGE = 0x02
_PAGE_NBYTES = 512
_PERCENTAGE_USED_AT = 5
_DATA_UNITS_WRITTEN_AT, _COUNTER_NBYTES = 48, 16
_DATA_UNIT_BYTES = 512_000
_WHOLE_CONTROLLER = 0xFFFFFFFF
_TIMEOUT_MS = 5_000

_IOCTL_ADMIN_CMD = 0xC0484E41
"""``NVME_IOCTL_ADMIN_CMD`` of linux/nvme_ioctl.h: ``_IOWR('N', 0x41, struct nvme_admin_cmd)``, 72 bytes."""

_CONTROLLER = re.compile(r"nvme\d+")
_SUBSYSTEM = re.compile(r"nvme-subsys\d+")


@dataclass(frozen=True, kw_only=True, slots=True)
class DriveHealth:
    """What one drive tells of its life."""

    name: str
    """Of the block device, such as "nvme0n1"."""
    written_bytes: int | None
    """What hosts have written to it so far, to within 512,000 bytes; ``None``: it does not count them."""
    percentage_used: int
    """Its own estimate of used life, 0 to 255; 100 is the end of the rating, not of the drive."""
    model: str | None = None
    share: float = 1.0
    """Part of what is written to the directory that reaches this drive at most: less than 1 only for the members of a
    striped md array (RAID 0), because nothing else tells how it spreads its bytes."""


@dataclass(frozen=True, slots=True)
class HealthReport:
    """The drives under a directory that could be read."""

    drives: tuple[DriveHealth, ...]
    reason: str | None
    """Why one of them, or all, could not be read; ``None``: all could."""


class _AdminCommand(ctypes.Structure):
    """``struct nvme_passthru_cmd`` of linux/nvme_ioctl.h."""

    _fields_: ClassVar = [
        ("opcode", ctypes.c_uint8),
        ("flags", ctypes.c_uint8),
        ("rsvd1", ctypes.c_uint16),
        ("nsid", ctypes.c_uint32),
        ("cdw2", ctypes.c_uint32),
        ("cdw3", ctypes.c_uint32),
        ("metadata", ctypes.c_uint64),
        ("addr", ctypes.c_uint64),
        ("metadata_len", ctypes.c_uint32),
        ("data_len", ctypes.c_uint32),
        ("cdw10", ctypes.c_uint32),
        ("cdw11", ctypes.c_uint32),
        ("cdw12", ctypes.c_uint32),
        ("cdw13", ctypes.c_uint32),
        ("cdw14", ctypes.c_uint32),
        ("cdw15", ctypes.c_uint32),
        ("timeout_ms", ctypes.c_uint32),
        ("result", ctypes.c_uint32),
    ]


def capacity_bytes(directory: str | os.PathLike[str]) -> int:
    """Size of the file system under a directory, for drive writes per day.

    Raises:
        OSError: if there is no such directory.
    """
    space = os.statvfs(directory)
    return space.f_blocks * space.f_frsize


def parse_health_page(page: bytes) -> tuple[int | None, int]:
    """Bytes written by hosts (``None``: not counted), and percentage of the life used, from a health log page.

    Raises:
        StorageError: if the page has another length than 512 bytes.
    """
    if len(page) != _PAGE_NBYTES:
        raise StorageError(f"a health log page of {len(page)} bytes; allowed: {_PAGE_NBYTES}")
    counter = page[_DATA_UNITS_WRITTEN_AT : _DATA_UNITS_WRITTEN_AT + _COUNTER_NBYTES]
    # The specification lets a drive that does not count say 0.
    return int.from_bytes(counter, "little") * _DATA_UNIT_BYTES or None, page[_PERCENTAGE_USED_AT]


def read_health(
    directory: str | os.PathLike[str],
    *,
    sysfs: Path = Path("/sys"),
    devices: Path = Path("/dev"),
    read_page: Callable[[Path], bytes] | None = None,
) -> HealthReport:
    """Ask the NVMe drives under a directory, through partitions, device mapper and md, how worn they are.

    Blocks for milliseconds, at most 5 s per drive that hangs.

    Args:
        directory: an existing one.
        sysfs: where the kernel shows its devices.
        devices: where their device files are.
        read_page: takes the device file of a controller and returns its health log page; ``None``: asks the kernel.

    Returns:
        The drives that told, and a reason where one did not: no rights, no device file (containers), another kind of
        drive, no drive at all.

    Raises:
        OSError: if there is no such directory.
    """
    number = os.stat(directory).st_dev
    if os.major(number) == 0:
        # btrfs, zfs, overlay and tmpfs show a number of their own; the mount may name the drive.
        source = Path(inspect_directory(directory).device)
        if not source.is_block_device():
            return HealthReport((), f"{os.fspath(directory)} lies on no block device of its own")
        number = source.stat().st_rdev
    node = sysfs / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}"
    if not node.exists():
        return HealthReport((), f"{node} does not exist, so that the drive below {os.fspath(directory)} is unknown")
    drives: list[DriveHealth] = []
    reasons: list[str] = []
    for disk, share in _merged(_disks(node.resolve(), 1.0)).items():
        health = _read_disk(disk, share, devices, read_page or _read_page)
        if isinstance(health, DriveHealth):
            drives.append(health)
        else:
            reasons.append(health)
    return HealthReport(tuple(drives), "; ".join(reasons) or None)


def _disks(node: Path, share: float) -> Iterator[tuple[Path, float]]:
    """The whole disks below a block device, and the part of its writes that reaches each at most."""
    if (node / "partition").exists():
        node = node.parent
    slaves = sorted((node / "slaves").iterdir()) if (node / "slaves").is_dir() else []
    if not slaves:
        yield node, share
    level = node / "md" / "level"
    is_striped = level.exists() and level.read_text().strip() == "raid0"
    for slave in slaves:
        yield from _disks(slave.resolve(), share / len(slaves) if is_striped else share)


def _merged(disks: Iterator[tuple[Path, float]]) -> dict[Path, float]:
    """Each disk once: two partitions of one may lie below the same device."""
    shares: dict[Path, float] = {}
    for disk, share in disks:
        shares[disk] = min(shares.get(disk, 0.0) + share, 1.0)
    return shares


def _read_disk(disk: Path, share: float, devices: Path, read_page: Callable[[Path], bytes]) -> DriveHealth | str:
    """The health of one disk, or why it cannot be read."""
    controller = _controller_of(disk)
    if controller is None:
        return f"{disk.name} is not an NVMe drive"
    device = devices / controller.name
    try:
        written_bytes, percentage_used = parse_health_page(read_page(device))
    except PermissionError:
        return f"reading the health log of {disk.name} through {device} needs administrator rights (CAP_SYS_ADMIN)"
    except FileNotFoundError:
        return f"{device}, which tells the health of {disk.name}, is not here; in a container it must be passed in"
    except OSError as error:
        return f"{disk.name} did not tell its health through {device}: {error}"
    model = controller / "model"
    return DriveHealth(
        name=disk.name,
        written_bytes=written_bytes,
        percentage_used=percentage_used,
        model=model.read_text().strip() if model.exists() else None,
        share=share,
    )


def _controller_of(disk: Path) -> Path | None:
    """The directory of the controller of an NVMe disk. With several paths to a drive the first one: any may be asked.

    The name of the disk does not tell: with multipath "nvme0n1" may hang on the controller "nvme1".
    """
    owner = (disk / "device").resolve()
    if _CONTROLLER.fullmatch(owner.name):
        return owner
    if not _SUBSYSTEM.fullmatch(owner.name):
        return None
    controllers = [entry for entry in owner.iterdir() if _CONTROLLER.fullmatch(entry.name)]
    return min(controllers, key=lambda entry: int(entry.name.removeprefix("nvme")), default=None)


def _read_page(device: Path) -> bytes:
    """Get Log Page from the controller. Reads only; nothing on the drive changes."""
    page = ctypes.create_string_buffer(_PAGE_NBYTES)
    command = _health_command(ctypes.addressof(page))
    fd = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Returns the status of the drive; the kernel's own refusals are raised.
        status = fcntl.ioctl(fd, _IOCTL_ADMIN_CMD, command)
    finally:
        os.close(fd)
    if status:
        raise StorageError(f"the drive refused with NVMe status {status:#x}")
    return page.raw


def _health_command(address: int) -> _AdminCommand:
    num_dwords_less_one = _PAGE_NBYTES // 4 - 1
    return _AdminCommand(
        opcode=_GET_LOG_PAGE,
        nsid=_WHOLE_CONTROLLER,
        addr=address,
        data_len=_PAGE_NBYTES,
        cdw10=_HEALTH_PAGE | num_dwords_less_one << 16,
        timeout_ms=_TIMEOUT_MS,
    )
