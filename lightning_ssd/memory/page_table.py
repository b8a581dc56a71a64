"""Which pages of memory that shows a file are in this process, and which are copies, since they were written to."""

from __future__ import annotations

import functools
import os

from lightning_ssd.common.rounding import round_up
from lightning_ssd.memory.mmap import PAGE_BYTES

__all__ = ["file_page_bytes", "has_copies"]

_ENTRY_BYTES = 8
_THERE = 0b1100_0000  # bits 63 and 62 of an entry, in its highest byte: in memory, or swapped out
_PRESENT = 0b1000_0000  # bit 63
_OF_A_FILE = 0b0010_0000  # bit 61: a page of a file, or of memory that is shared


def has_copies(address: int, nbytes: int) -> bool:
    """Whether a page of this private mapping of a file is one of its own, in memory or swapped out.

    Raises:
        OSError: the system does not tell.
    """
    return any(_is_copy(flags) for flags in set(_flags(address, nbytes)))


def file_page_bytes(address: int, nbytes: int) -> int:
    """How much of a range of memory is in this process and shows a file, in whole pages.

    Raises:
        OSError: the system does not tell.
    """
    flags = _flags(address, nbytes)
    return PAGE_BYTES * sum(flags.count(one) for one in set(flags) if one & _PRESENT and one & _OF_A_FILE)


def _flags(address: int, nbytes: int) -> bytes:
    """Return the highest byte of each page's entry."""
    first = address // PAGE_BYTES
    count = round_up(address + nbytes, PAGE_BYTES) // PAGE_BYTES - first
    fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        entries = os.pread(fd, count * _ENTRY_BYTES, first * _ENTRY_BYTES)
    finally:
        os.close(fd)
    if len(entries) != count * _ENTRY_BYTES:
        raise OSError(f"expected {count} entries of /proc/self/pagemap, got {len(entries) // _ENTRY_BYTES}")
    return entries[_ENTRY_BYTES - 1 :: _ENTRY_BYTES]


@functools.cache
def _is_copy(flags: int) -> bool:
    return bool(flags & _THERE) and not flags & _OF_A_FILE
