"""The posix backend: ``pwritev`` and ``preadv`` on tensor memory, past the page cache where the file system can."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_ssd.common.profiling import spanned
from lightning_ssd.common.tensors import Region
from lightning_ssd.errors import ShortTransferError, StorageError, as_storage_error
from lightning_ssd.memory.mmap import PAGE_BYTES
from lightning_ssd.memory.pools import StagingPool
from lightning_ssd.storage.backend import DEFAULT_CHUNK_BYTES, Verb
from lightning_ssd.storage.filesystem import DirectAlignment, direct_alignment
from lightning_ssd.storage.spill_file import Arena

__all__ = ["PosixBackend"]

_MAX_IDLE_CALLS = 3
_SYNC_RANGE_FULLY = 1 | 2 | 4  # SYNC_FILE_RANGE_WAIT_BEFORE | WRITE | WAIT_AFTER of linux/fs.h
_NO_SYNC_RANGE = frozenset({errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP})
_sync_file_range: Any = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)


class PosixBackend:
    """``O_DIRECT`` where every directory's file system has it, else through the page cache.

    Note [page cache]: a buffered write only returns when its range is on the drive and out of the cache. So an error
    reaches the transfer that made it, and the cache (which counts in a container's limit) holds no more than what is
    in flight. The kernel reports a failed write-back once per file, perhaps to another range's caller: from then on
    nothing in that file is trusted.

    Args:
        directories: looked at, and written to for a proof, at once; each needs to exist.
        direct: ``False`` uses the page cache although the file system has direct I/O.
    """

    register = None

    def __init__(self, directories: Sequence[str | os.PathLike[str]], *, direct: bool = True) -> None:
        self._staging = StagingPool()  # for addresses that direct I/O cannot take
        self.memory_alignment = 1
        self.block_bytes = PAGE_BYTES
        self._direct = direct
        refusals = [text for directory in directories if (text := self._try_direct(Path(directory)))] if direct else []
        if refusals:  # one may have been found before another refused
            self._direct, self.memory_alignment, self.block_bytes = False, 1, PAGE_BYTES
        self.name = "posix O_DIRECT" if self._direct else "posix page cache"
        self.why = "; ".join(refusals) or (
            f"memory aligned to {self.memory_alignment}, blocks of {self.block_bytes} bytes"
            if direct
            else "direct I/O is switched off"
        )

    def open_arena(self, directory: Path) -> Arena:
        arena = Arena(directory, block_bytes=self.block_bytes, direct=self._direct)
        if not self._direct:
            # Read-ahead would fetch the extents behind the one that is wanted, and leave them in the cache.
            with suppress(AttributeError, OSError):
                os.posix_fadvise(arena.fd, 0, 0, os.POSIX_FADV_RANDOM)
        return arena

    @spanned("lightning_ssd::write")
    def write(self, arena: Arena, region: Region, offset: int) -> None:
        self._move("write", arena, region, offset)

    @spanned("lightning_ssd::read")
    def read(self, arena: Arena, region: Region, offset: int) -> None:
        self._move("read", arena, region, offset)

    def close(self) -> None:
        self._staging.close()

    # -- what the file system takes ----------------------------------------------------------------------------

    def _try_direct(self, directory: Path) -> str | None:
        """Find the directory's alignment and prove it; say what is wrong where direct I/O does not work."""
        try:
            arena = Arena(directory, block_bytes=PAGE_BYTES, direct=True)
        except StorageError as error:
            if error.errno == errno.EINVAL:
                return f"{directory}: the file system refuses O_DIRECT"
            raise
        try:
            with arena.use() as fd:
                told = direct_alignment(fd)
                if told is None:
                    return f"{directory}: the file system has no direct I/O"
                for wanted in (told, DirectAlignment(PAGE_BYTES, max(PAGE_BYTES, told.offset))):
                    block = max(wanted.offset, PAGE_BYTES)
                    if self._proves(fd, directory, wanted.memory, block):
                        self.memory_alignment = max(self.memory_alignment, wanted.memory)
                        self.block_bytes = max(self.block_bytes, block)
                        return None
                return f"{directory}: direct I/O was promised but does not work"
        finally:
            arena.close()

    def _proves(self, fd: int, directory: Path, alignment: int, block: int) -> bool:
        """Whether a block goes to the file and back at an address that has no more than this alignment."""
        with self._staging.lease(3 * block + 2 * PAGE_BYTES) as buffer:
            written = Region(buffer.data_ptr() + alignment % PAGE_BYTES, block)
            read = Region(written.address + 2 * block + PAGE_BYTES, block)
            pattern = os.urandom(block)
            ctypes.memmove(written.address, pattern, block)
            try:
                _transfer("write", fd, written, 0, block)
                _transfer("read", fd, read, 0, block)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    return False
                raise as_storage_error(error, f"a first write and read of one block in {directory} failed") from error
            finally:
                os.ftruncate(fd, 0)
            return ctypes.string_at(read.address, block) == pattern

    # -- moving ------------------------------------------------------------------------------------------------

    def _move(self, verb: Verb, arena: Arena, region: Region, offset: int) -> None:
        if region.nbytes == 0:
            return
        if offset % self.block_bytes or region.nbytes % self.block_bytes:
            raise ValueError(
                f"a {verb} of {region.nbytes} bytes at offset {offset}; give multiples of {self.block_bytes}"
            )
        if arena.is_distrusted:
            raise StorageError(
                errno.EIO,
                f"the system lost bytes on their way from the page cache to {arena.directory} and does not say which; "
                "nothing from this file is used any more. Check the drive, or take another directory",
            )
        with arena.use(writes=region.nbytes if verb == "write" else 0) as fd:
            try:
                if arena.direct and region.address % max(PAGE_BYTES, self.memory_alignment):
                    self._move_unaligned(verb, fd, region, offset)
                else:
                    _transfer(verb, fd, region, offset, self.block_bytes)
                if not arena.direct:
                    self._leave_cache(fd, arena, region.nbytes, offset, wrote=verb == "write")
            except OSError as error:
                if isinstance(error, StorageError) and not isinstance(error, ShortTransferError):
                    raise
                what = (
                    f"cannot {verb} {region.nbytes:,} bytes at offset {offset:,} of the spill file in {arena.directory}"
                )
                if isinstance(error, ShortTransferError):
                    raise ShortTransferError(error.errno, f"{what}: {error.strerror}") from error
                raise as_storage_error(error, what) from error

    def _move_unaligned(self, verb: Verb, fd: int, region: Region, offset: int) -> None:
        """Move memory without a copy where the drive takes its address, which it may say and not keep."""
        if region.address % self.memory_alignment == 0:
            try:
                _transfer(verb, fd, region, offset, self.block_bytes)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        self._move_staged(verb, fd, region, offset)

    def _move_staged(self, verb: Verb, fd: int, region: Region, offset: int) -> None:
        step = DEFAULT_CHUNK_BYTES
        with self._staging.lease(min(region.nbytes, step)) as buffer:
            for done in range(0, region.nbytes, step):
                part = Region(buffer.data_ptr(), min(step, region.nbytes - done))
                if verb == "write":
                    ctypes.memmove(part.address, region.address + done, part.nbytes)
                _transfer(verb, fd, part, offset + done, self.block_bytes)
                if verb == "read":
                    ctypes.memmove(region.address + done, part.address, part.nbytes)

    def _leave_cache(self, fd: int, arena: Arena, nbytes: int, offset: int, *, wrote: bool) -> None:
        """See Note [page cache]."""
        if wrote:
            try:
                _write_back(fd, nbytes, offset)
            except OSError:
                arena.is_distrusted = True
                raise
        # Advice only: the data is safe where it is refused.
        with suppress(AttributeError, OSError):
            os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def _write_back(fd: int, nbytes: int, offset: int) -> None:
    """Wait until the range is on the drive. Unlike ``fdatasync`` this leaves other transfers' ranges alone."""
    while _sync_file_range is not None:
        if _sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(nbytes), _SYNC_RANGE_FULLY) == 0:
            return
        code = ctypes.get_errno()
        if code in _NO_SYNC_RANGE:
            break
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    os.fdatasync(fd)


def _transfer(verb: Verb, fd: int, region: Region, offset: int, block: int) -> None:
    """Move all of a region, in as many calls as the system needs (one, as a rule; at most 2 GiB each).

    After a short call it goes on at the last whole block, since direct I/O takes no other offset. EINTR is
    retried by ``os`` itself.
    """
    view = region.view()
    done = idle = 0
    while done < region.nbytes:
        move = os.pwritev if verb == "write" else os.preadv
        moved = move(fd, [view[done:]], offset + done)
        if done + moved == region.nbytes:
            return
        whole = moved - moved % block
        idle = 0 if whole else idle + 1
        if idle == _MAX_IDLE_CALLS or (moved == 0 and verb == "read"):
            raise ShortTransferError(
                errno.EIO, f"{done + moved:,} bytes moved, then no more; the file ends there or the drive fails"
            )
        done += whole
