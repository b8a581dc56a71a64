"""Files of the user that frozen weights were mapped from, and wait in, as they are: nothing is copied, or written.

A weight gets a private mapping of its own of the same bytes of the same file, at the same place within a page, so that
kernels find it aligned as before. Its pages leave and come as those of our own files do, with two differences:

* What the program writes to it becomes pages of this process. They have no place in the file: from then on all pages of
  this weight stay.
* Others may change the file. Its size and times are looked at before each read and after each backward.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from lightning_ssd.common.tensors import Region
from lightning_ssd.errors import CorruptionError, StorageError, copy_of
from lightning_ssd.memory.file_mapping import FileView
from lightning_ssd.memory.mmap import PAGE_BYTES
from lightning_ssd.memory.page_table import has_copies
from lightning_ssd.parameters.files.file_slices import FileSlices, private_mapping
from lightning_ssd.parameters.files.mapped_storage import MappedStorage, is_mapped
from lightning_ssd.tiers.checksum import checksum

__all__ = ["SourceFiles", "SourceStorage"]

_log = logging.getLogger(__name__)
_TICK_S = 0.02
"""A file's times may be so coarse: two changes within one are one."""


class SourceFile:
    """One file, open for reading.

    Args:
        fd: of it, ours from now on.
        path: for messages.
    """

    def __init__(self, fd: int, path: Path) -> None:
        self.fd = fd
        self.path = path
        self.error: StorageError | None = None
        self.has_told = False
        self.num_users = 0
        self.is_left = False
        """Whether the last of them has gone."""
        self._state = _State.of(fd)

    @property
    def is_used(self) -> bool:
        """Whether weights wait in it, or something has gone wrong with one that did."""
        return self.num_users > 0 or self.error is not None

    def look(self) -> None:
        """See whether it is what it was.

        Raises:
            StorageError: weights in it may have other values, so that training must not go on.
        """
        state = _State.of(self.fd)
        if state.num_names != self._state.num_names and state.written == self._state.written:
            self._state = state  # it got another name, or lost one, which changes the time, too
        if self.error is None and state != self._state:
            self.error = StorageError(
                errno.ESTALE,
                f"{self.path} was changed while frozen weights wait in it (expected {self._state}, got {state}), so "
                "that they may have other values; go on from a checkpoint, and leave the file alone or give the "
                "weights memory of their own: weight.data = weight.data.clone()",
            )
        if self.error is not None:
            raise copy_of(self.error)


class _State(NamedTuple):
    """The facts that show whether a file was changed."""

    written: tuple[int, int]
    """Size, and when it was written last."""
    changed_ns: int
    num_names: int

    @classmethod
    def of(cls, fd: int) -> _State:
        found = os.fstat(fd)
        return cls((found.st_size, found.st_mtime_ns), found.st_ctime_ns, found.st_nlink)


