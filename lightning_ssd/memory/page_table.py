"""Tell how much of a range of memory shows a file and is in this process."""

from __future__ import annotations

import os

from lightning_ssd.common.rounding import round_up
from lightning_ssd.memory.mmap import PAGE_BYTES

__all__ = ["file_page_bytes"]

_ENTRY_BYTES = 8
_PRESENT = 0b1000_0000  # bit 63 of an entry, in its highest byte
_OF_A_FILE = 0b0010_0000  # bit 61: a page of a file, or of memory that is shared


def file_page_bytes(address: int, nbytes: int) -> int:
    """Return the bytes of a range that show a file and are in memory, in whole pages.

    Raises:
        OSError: the system does not tell.
    """
    first = address // PAGE_BYTES
    count = round_up(address + nbytes, PAGE_BYTES) // PAGE_BYTES - first
    fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        entries = os.pread(fd, count * _ENTRY_BYTES, first * _ENTRY_BYTES)
    finally:
        os.close(fd)
    if len(entries) != count * _ENTRY_BYTES:
        raise OSError(f"expected {count} entries of /proc/self/pagemap, got {len(entries) // _ENTRY_BYTES}")
    flags = entries[_ENTRY_BYTES - 1 :: _ENTRY_BYTES]
    return PAGE_BYTES * sum(flags.count(one) for one in set(flags) if one & _PRESENT and one & _OF_A_FILE)
