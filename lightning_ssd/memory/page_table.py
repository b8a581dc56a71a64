"""Which pages of private memory that shows a file are copies, since something was written to them."""

from __future__ import annotations

import functools
import os

from lightning_ssd.common.rounding import round_up
from lightning_ssd.memory.mmap import PAGE_BYTES

__all__ = ["has_copies"]

_ENTRY_BYTES = 8
_THERE = 0b1100_0000  # bits 63 and 62 of an entry, in its highest byte: in memory, or swapped out
_OF_A_FILE = 0b0010_0000  # bit 61: a page of a file, or of memory that is shared


def has_copies(address: int, nbytes: int) -> bool:
    """Whether a page of this private mapping of a file is one of its own, in memory or swapped out.

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
    return any(_is_copy(flags) for flags in set(entries[_ENTRY_BYTES - 1 :: _ENTRY_BYTES]))


@functools.cache
def _is_copy(flags: int) -> bool:
    return bool(flags & _THERE) and not flags & _OF_A_FILE
