"""The memory of weights and gradients that shows a part of a file, so that its pages come and go.

A touch finds the bytes, brought in by the system if need be; what is written to it is kept.
"""

from __future__ import annotations

import ctypes
import errno
import io
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from lightning_ssd.common.interrupts import deferring_interrupts
from lightning_ssd.common.rounding import round_up
from lightning_ssd.common.tensors import Region, StorageKey, storage_of
from lightning_ssd.errors import StorageError, as_storage_error
from lightning_ssd.memory.file_mapping import FileView
from lightning_ssd.memory.mmap import PAGE_BYTES, libc
from lightning_ssd.storage.spill_file import Arena, Extent

__all__ = [
    "ByteRange",
    "MappedStorage",
    "Stripe",
    "free_stripes",
    "is_mapped",
    "mapped_storage_of",
    "reading",
    "write_refusal",
]

_WAIT_BEFORE, _WRITE = 1, 2  # SYNC_FILE_RANGE_WAIT_BEFORE and SYNC_FILE_RANGE_WRITE
_sync_file_range: Callable[..., int] = libc.sync_file_range

ByteRange = tuple[int, int]
"""First byte of some of a storage, and how many they are."""
_mapped: dict[int, tuple[StorageKey, weakref.ref[MappedStorage]]] = {}
"""All that there are in this process, open or not, by the address of their storages."""
_never_private: list[MappedStorage] = []


def is_mapped(storage: torch.UntypedStorage) -> bool:
    """Whether the memory of a storage is one of ours that shows a file, also of an offloader that is closed."""
    return storage._cdata in _mapped


def _after_fork() -> None:
    """A fork has no copy of its own, and the parent goes on to write to the file: nothing may be read there."""
    for _, reference in _mapped.values():
        mapped = reference()
        if mapped is not None:
            mapped.hide()


os.register_at_fork(after_in_child=_after_fork)


class Stripe(NamedTuple):
    """Some of a storage, in the file of one directory."""

    drive: int
    """Number of the directory."""
    arena: Arena
    extent: Extent
    start: int
    """Where in what is shown it begins."""
    nbytes: int


def free_stripes(stripes: Sequence[Stripe]) -> None:
    """Give back the places in the files."""
    for stripe in stripes:
        stripe.arena.free(stripe.extent)


