"""The common part of backends over NVIDIA's libraries: each move is one call, which tells how many bytes it moved."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_ssd.common.profiling import spanned
from lightning_ssd.common.tensors import Region
from lightning_ssd.errors import BackendUnavailableError, ShortTransferError, StorageError, as_storage_error
from lightning_ssd.memory.mmap import PAGE_BYTES
from lightning_ssd.storage.backend import Verb
from lightning_ssd.storage.spill_file import Arena

__all__ = ["OR_POSIX", "LibraryBackend"]

OR_POSIX = 'or use HardwareProfile(backend="posix")'
"""How the messages of a library that does not work end."""


class LibraryBackend(ABC):
    """Moves bytes by calls of a library, which has opened each arena's file too."""

    memory_alignment = 1
    block_bytes = PAGE_BYTES
    opens_direct = False
    """Whether the library wants files that are open with ``O_DIRECT``."""
    errors: tuple[type[Exception], ...] = (OSError,)
    """Types of its errors."""
    name: str
    why: str
    """Why this way is taken, for reports."""
    register: Callable[[Region], Callable[[], object]] | None = None

    @abstractmethod
    def open_file(self, fd: int) -> Any:
        """Return the library's own handle of an open file."""

    @abstractmethod
    def close_file(self, file: Any) -> None:
        """Let go of a handle."""

    @abstractmethod
    def _call(self, verb: Verb, file: Any, region: Region, offset: int) -> int:
        """Move bytes by one call; return how many it has moved."""

    def open_arena(self, directory: Path) -> Arena:
        return _LibraryArena(directory, self)

    def close(self) -> None:  # noqa: B027
        pass

    @spanned("lightning_ssd::write")
    def write(self, arena: Arena, region: Region, offset: int) -> None:
        self._move("write", arena, region, offset)

    @spanned("lightning_ssd::read")
    def read(self, arena: Arena, region: Region, offset: int) -> None:
        self._move("read", arena, region, offset)

    def _move(self, verb: Verb, arena: Arena, region: Region, offset: int) -> None:
        if region.nbytes == 0:
            return
        if not isinstance(arena, _LibraryArena) or arena.backend is not self:
            raise StorageError(
                f"{arena.directory} was opened by another backend; open arenas with the one that uses them"
            )
        what = f"cannot {verb} {region.nbytes:,} bytes at offset {offset:,} of the spill file in {arena.directory}"
        if offset + region.nbytes > arena.size_bytes:
            raise ShortTransferError(errno.EIO, f"{what}: the file has {arena.size_bytes:,} bytes")
        with arena.use(writes=region.nbytes if verb == "write" else 0):
            try:
                moved = self._call(verb, arena.file, region, offset)
            except self.errors as error:
                raise as_storage_error(_as_os_error(error), f"{what} ({self.name})") from error
            if moved != region.nbytes:
                raise ShortTransferError(errno.EIO, f"{what} ({self.name}): {moved:,} bytes moved")


class _LibraryArena(Arena):
    """An arena whose file the library has open too: by descriptor, since it has no name."""

    file: Any = None

    def __init__(self, directory: Path, backend: LibraryBackend) -> None:
        super().__init__(directory, block_bytes=PAGE_BYTES, direct=backend.opens_direct)
        self.backend = backend
        try:
            self.file = backend.open_file(self.fd)
        except backend.errors as error:
            self.close()
            why = _as_os_error(error).strerror
            raise BackendUnavailableError(
                f"{backend.name} takes no file in {directory} ({why}); name another directory, {OR_POSIX}"
            ) from error

    def _release(self) -> None:
        try:
            if self.file is not None:
                self.backend.close_file(self.file)
        finally:
            super()._release()


def _as_os_error(error: Exception) -> OSError:
    """Return an error of a library as the system's, with a number and a text."""
    return OSError(getattr(error, "errno", None) or errno.EIO, getattr(error, "strerror", None) or str(error))
