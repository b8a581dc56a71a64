"""What the kernel says of the memory of this process."""

from __future__ import annotations

from pathlib import Path

from lightning_ssd.common.tensors import Region


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def huge_page_bytes(region: Region) -> int:
    """AnonHugePages of the mappings that the region touches."""
    inside, found = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            start, end = (int(part, 16) for part in head.split("-"))
            inside = start < region.address + region.nbytes and region.address < end
        elif inside and head == "AnonHugePages:":
            found += int(line.split()[1]) << 10
    return found
