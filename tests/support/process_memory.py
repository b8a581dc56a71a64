"""What the kernel says of the memory of this process."""

import os
from pathlib import Path


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def huge_page_bytes(region):
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


def shown_bytes(directory):
    """What is in memory now of mappings that show files in a directory."""
    found, shown = 0, str(directory.resolve())
    with open("/proc/self/pagemap", "rb", buffering=0) as table:  # what /proc/self/smaps adds up takes much longer
        for line in Path("/proc/self/maps").read_text().splitlines():
            if shown in line:
                first, stop = (int(part, 16) // 4096 for part in line.split()[0].split("-"))
                entries = os.pread(table.fileno(), 8 * (stop - first), 8 * first)
                found += 4096 * sum(flags >> 7 for flags in entries[7::8])
    return found


def frozen_changed_at(offloader):
    """When each file of frozen weights was written last.

    ``dirtied_bytes`` counts a page of anything that this process writes; a file's own time tells of that file alone.
    """
    files = offloader._parts.parameters.files
    files.sync()  # writing through a mapping sets the time only where the page has been clean
    return [os.fstat(arena.fd).st_mtime_ns for arena in files._still]


def dirtied_bytes():
    """What this process has written so far, or changed in files so that the system has to write it."""
    return _io("write_bytes")


def read_bytes():
    """What drives had to read for this process so far."""
    return _io("read_bytes")


def _io(name):
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
