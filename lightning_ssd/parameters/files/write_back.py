"""When the system writes what was changed in its page cache to the drive."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from lightning_ssd.memory.mmap import libc

__all__ = ["begin_writing", "write_refusal"]

_WAIT_BEFORE, _WRITE = 1, 2  # SYNC_FILE_RANGE_WAIT_BEFORE and SYNC_FILE_RANGE_WRITE
_sync_file_range: Callable[..., int] | None = getattr(libc, "sync_file_range", None)


def begin_writing(fd: int, offset: int, nbytes: int) -> None:
    """Have the system begin to write a part of a file; does not wait for the end.

    A hint: what the drive refuses is told where it is waited for (:func:`write_refusal`, ``fdatasync``).
    """
    if _sync_file_range is not None:
        _sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(nbytes), _WRITE)


def write_refusal(fd: int) -> OSError | None:
    """Wait for what is being written of a file now, and return what the drive has refused since the last call.

    ``None`` also where the system cannot be asked (musl's C library).
    """
    if _sync_file_range is None:
        return None
    failed = _sync_file_range(fd, ctypes.c_int64(0), ctypes.c_int64(0), _WAIT_BEFORE)
    return OSError(ctypes.get_errno(), "") if failed else None
