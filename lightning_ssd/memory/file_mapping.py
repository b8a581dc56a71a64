"""Parts of files as memory: pages come when they are touched, and leave when the system needs room or is told to."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable

import torch

from lightning_ssd.common.rounding import round_up
from lightning_ssd.memory.mmap import (
    ADVISE_HUGE,
    HUGE_PAGE_BYTES,
    MAP_FAILED,
    NO_ACCESS,
    PAGE_BYTES,
    POPULATE_WRITE,
    READ_WRITE,
    address_of,
    array_type,
    libc,
    map_anonymous,
)

__all__ = ["READ_BYTES", "FileView", "page_out", "private_file_ranges"]

READ_BYTES = 4 << 20
"""Size of a view that shows files only to have them read (:meth:`FileView.read`)."""

_FIXED = 0x10  # MAP_FIXED and MAP_NORESERVE, which Python does not name (everywhere)
_NORESERVE = 0x4000
_WILLNEED = 3  # MADV_WILLNEED, MADV_DONTNEED, MADV_COLD, MADV_PAGEOUT (both Linux 5.4) and MADV_POPULATE_READ (5.14)
_DONTNEED = 4
_COLD = 20
_PAGEOUT = 21
_POPULATE_READ = 22
_POPULATE_BYTES = 16 << 20
"""Most bytes of one request: a thread that maps or unmaps memory meanwhile waits for one."""


class FileView:
    """A range of addresses of which parts show parts of files.

    Privately: writing to it changes no file, and what is shown must not be written to the file while the view lives.
    Or shared: writing to it changes the file, through the system's page cache, and nothing that was written is lost
    when its pages leave the process. A view outlives the closing of the file.

    Args:
        nbytes: of the range.
        offset: of the file, which will be shown at the beginning of the range: what the page cache has in huge pages is
            mapped in huge pages then.
        keeps: an object that lives as long as the view.

    Raises:
        MemoryError: the system has no such range of addresses left.
    """

    def __init__(self, nbytes: int, *, offset: int = 0, keeps: object = None) -> None:
        self._keeps = keeps
        self._length = max(round_up(nbytes, PAGE_BYTES), PAGE_BYTES)
        is_huge = self._length >= HUGE_PAGE_BYTES
        reserved = self._length + HUGE_PAGE_BYTES if is_huge else self._length
        self._map = map_anonymous(reserved, READ_WRITE, _NORESERVE)  # unmapped in C, whatever it shows then
        address = address_of(self._map)
        self._skipped = (offset - address) % HUGE_PAGE_BYTES if is_huge else 0
        self.address = address + self._skipped

    def show(self, start: int, fd: int, offset: int, nbytes: int, *, shared: bool = False) -> None:
        """Show ``nbytes`` bytes of a file from ``offset`` on, at ``start`` of the range; both are whole pages.

        What the part has shown before is replaced in one step: no reader ever finds it without its bytes.
        """
        if start % PAGE_BYTES or offset % PAGE_BYTES or start + nbytes > self._length:
            raise ValueError(f"start={start}, offset={offset}, nbytes={nbytes}; give whole pages within the range")
        flags = (mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE) | _NORESERVE | _FIXED
        mapped = libc.mmap(self.address + start, nbytes, READ_WRITE, flags, fd, offset)
        if mapped is None or mapped == MAP_FAILED:
            raise MemoryError(f"the system cannot map {nbytes:,} bytes: {os.strerror(ctypes.get_errno())}")
        if shared:
            self._advise_huge(start, nbytes)

    def _advise_huge(self, start: int, nbytes: int) -> None:
        """Read in pieces of that size, too, and each is one page fault. Kernels without the feature refuse."""
        if nbytes >= HUGE_PAGE_BYTES:
            libc.madvise(self.address + start, nbytes, ADVISE_HUGE)

    def hide(self) -> None:
        """Close the range to every access: one more ends the process."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE | _FIXED
        libc.mmap(self.address, self._length, NO_ACCESS, flags, -1, 0)

    def bring_in(self, start: int, nbytes: int, *, changes: bool = False) -> None:
        """Read a part from its file, as far as the system's page cache has it not, and map it.

        Blocks, without the GIL. A kernel before 5.14 is asked to read ahead what it will, and maps at the first touch.
        To ask for that besides takes ten times the core time, and no less time: it reads page by page.

        Args:
            start: in the range, a page.
            nbytes: how much, whole pages.
            changes: all of it will be written to, which costs a page fault for each page that is not mapped so. To a
                shared part this counts as writing.

        Raises:
            OSError: the drive refuses (``EIO``): to touch it would end the process.
        """
        for at in range(start, start + nbytes, _POPULATE_BYTES):
            part = self.address + at, min(_POPULATE_BYTES, start + nbytes - at)
            if libc.madvise(*part, POPULATE_WRITE if changes else _POPULATE_READ):
                code = ctypes.get_errno()
                if code == errno.EINVAL:
                    libc.madvise(*part, _WILLNEED)
                    continue
                code = errno.EIO if code == errno.EFAULT else code  # so the system names a touch that would be SIGBUS
                raise OSError(code, os.strerror(code))

    def read(self, fd: int, offset: int, nbytes: int, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Have bytes of a file come to the system's page cache, by showing them here for a moment, part by part.

        As fast as :meth:`bring_in`, and in large pieces, which cost less when they are mapped later; ``readahead`` and
        its like read single pages.

        Args:
            fd: of the file.
            offset: in the file, of the first byte.
            nbytes: how many.
            is_wanted: asked before each part; the rest is left where it says no.

        Raises:
            OSError: the drive refuses.
        """
        for at in range(0, nbytes, self._length):
            if not is_wanted():
                return
            part = min(self._length, nbytes - at)
            self.show(0, fd, offset + at, part)
            self._advise_huge(0, part)
            try:
                self.bring_in(0, part)
            finally:
                libc.madvise(self.address, part, _DONTNEED)  # not to be forgotten, as what has been used

    def send_out(self, start: int, nbytes: int) -> None:
        """Take a shared part out of this process; the next touch brings it back, with all that was written to it.

        The system keeps it in its page cache as long as nothing else needs the room. Of a private part, what was
        written would be lost.

        It counts as unused from then on. Else the system takes for used what was used often, and drives out first what
        was just read ahead.
        """
        libc.madvise(self.address + start, nbytes, _COLD)
        libc.madvise(self.address + start, nbytes, _DONTNEED)

    def bring_in_again(self, start: int, nbytes: int) -> None:
        """Map a shared part anew that has just been brought in, as :meth:`bring_in` does.

        That counts as another use. What was used once the system takes back as soon as another program needs room.

        Raises:
            OSError: the drive refuses.
        """
        libc.madvise(self.address + start, nbytes, _DONTNEED)
        self.bring_in(start, nbytes)

    def tensor(self, start: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
        """A dense tensor with a storage of its own over the bytes from ``start`` on. It keeps the view alive."""
        num_elements = 1
        for size in shape:
            num_elements *= size
        array = array_type(num_elements * dtype.itemsize).from_buffer(self._map, self._skipped + start)
        array.view = self  # type: ignore[attr-defined]  # for what the view keeps
        return torch.frombuffer(array, dtype=dtype).as_strided(shape, stride)


def page_out(address: int, nbytes: int) -> None:
    """Have the system take the whole pages of a range out of memory. Their bytes stay: a touch brings them back."""
    start, stop = round_up(address, PAGE_BYTES), (address + nbytes) // PAGE_BYTES * PAGE_BYTES
    if start < stop:
        libc.madvise(start, stop - start, _PAGEOUT)


def private_file_ranges() -> list[tuple[int, int]]:
    """Return where this process maps files privately: the first address, and the one after the last; [] if unknown."""
    try:
        with open("/proc/self/maps", "rb") as maps:
            lines = [line.split(None, 5) for line in maps]
    except FileNotFoundError:
        return []
    files = [addresses.split(b"-") for addresses, rights, _, _, inode, *_ in lines if inode != b"0" and b"p" in rights]
    return [(int(first, 16), int(end, 16)) for first, end in files]