class SourceStorage(MappedStorage):
    """In a file of the user's.

    Args:
        source: the file.
        offset: in the file.
        nbytes: of the storage.
        verify: bytes that were read are compared with those that there are now.
    """

    def __init__(self, source: SourceFile, offset: int, nbytes: int, *, verify: bool) -> None:
        start = offset % PAGE_BYTES
        view = FileView(start + nbytes, offset=offset - start)
        super().__init__(view, start, nbytes)
        view.show(0, source.fd, offset - start, self._shown_bytes)
        self._source = source
        self._offset = offset
        self._region = Region(view.address + start, nbytes)
        self._is_written = False
        self._checksum: int | None = None
        source.num_users += 1
        if verify:
            self.bring_in()
            self._checksum = checksum(self._region)
            self.send_out()

    def bring_in(self) -> None:
        """Also see whether the file is what it was."""
        view = self._view  # held until its bytes have been looked at: it may be forgotten meanwhile
        if view is None:
            return
        self._source.look()
        super().bring_in()
        if self._checksum is None or self._is_written:
            return
        if checksum(self._region) != self._checksum and not self._is_edited(view):
            self._source.error = CorruptionError(
                errno.EIO,
                f"{self._source.path} has given back other bytes from offset {self._offset} on ({self.nbytes:,} bytes) "
                "than before, and its times have not changed; go on from a checkpoint, with another drive",
            )
            raise copy_of(self._source.error)

    def read(self, scratch: FileView, is_wanted: Callable[[], bool]) -> None:
        scratch.read(self._source.fd, self._offset - self.start, self._shown_bytes, is_wanted)

    def send_out(self) -> None:
        view = self._view
        try:
            if view is None or self._is_edited(view):
                return
        except OSError:  # the system does not tell of pages, out of file descriptors, say: they can go a use later
            return
        if not view.send_out_unwritten(0, self._shown_bytes):
            self._source.error = StorageError(
                errno.EIO,
                f"a frozen weight in {self._source.path} was edited by one thread while another one sent it out, so "
                "that edits may be lost; edit it between steps, or give it memory of its own: "
                "weight.data = weight.data.clone()",
            )

    def _is_edited(self, view: FileView) -> bool:
        if not self._is_written and has_copies(view.address, self._shown_bytes):
            self._is_written = True
            if not self._source.has_told:
                self._source.has_told = True
                _log.warning(
                    "a frozen weight that is read in place from %s was edited; it and others that are stay in memory",
                    self._source.path,
                )
        return self._is_written

    def forget(self) -> None:
        """Also see, for the last time, whether the file is what it was: another program may have copied the weight."""
        if self._view is not None:
            super().forget()
            with contextlib.suppress(OSError):  # the source keeps a StorageError for the next look
                self._source.look()
            self._source.num_users -= 1
            self._source.is_left = self._source.num_users == 0

    def make_private(self) -> None:
        """It is."""

    def hide(self) -> None:
        """A fork has its own: what the parent writes is the parent's."""


class SourceFiles:
    """Hold the user's files that weights of one offloader wait in."""

    def __init__(self, *, verify: bool = False) -> None:
        self._verify = verify
        self._files: dict[tuple[int, int], SourceFile] = {}

    def show(self, storage: torch.UntypedStorage, slices: FileSlices | None) -> SourceStorage | None:
        """Memory that shows the same bytes of the same file; ``None``: there is none, see :meth:`find`.

        Raises:
            MemoryError: the system cannot map so much.
            OSError: the drive refuses to read it, which is done only to verify it later.
        """
        found = self.find(storage, slices)
        return None if found is None else SourceStorage(*found, storage.nbytes(), verify=self._verify)

    def find(self, storage: torch.UntypedStorage, slices: FileSlices | None) -> tuple[SourceFile, int] | None:
        """Return the file, and where in it a storage shows a part as it is; ``None``: none, or it was written to."""
        address, nbytes = storage.data_ptr(), storage.nbytes()
        mapping = slices.mapping if slices is not None else private_mapping(address) if is_mapped(storage) else None
        offset = None if mapping is None else mapping.offset_of(address, nbytes)
        if mapping is None or offset is None:
            return None
        try:
            source = self._open(mapping.path, (mapping.device, mapping.inode))
            return None if source is None or has_copies(address, nbytes) else (source, offset)
        except OSError:  # the file has gone, or may not be read, or the system does not tell of pages: it is written
            return None

    def _open(self, path: Path, identity: tuple[int, int]) -> SourceFile | None:
        known = self._files.get(identity)
        if known is not None and (known.is_used or not known.is_left):
            return known
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if known is None else known.fd
        found = os.fstat(fd)
        if known is None and (found.st_dev, found.st_ino) != identity:
            os.close(fd)
            return None
        time.sleep(2 * _TICK_S)  # else a change right after one a moment ago would not be seen
        self._files[identity] = SourceFile(fd, path)
        return self._files[identity]

    def look(self) -> None:
        """See whether all that weights wait in are what they were.

        Raises:
            StorageError: one is not, or was not when the last weight left it.
        """
        for source in self._files.values():
            if source.is_used:
                source.look()

    def close(self) -> None:
        """Close the files. Mappings of them stay. Idempotent."""
        with contextlib.ExitStack() as closing:  # all of them, should one refuse
            while self._files:
                closing.callback(os.close, self._files.popitem()[1].fd)
