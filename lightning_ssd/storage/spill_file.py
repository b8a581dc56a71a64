"""Where offloaded bytes lie on a drive: one anonymous file per directory, cut into extents.

The file never has a name that outlives its opening, so that the kernel frees it however the process ends. It grows in
preallocated chunks and never shrinks; extents are reused, lowest offset first, so that its size stays constant once a
training step has been seen.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lightning_ssd.common.forks import OwnProcess
from lightning_ssd.errors import (
    FULL_ERRNOS,
    OffloaderClosedError,
    OutOfSpaceError,
    StorageError,
    as_storage_error,
    forget_frames,
)
from lightning_ssd.memory.file_mapping import FileView
from lightning_ssd.storage.extents import Extent, ExtentAllocator
from lightning_ssd.storage.filesystem import cannot_hold

__all__ = ["SPACE_ADVICE", "Arena", "Extent", "ExtentAllocator", "reserve_together"]

SPACE_ADVICE = "Free space there, or name other directories in HardwareProfile(paths=...)"
"""How the message of a full file system ends."""
_FIRST_GROWTH_BYTES = 64 << 20
_MAX_GROWTH_BYTES = 4 << 30
"""Preallocations after the first one are a quarter of the size, at most so much."""
_RETRY_AFTER_S = 5.0
_NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.ENOSYS})
_NO_FALLOCATE = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)
_O_TMPFILE: int = getattr(os, "O_TMPFILE", 0)

_fallocate: Any = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)


class Arena:
    """One anonymous file in ``directory`` and the allocator over it. Thread-safe; of use to the opening process only.

    Args:
        directory: where the file lies, without a name and closed to other users.
        block_bytes: granularity of extents, a multiple of what direct I/O wants.
        direct: open with ``O_DIRECT``.

    Raises:
        StorageError: if the directory or file cannot be opened.
    """

    def __init__(self, directory: str | os.PathLike[str], *, block_bytes: int, direct: bool) -> None:
        self.directory = Path(directory)
        self.block_bytes = block_bytes
        self.direct = direct
        self.is_distrusted = False
        """Whether the system may have lost bytes on their way to it."""
        self.is_sparse = False
        """Whether the file system cannot set space aside, so that it may be full when bytes come."""
        self._process = OwnProcess()
        self._extents = ExtentAllocator(block_bytes)
        self._full_until = 0.0
        self._refused_bytes = 0
        self.written_bytes = 0
        """Bytes that were written to the file, in all."""
        self._num_users = 0
        self._is_mapped = False
        self._closed = False
        # Guards allocator, growth, users and closing. A leaf lock: nothing else is locked or called under it.
        self._lock = threading.Lock()
        self._fd = _open_anonymous(self.directory, direct=direct)

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        return self._extents.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes in extents that are lent."""
        if self._process.is_here:
            with self._lock:
                self._extents.merge_returned()
        return self._extents.used_bytes

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    @property
    def fd(self) -> int:
        """The file descriptor. For transfers take :meth:`use`, which keeps it open."""
        self._check_usable()
        return self._fd

    @contextmanager
    def use(self, *, writes: int = 0) -> Iterator[int]:
        """The file descriptor for one transfer.

        ``close`` meanwhile only takes effect when the last user is done, so that a late write cannot hit another file
        that got the same number.

        Args:
            writes: bytes that count as written if the transfer does not fail.
        """
        self._check_usable()
        is_counted, written = False, 0
        try:
            with self._lock:
                self._check_usable()
                self._num_users += 1
                is_counted = True
            yield self._fd
            written = writes
        finally:
            if is_counted:
                with self._lock:
                    self.written_bytes += written
                    self._num_users -= 1
                    last = self._closed and self._num_users == 0
                if last:
                    self._release()

    def show(self, view: FileView, start: int, offset: int, nbytes: int, *, shared: bool = False) -> None:
        """Show bytes of the file from ``offset`` on, at ``start`` of a view: whole pages, even beyond :meth:`close`."""
        with self.use() as fd:
            self._is_mapped = True
            view.show(start, fd, offset, nbytes, shared=shared)

    def allocate(self, nbytes: int) -> Extent:
        """An extent of at least ``nbytes`` bytes; the file grows where needed. Zero bytes need no place in the file.

        Raises:
            OutOfSpaceError: if the file system is full. Within some seconds after that, requests that would have to
                grow the file as much again fail at once, because the attempt makes the file system search hard.
            StorageError: if growing fails otherwise, or after a fork.
            OffloaderClosedError: after close.
        """
        self._check_usable()
        if nbytes == 0:
            return Extent(0, 0)
        with self._lock:
            self._check_usable()
            extent = self._extents.allocate(nbytes)
            if extent is None:
                self._grow(nbytes)
                extent = self._extents.allocate(nbytes)
        if extent is None:
            raise StorageError(
                f"growing {self.directory} for {nbytes} bytes gave no extent; please report this as a bug"
            )
        return extent

    def allocate_all(self, sizes: Sequence[int]) -> list[Extent] | None:
        """Lend one extent for each size, side by side; ``None``: the file has no such room yet."""
        self._check_usable()
        with self._lock:
            self._check_usable()
            return self._extents.allocate_all(sizes)

    def reserve(self, nbytes: int) -> None:
        """Let the file have at least ``nbytes`` bytes from now on, so that as many will not be refused later.

        Raises:
            OutOfSpaceError: the file system has not so many.
            StorageError: if growing fails otherwise, or after a fork.
            OffloaderClosedError: after close.
        """
        self._check_usable()
        with self._lock:
            self._check_usable()
            missing = self._extents.round_up(nbytes) - self.size_bytes if nbytes else 0
            if missing > 0 and not self._preallocate(missing):
                raise self._out_of_space(missing)
            if missing > 0:
                self._extents.grow(missing)

    def reserve_more(self, nbytes: int) -> None:
        """Let the file have up to ``nbytes`` bytes more, as many as there are left. Raises as :meth:`reserve`."""
        self._check_usable()
        with self._lock:
            self._check_usable()
            facts = os.fstatvfs(self._fd)
            left = self._extents.round_up(nbytes) if nbytes > 0 else 0
            step = min(left, facts.f_bavail * facts.f_frsize // self.block_bytes * self.block_bytes)
            while step:  # what is free cannot all be had: some of it is for the list of blocks, or beyond a quota
                if self._preallocate(step):
                    self._extents.grow(step)
                    left -= step
                step = min(left, step // 2 // self.block_bytes * self.block_bytes)

    def free(self, *extents: Extent) -> None:
        """Take extents back. Never waits; harmless after close and in a forked child.

        Raises:
            ValueError: if one is not lent: freed twice, or from another arena.
        """
        if not self._closed and self._process.is_here:
            self._extents.free(*[extent for extent in extents if extent.nbytes])

    def close(self) -> None:
        """Give file and space back to the system. Idempotent; takes effect when the last transfer is done."""
        if not self._process.is_here:
            # The lock may have been taken by another thread at the fork: it is never released in this process.
            if not self._closed:
                self._closed = True
                self._close_file()
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            last = self._num_users == 0
        if last:
            self._release()

    def _check_usable(self) -> None:
        if self._closed:
            raise OffloaderClosedError(
                f"the spill file in {self.directory} is closed; open the offloader again to use it"
            )
        if not self._process.is_here:
            raise StorageError(
                f"the spill file in {self.directory} was opened by process {self._process.pid} and cannot be shared "
                f"with its child {os.getpid()}: both would hand out the same extents. Open the offloader after the fork"
            )

    def _release(self) -> None:
        if not self._is_mapped and self._process.is_here:
            # Forked processes (workers of a DataLoader) have the file open too, and would keep its space.
            with suppress(OSError):
                os.ftruncate(self._fd, 0)
        self._close_file()

    def _close_file(self) -> None:
        try:
            os.close(self._fd)
        except OSError as error:
            # A network file system that has gone says so here, too. The descriptor is closed all the same, its bytes
            # were not to outlive it; raised, this would hide the failed read that the caller has to hear of.
            if error.errno == errno.EBADF:
                raise

    def _grow(self, nbytes: int) -> None:
        need = self._extents.round_up(nbytes) - self._extents.tail_free_bytes
        resting = time.monotonic() < self._full_until
        if resting and 0 < self._refused_bytes <= need:
            raise self._out_of_space(need)
        for step in self._growth_steps(need, resting=resting):
            if self._preallocate(step):
                self._extents.grow(step)
                return
            self._full_until = time.monotonic() + _RETRY_AFTER_S
            self._refused_bytes = 0
        self._refused_bytes = need
        raise self._out_of_space(need)

    def _growth_steps(self, need: int, *, resting: bool) -> list[int]:
        """Return what to try: a comfortable chunk first, unless that would take most of what others have left."""
        chunk = self._extents.round_up(min(max(_FIRST_GROWTH_BYTES, self.size_bytes // 4), _MAX_GROWTH_BYTES))
        facts = os.fstatvfs(self._fd)
        if resting or chunk <= need or chunk > facts.f_bavail * facts.f_frsize // 2:
            return [need]
        return [chunk, need]

    def _preallocate(self, nbytes: int) -> bool:
        """Reserve ``nbytes`` behind the end; ``False`` where the file system is full."""
        size = self.size_bytes
        try:
            self.is_sparse = not _reserve(self._fd, size, nbytes) or self.is_sparse
        except OSError as error:
            # A refused reservation may have been granted in part.
            os.ftruncate(self._fd, size)
            if error.errno in FULL_ERRNOS:
                return False
            raise as_storage_error(
                error, f"cannot grow the spill file in {self.directory} by {nbytes:,} bytes"
            ) from error
        return True

    def _out_of_space(self, need: int) -> OutOfSpaceError:
        facts = os.fstatvfs(self._fd)
        return OutOfSpaceError(
            errno.ENOSPC,
            f"the file system of {self.directory} is full: {need:,} more bytes are needed, "
            f"{facts.f_bavail * facts.f_frsize:,} are free, the spill file has {self.size_bytes:,}. " + SPACE_ADVICE,
        )


def reserve_together(arenas: Sequence[Arena], nbytes: int, what: str) -> None:
    """Let files have at least ``nbytes`` bytes together, in equal parts where each directory has room.

    What a directory has no room for is reserved in the others, which get the writes that the former refuses.

    Args:
        arenas: the files, in one directory each.
        nbytes: in all of them.
        what: needs them, for the message.

    Raises:
        OutOfSpaceError: all directories together have no room. What was reserved stays.
    """
    refusal: OutOfSpaceError | None = None
    for arena in arenas:
        try:
            arena.reserve(-(-nbytes // len(arenas)))
        except OutOfSpaceError as error:
            forget_frames(error)  # they hold what is to be written
            refusal = refusal or error
    if refusal is None:
        return
    for arena in arenas:
        arena.reserve_more(nbytes - sum(one.size_bytes for one in arenas))
    if (missing := nbytes - sum(arena.size_bytes for arena in arenas)) > 0:
        raise OutOfSpaceError(
            refusal.errno, f"{what} need {nbytes:,} bytes; {missing:,} of them have no place: {refusal}"
        ) from refusal


def _reserve(fd: int, offset: int, nbytes: int) -> bool:
    """``fallocate``, else a sparse file (``False``).

    Not ``os.posix_fallocate``: glibc emulates it by writing into every block.
    """
    while _fallocate is not None:
        if _fallocate(fd, 0, ctypes.c_int64(offset), ctypes.c_int64(nbytes)) == 0:
            return True
        code = ctypes.get_errno()
        if code in _NO_FALLOCATE:
            break
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    os.ftruncate(fd, offset + nbytes)
    return False


def _open_anonymous(directory: Path, *, direct: bool) -> int:
    """Open a new file without a name in a directory: by ``O_TMPFILE``, else with one that is unlinked at once."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (_O_DIRECT if direct else 0)
    try:
        folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return _create(folder, flags)
        finally:
            os.close(folder)
    except OSError as error:
        raise cannot_hold(directory, error) from error


def _create(folder: int, flags: int) -> int:
    if _O_TMPFILE:
        try:
            return os.open(".", flags | _O_TMPFILE, 0o600, dir_fd=folder)
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
    name = f".lightning_ssd-{secrets.token_hex(16)}"  # which no other user can foresee
    try:
        return os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
    finally:
        # Also on failure: where O_DIRECT is refused the file may have been created all the same.
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