class MappedStorage:
    """One storage whose memory shows parts of files of ours, so that its pages may leave and come back at any moment.

    A touch finds the bytes. The mapping is shared with the files: what is written to the memory goes there, also
    through a view.

    Args:
        stripes: where the bytes are, in order. They are the storage's once it is made.
        nbytes: of the storage.
        start: where in the first stripe it begins.

    Raises:
        MemoryError: the system cannot show so much, or so many stripes.
    """

    key: StorageKey

    def __init__(self, stripes: Sequence[Stripe], nbytes: int, *, start: int = 0) -> None:
        self.nbytes = nbytes
        self.start = start
        self.stripes = stripes
        self._length = sum(stripe.nbytes for stripe in stripes)
        self._view: FileView | None = FileView(self._length, offset=stripes[0].extent.offset)
        for stripe in stripes:
            stripe.arena.show(self._view, stripe.start, stripe.extent.offset, stripe.nbytes, shared=True)
        self._fds = [stripe.arena.fd for stripe in stripes]  # a forked child has them too, and may not ask the arenas
        # _stays: no page leaves any more. _is_private: nor is anything written to the files.
        self._is_private = self._stays = False
        # Guards that it becomes private against a thread that takes pages out. A leaf lock.
        self._sharing = threading.RLock()

    def show(self) -> torch.UntypedStorage:
        """A storage over the memory, to which :attr:`key` refers weakly from then on.

        Again only when the last one is held no more.
        """
        if self._view is None:
            raise RuntimeError("its place in the file was given back")
        storage = self._view.tensor(self.start, torch.uint8, (self.nbytes,), (1,)).untyped_storage()
        self.key = StorageKey(storage)
        for cdata, (key, _) in list(_mapped.items()):
            if not key.alive():
                _mapped.pop(cdata, None)
        _mapped[self.key.cdata] = self.key, weakref.ref(self)
        return storage

    def _pages(self, part: ByteRange | None) -> tuple[int, int]:
        """Where in the stripes the pages of a part (``None``: of all) begin, and how long they are together."""
        if part is None:
            return 0, self._length
        start = self.start + part[0]
        first = start // PAGE_BYTES * PAGE_BYTES
        return first, round_up(start + part[1], PAGE_BYTES) - first

    def _within(self, start: int, nbytes: int) -> Iterator[tuple[Stripe, int, int]]:
        """Yield the stripes that have some of these bytes: where in the file, and how many."""
        for stripe in self.stripes:
            begin, end = max(start, stripe.start), min(start + nbytes, stripe.start + stripe.nbytes)
            if begin < end:
                yield stripe, stripe.extent.offset + begin - stripe.start, end - begin

    def read(
        self,
        drive: int | None,
        scratch: FileView,
        is_wanted: Callable[[], bool] = lambda: True,
        part: ByteRange | None = None,
    ) -> None:
        """Have what lies in one directory come to the system's page cache alone. Blocks.

        Args:
            drive: number of the directory; ``None``: in all.
            scratch: shows them meanwhile, piece by piece.
            is_wanted: asked before each piece; the rest is left where it says no.
            part: which of them; ``None``: all.

        Raises:
            OSError: the drive refuses.
        """
        for stripe, offset, length in self._within(*self._pages(part)):
            if drive in (None, stripe.drive) and not self._is_private:
                with stripe.arena.use() as fd:
                    scratch.read(fd, offset, length, is_wanted)

    def bring_in(self, part: ByteRange | None = None, *, changes: bool = False, to_stay: bool = False) -> None:
        """Read what is not in memory, and map it. Blocks.

        Args:
            part: which bytes, and the rest of their pages; ``None``: all.
            changes: all of them will be written to.
            to_stay: the system takes them back late, although they were not used yet.

        Raises:
            OSError: the drive refuses.
        """
        view, pages = self._view, self._pages(part)  # once: another thread may forget the view meanwhile
        if view is None or (changes and self._is_private):
            return
        view.bring_in(*pages, changes=changes)
        if to_stay:
            with self._sharing:
                if self._view is not None and not self._stays:
                    view.bring_in_again(*pages)

    def send_out(self, part: ByteRange | None = None) -> None:
        """Take pages out of this process, unless something would be lost."""
        if self._stays:  # what was written would be lost; or as in a fork, see make_private
            return
        with self._sharing:
            view = self._view
            if view is not None and not self._stays:
                view.send_out(*self._pages(part))

    def begin_writing(self, part: ByteRange) -> None:
        """Have the system begin to write some bytes, and the rest of their pages, to the drive.

        Seldom waits: where the drive has as much to do as it takes.
        """
        for stripe, offset, length in self._within(*self._pages(part)):
            if not self._is_private:
                with stripe.arena.use() as fd:
                    _begin_writing(fd, offset, length)

    def make_private(self) -> None:
        """Keep later writes to the memory in this process: no page leaves, and nothing is written to the file.

        Idempotent. Where the system allows no more private memory, it stays as it is, which is as good, but for a fork.
        """
        if self._is_private:  # as in a fork, in which no thread gives the lock back
            return
        with self._sharing:
            if self._view is None or self._stays:
                return
            self._stays = True  # first: if only some stripes become private, what is written to these is not lost
            try:
                for stripe, fd in zip(self.stripes, self._fds, strict=True):
                    self._view.show(stripe.start, fd, stripe.extent.offset, stripe.nbytes)
            except MemoryError:
                _never_private.append(self)  # so that a fork is kept from it
                return
            self._is_private = True

    def hide(self) -> None:
        """In a fork: hide what the parent writes, if it still may."""
        if self._view is not None and not self._is_private:
            self._is_private = self._stays = True
            self._view.hide()

    def fill(self, region: Region) -> None:
        """Replace the bytes by those of other memory, through the system's page cache: what is written over is not read
        before, as touching its pages would. It must not be looked at meanwhile.

        The system begins to write them at once. Else they would fill its page cache until it looks for room there, and
        drive out what was read ahead.

        Raises:
            StorageError: the system refuses. The bytes are of no use then.
        """
        done = 0
        for stripe, offset, nbytes in self._within(self.start, region.nbytes):
            with stripe.arena.use(writes=nbytes) as direct:
                try:
                    # Opened again for the page cache: the arena's own descriptor may go around it, which wants other
                    # addresses. By an object, which closes the file if an interrupt comes before it is held.
                    with io.FileIO(f"/proc/self/fd/{direct}", "r+") as again:
                        left, to = Region(region.address + done, nbytes).view(), offset
                        while left:
                            count = os.pwrite(again.fileno(), left, to)
                            left, to = left[count:], to + count
                    _begin_writing(direct, offset, nbytes)
                except OSError as error:
                    way = "" if error.filename is None else f" by {error.filename}"
                    what = f"a weight or gradient could not be written to {stripe.arena.directory}{way}"
                    raise as_storage_error(error, what) from error
            done += nbytes

    def forget(self) -> None:
        """Unmap the memory of a storage that is held no more, then give its place in the file back. Idempotent."""
        with deferring_interrupts():
            if self._view is not None:  # else it was, and another storage may have the place by now
                self._view = None
                free_stripes(self.stripes)


def mapped_storage_of(tensor: torch.Tensor) -> MappedStorage | None:
    """Return what shows the memory of a tensor in a file of ours; ``None``: it lies elsewhere."""
    if tensor.layout is not torch.strided:
        return None
    try:
        entry = _mapped.get(storage_of(tensor)._cdata)
    except (NotImplementedError, RuntimeError):  # it has no storage
        return None
    return None if entry is None else entry[1]()


def _begin_writing(fd: int, offset: int, nbytes: int) -> None:
    """Have the system begin to write a part of a file; does not wait for the end.

    A hint: what the drive refuses is told where it is waited for (:func:`write_refusal`, ``fdatasync``).
    """
    _sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(nbytes), _WRITE)


def write_refusal(fd: int) -> OSError | None:
    """Wait for what is being written of a file now, and return what the drive has refused since the last call."""
    failed = _sync_file_range(fd, ctypes.c_int64(0), ctypes.c_int64(0), _WAIT_BEFORE)
    return OSError(ctypes.get_errno(), "") if failed else None


@contextmanager
def reading(what: str, nbytes: int) -> Iterator[None]:
    """Have the error of a drive that refuses to read say what of."""
    try:
        yield
    except StorageError:  # it says all
        raise
    except OSError as refusal:
        raise StorageError(
            refusal.errno or errno.EIO,
            f"{what} ({nbytes:,} bytes) could not be read from its drive: "
            f"{os.strerror(refusal.errno or errno.EIO)}; training cannot go on without it. Go on from a checkpoint, "
            "with another drive",
        ) from refusal
