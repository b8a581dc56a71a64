"""Read with ``smartctl`` (of smartmontools, 7.0 or later) how much a drive has been written already.

That needs administrator rights and the drive's device file, so that most machines give only a reason why not. Training
does not need it; it makes the reported drive life more accurate.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lightning_ssd.errors import StorageError
from lightning_ssd.storage.filesystem import inspect_directory

__all__ = ["DriveHealth", "HealthReport", "capacity_bytes", "parse_health", "read_health"]

_DATA_UNIT_BYTES = 512_000
_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DriveHealth:
    """Health of one drive, as it reports it."""

    name: str
    """Name of the block device, such as "nvme0n1"."""
    written_bytes: int | None
    """Bytes that hosts have written to it so far, to within 512,000 bytes; ``None``: it does not count them."""
    percentage_used: int
    """The drive's own estimate of used life, 0 to 255; 100 is the end of the rating, not of the drive."""
    share: float = 1.0
    """Largest part of the directory's bytes that may reach this drive. It is less than 1 only for the members of a
    striped md array (RAID 0), because no other array reports how it spreads its bytes."""


@dataclass(frozen=True, slots=True)
class HealthReport:
    """The drives under a directory whose health could be read."""

    drives: tuple[DriveHealth, ...]
    reason: str | None
    """Reason why some or all drives could not be read; ``None``: all could."""


def capacity_bytes(directory: str | os.PathLike[str]) -> int:
    """Return the size of the file system under a directory, for drive writes per day.

    Raises:
        OSError: if there is no such directory.
    """
    space = os.statvfs(directory)
    return space.f_blocks * space.f_frsize


def parse_health(output: bytes) -> tuple[int | None, int]:
    """Return the bytes written by hosts (``None``: not counted) and the percentage of the life used.

    Args:
        output: the output of ``smartctl --json --attributes`` for an NVMe drive.

    Raises:
        StorageError: there is no health log; the error has smartctl's reason.
    """
    try:
        told = json.loads(output)
        log = told.get("nvme_smart_health_information_log")
        if log is not None:
            # The specification lets a drive that does not count say 0.
            return int(log["data_units_written"]) * _DATA_UNIT_BYTES or None, int(log["percentage_used"])
        reasons = [message["string"] for message in told["smartctl"].get("messages", ())]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise StorageError(f"smartctl has printed what no version since 7.0 prints ({error!r})") from error
    raise StorageError("; ".join(reasons) or "smartctl found no NVMe health log")


def read_health(directory: str | os.PathLike[str], *, sysfs: Path = Path("/sys")) -> HealthReport:
    """Read the wear of the NVMe drives under a directory, through partitions, device mapper and md.

    Blocks for milliseconds. A drive that hangs takes 5 s, or as long as the kernel blocks.

    Args:
        directory: an existing directory.
        sysfs: where the kernel shows its devices.

    Returns:
        The drives that could be read, and the reason why others could not: no smartctl, no rights, no device file
        (containers), another kind of drive, no drive at all.

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
        try:
            written_bytes, percentage_used = parse_health(_ask(disk.name))
        except (OSError, subprocess.SubprocessError) as error:
            reasons.append(f"{disk.name}: {error}")
        else:
            drives.append(
                DriveHealth(name=disk.name, written_bytes=written_bytes, percentage_used=percentage_used, share=share)
            )
    return HealthReport(tuple(drives), "; ".join(reasons) or None)


def _disks(node: Path, share: float) -> Iterator[tuple[Path, float]]:
    """Yield the disks below a block device, each with the largest part of its writes that may reach the disk."""
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
    """Add up the shares of each disk, since two partitions of one disk may lie below the same device."""
    shares: dict[Path, float] = {}
    for disk, share in disks:
        shares[disk] = min(shares.get(disk, 0.0) + share, 1.0)
    return shares


def _ask(name: str) -> bytes:
    """Have smartctl read the health log of a disk, which changes nothing on it; return its output.

    The exit status is ignored, because it also reports the drive's health. The output shows whether there is a log.
    """
    if not name.startswith("nvme"):
        raise StorageError("no NVMe drive")
    smartctl = shutil.which("smartctl")
    if smartctl is None:
        raise StorageError("smartctl, of smartmontools, is not installed")
    command = [smartctl, "--json", "--attributes", f"/dev/{name}"]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=_TIMEOUT_S
    ).stdout
