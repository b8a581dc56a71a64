"""Parts of a file as memory: pages come when they are touched, and leave when the system needs room."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import torch

from lightning_ssd.storage.mapped import MAP_FAILED, PAGE_BYTES, READ_WRITE, array_type, libc

__all__ = ["FileView"]

_FIXED = 0x10  # MAP_FIXED and MAP_NORESERVE, which Python does not name (everywhere)
_NORESERVE = 0x4000


class FileView:
    """A range of addresses of which parts show parts of files, privately: writing to it changes no file.

    What is shown must not be written to the file while the view lives. It outlives the closing of the file.

    Args:
        nbytes: of the range.
        keeps: an object that lives as long as the view.

    Raises:
        MemoryError: the system has no such range of addresses left.
    """

    def __init__(self, nbytes: int, *, keeps: object = None) -> None:
        self._keeps = keeps
        self._length = max(-(-nbytes // PAGE_BYTES), 1) * PAGE_BYTES
        self._pid = os.getpid()
        self.address = _map(None, self._length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, -1, 0)

    def show(self, start: int, fd: int, offset: int, nbytes: int) -> None:
        """Show ``nbytes`` bytes of a file from ``offset`` on, at ``start`` of the range; both are whole pages."""
        if start % PAGE_BYTES or offset % PAGE_BYTES or start + nbytes > self._length:
            raise ValueError(f"start={start}, offset={offset}, nbytes={nbytes}; allowed: whole pages within the range")
        _map(self.address + start, nbytes, mmap.MAP_PRIVATE | _NORESERVE | _FIXED, fd, offset)

    def tensor(self, start: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
        """A dense tensor with a storage of its own over the bytes from ``start`` on. It keeps the view alive."""
        num_elements = 1
        for size in shape:
            num_elements *= size
        array = array_type(num_elements * dtype.itemsize).from_address(self.address + start)
        array.view = self  # type: ignore[attr-defined]
        return torch.frombuffer(array, dtype=dtype).as_strided(shape, stride)

    def __del__(self, _unmap: Any = libc.munmap, _getpid: Any = os.getpid) -> None:
        # Both are bound early: at interpreter exit the modules may be gone before us.
        if getattr(self, "address", 0) and _getpid() == self._pid:
            _unmap(self.address, self._length)


def _map(address: int | None, nbytes: int, flags: int, fd: int, offset: int) -> int:
    mapped = libc.mmap(address, nbytes, READ_WRITE, flags, fd, offset)
    if mapped is None or mapped == MAP_FAILED:
        raise MemoryError(f"the system cannot map {nbytes:,} bytes: {os.strerror(ctypes.get_errno())}")
    return int(mapped)
