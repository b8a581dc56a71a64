"""A directory of ours among the user's, which stays while any offloader of any process needs it, then goes.

Anonymous files do not keep a directory from being removed. So each holder has a shared lock on it (``flock``), which
the kernel drops however a process ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_ssd.errors import StorageError
from lightning_ssd.storage.private_directory import MAX_VANISHED, open_private
from lightning_ssd.storage.probe import cannot_be_made, make_directory

__all__ = ["HeldDirectory", "rank_directory"]

_NO_FLOCK = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
"""On a file system without locks the last one to write there may find its directory gone; then it says so."""
_NOT_REMOVED = frozenset(
    {errno.EWOULDBLOCK, errno.ENOTEMPTY, errno.ENOENT, errno.EEXIST, errno.EBUSY, errno.ENOTDIR}
    | {errno.EACCES, errno.EPERM, errno.EROFS}
)


def rank_directory(rank: int) -> str:
    """Name for the directory of one process of a run. With this user's number in it, so that users who share a drive
    never ask for the same one; runs of one user may.
    """
    return f"lightning_ssd-{os.geteuid()}-rank-{rank}"


class HeldDirectory:
    """Makes the directory, with its parents, so that only this user gets into it; or sees that an existing one is so.

    For a name that others can foresee, in a directory where they may write: what they put there first is refused.

    Args:
        path: what to hold.

    Raises:
        StorageError: it belongs to somebody else, or is a symbolic link, a file or a pipe.
        UnsuitablePathError: it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder: int | None = _open_held(path)

    def close(self) -> None:
        """Let go; remove it if it is empty and nobody else holds it. Idempotent."""
        folder, self._folder = self._folder, None
        if folder is None:
            return
        try:
            with _suppressed(_NO_FLOCK):
                # Held by somebody else, this fails, and theirs is the last word.
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with _suppressed(_NOT_REMOVED):
                found, held = os.stat(self.path, follow_symlinks=False), os.fstat(folder)
                # Removed by hand and made again by somebody else, it is theirs.
                if (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino):
                    self.path.rmdir()
        except BlockingIOError:
            pass
        finally:
            os.close(folder)


def _open_held(path: Path) -> int:
    for left in reversed(range(MAX_VANISHED)):
        make_directory(path.parent)
        try:
            parent = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                return _locked(open_private(parent, path, repair=True), path, parent)
            finally:
                os.close(parent)
        except StorageError:
            raise
        except OSError as error:
            # Another one of ours that closes may have removed it in between.
            if not (isinstance(error, FileNotFoundError) and left):
                raise cannot_be_made(path, error) from error
    raise AssertionError("the last round returns or raises")


def _locked(folder: int, path: Path, parent: int) -> int:
    """The descriptor, locked; ``FileNotFoundError``: the directory was removed before we had it."""
    try:
        with _suppressed(_NO_FLOCK):
            fcntl.flock(folder, fcntl.LOCK_SH)
        found, held = os.stat(path.name, dir_fd=parent, follow_symlinks=False), os.fstat(folder)
        if (found.st_dev, found.st_ino) != (held.st_dev, held.st_ino):
            raise FileNotFoundError(errno.ENOENT, "removed and made again", str(path))
    except BaseException:
        os.close(folder)
        raise
    return folder


@contextmanager
def _suppressed(codes: frozenset[int]) -> Iterator[None]:
    """As ``contextlib.suppress``, for system errors of some numbers."""
    try:
        yield
    except OSError as error:
        if error.errno not in codes:
            raise
