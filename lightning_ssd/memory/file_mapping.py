"""Parts of a file as memory: pages come when they are touched, and leave when the system needs room."""

from __future__ import annotations

import ctypes
import mmap
import os

import torch

from lightning_ssd.common.rounding import round_up
from lightning_ssd.memory.mmap import (
    MAP_FAILED,
    PAGE_BYTES,
    READ_WRITE,
    address_of,
    array_type,
    libc,
    map_anonymous,
)

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
        self._length = max(round_up(nbytes, PAGE_BYTES), PAGE_BYTES)
        self._map = map_anonymous(self._length, READ_WRITE, _NORESERVE)  # unmapped in C, whatever it shows then
        self.address = address_of(self._map)

    def show(self, start: int, fd: int, offset: int, nbytes: int) -> None:
        """Show ``nbytes`` bytes of a file from ``offset`` on, at ``start`` of the range; both are whole pages."""
        if start % PAGE_BYTES or offset % PAGE_BYTES or start + nbytes > self._length:
            raise ValueError(f"start={start}, offset={offset}, nbytes={nbytes}; allowed: whole pages within the range")
        flags = mmap.MAP_PRIVATE | _NORESERVE | _FIXED
        mapped = libc.mmap(self.address + start, nbytes, READ_WRITE, flags, fd, offset)
        if mapped is None or mapped == MAP_FAILED:
            raise MemoryError(f"the system cannot map {nbytes:,} bytes: {os.strerror(ctypes.get_errno())}")

    def tensor(self, start: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
        """A dense tensor with a storage of its own over the bytes from ``start`` on. It keeps the view alive."""
        num_elements = 1
        for size in shape:
            num_elements *= size
        array = array_type(num_elements * dtype.itemsize).from_buffer(self._map, start)
        array.view = self  # type: ignore[attr-defined]  # for what the view keeps
        return torch.frombuffer(array, dtype=dtype).as_strided(shape, stride)
