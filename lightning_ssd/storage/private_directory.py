"""Directories that nobody else gets into, although anybody may foresee their names and write beside them."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from lightning_ssd.errors import StorageError

__all__ = ["MAX_VANISHED", "open_private"]

MAX_VANISHED = 100
"""How often a directory is made again that another process of ours, which ends, has removed in between."""

_SPILL_ADVICE = "because spill files hold training data. Remove it or take another path"


def open_private(parent: int, path: Path, *, repair: bool = False, advice: str = _SPILL_ADVICE) -> int:
    """Open (make) a 0700 directory of ours through ``parent``, so that nobody can swap it for a link in between.

    Args:
        parent: descriptor of the directory that ``path`` lies in. Anybody may be able to write there.
        path: only its name is looked up; the whole is for messages.
        repair: take the rights of others away instead of refusing.
        advice: why it must be private and what to do, the end of the message.

    Returns:
        A descriptor of the directory, which the caller closes.

    Raises:
        StorageError: another user's, open to others, or a link, file or pipe that somebody has put there.
        OSError: it cannot be made, or has gone in between.
    """
    with suppress(FileExistsError):
        os.mkdir(path.name, 0o700, dir_fd=parent)
    try:
        folder = os.open(path.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    except NotADirectoryError as error:
        raise StorageError(
            error.errno, f"{path} is a symbolic link or a file; allowed: a directory that we made. Remove it"
        ) from error
    except PermissionError as error:
        # Ours we may read. Whose it is says more than that we may not.
        facts = os.stat(path.name, dir_fd=parent, follow_symlinks=False)
        raise _not_private(path, facts, advice) from error
    try:
        facts = os.fstat(folder)
        is_open = facts.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        if facts.st_uid == os.geteuid() and is_open and repair:
            os.fchmod(folder, 0o700)
        elif facts.st_uid != os.geteuid() or is_open:
            raise _not_private(path, facts, advice)
    except BaseException:
        os.close(folder)
        raise
    return folder


def _not_private(path: Path, facts: os.stat_result, advice: str) -> StorageError:
    return StorageError(
        errno.EPERM,
        f"{path} belongs to user {facts.st_uid} with mode {stat.S_IMODE(facts.st_mode):04o}; allowed: user "
        f"{os.geteuid()} with mode 0700, {advice}",
    )
