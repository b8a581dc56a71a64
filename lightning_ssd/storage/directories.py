"""Directories of spill files: the user's, judged before use, and ours in them, which no other user gets into."""

from __future__ import annotations

import errno
import logging
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from lightning_ssd.common.formatting import escape_control
from lightning_ssd.errors import ConfigError, StorageError, UnsuitablePathError
from lightning_ssd.storage.filesystem import make_directory

__all__ = [
    "MAX_VANISHED",
    "created_directories",
    "missing_parts",
    "open_private",
    "warn_shared_filesystem",
]

_log = logging.getLogger(__name__)

# -- the user's ------------------------------------------------------------------------------------------------------


@contextmanager
def created_directories(paths: Sequence[Path]) -> Iterator[None]:
    """Around what is opened in the directories: those that were missing are there, and go again where it fails.

    Args:
        paths: one directory per drive, as the user wrote them.

    Raises:
        UnsuitablePathError: one cannot be made.
        ConfigError: two of them are one directory.
    """
    made = []
    with ExitStack() as undo:
        for path in paths:
            missing = missing_parts(path)
            for part in missing:
                undo.callback(_remove, part)
            if missing:
                made.append(path)
            make_directory(path)
        _refuse_twice(paths)
        yield
        undo.pop_all()
    _warn_unmounted(made)


def missing_parts(path: Path) -> list[Path]:
    """Return the directories that have to be made for ``path``, from the top.

    Raises:
        UnsuitablePathError: more than the last one is missing, so that a drive may not be mounted. Below the working,
            the home and the temporary directory that is no sign of it.
    """
    missing = [part for part in (*reversed(path.parents), path) if not os.path.exists(part)]
    if len(missing) > 1 and not any(map(path.is_relative_to, _usual_places())):
        raise UnsuitablePathError(
            errno.ENOENT,
            f"{path} is missing, and so is {missing[0]}: is the drive mounted? Make it (mkdir -p {path}), or name "
            "another directory in HardwareProfile(paths=...) or $LIGHTNING_SSD_PATHS",
        )
    return missing


def _warn_unmounted(made: Sequence[Path]) -> None:
    """Log which directories were made on the system's own drive: of one that is not mounted, the name alone is there.

    Not of those that every user has there: below the working, the home and the temporary directory.
    """
    for path in made:
        with suppress(OSError):  # another process has removed it
            if os.stat(path).st_dev == os.stat("/").st_dev and not any(map(path.is_relative_to, _usual_places())):
                _log.warning(
                    "%s was missing and has been made on the drive of /; if another drive was meant, mount it and "
                    "remove the directory",
                    escape_control(path),
                )


def _usual_places() -> set[str]:
    """Where directories are made on the system's drive with intent. "/", where a service works, is none."""
    found = {os.path.expanduser("~")}
    for place in (os.getcwd, tempfile.gettempdir):
        with suppress(OSError):  # it has been removed, or there is none
            found.add(place())
    return found - {"/", ""}


def _remove(path: Path) -> None:
    """Remove it unless another process uses it by now."""
    with suppress(OSError):
        path.rmdir()


def _refuse_twice(paths: Sequence[Path]) -> None:
    """By number, not by name: links, other spellings and second mounts are the same directory."""
    known: dict[tuple[int, int], Path] = {}
    for path in paths:
        facts = os.stat(path)
        other = known.setdefault((facts.st_dev, facts.st_ino), path)
        if other is not path:
            names = (
                escape_control(path)
                if other == path
                else f"{escape_control(other)} and {escape_control(path)}, which are one,"
            )
            raise ConfigError(
                f"HardwareProfile.paths (or $LIGHTNING_SSD_PATHS) names a directory twice: {names} would be taken for "
                "two drives, and each drive is to have one directory. Leave one of them out"
            )


def warn_shared_filesystem(paths: Sequence[Path]) -> None:
    """Log which directories are parts of one file system: they work, but are no faster than one of them."""
    devices: dict[int, list[str]] = {}
    for path in paths:
        devices.setdefault(os.stat(path).st_dev, []).append(escape_control(path))
    for names in devices.values():
        if len(names) > 1:
            _log.warning(
                "%s lie on one file system, so that they are one drive and no faster than one directory there; name "
                "one directory per drive in HardwareProfile.paths",
                " and ".join(names),
            )


# -- ours ------------------------------------------------------------------------------------------------------------

MAX_VANISHED = 100
"""How often a directory is made again that another process of ours, which ends, has removed in between."""


def open_private(parent: int, path: Path) -> int:
    """Open (make) a 0700 directory of ours through ``parent``, so that no user can swap it for a link in between.

    Args:
        parent: descriptor of the directory that ``path`` lies in. Other users may be able to write there.
        path: only its name is looked up; the whole is for messages.

    Returns:
        A descriptor of the directory, which the caller closes.

    Raises:
        StorageError: another user's, open to others, or a link, file or pipe that another user has put there.
        OSError: it cannot be made, or has gone in between.
    """
    with suppress(FileExistsError):
        os.mkdir(path.name, 0o700, dir_fd=parent)
    try:
        folder = os.open(path.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    except NotADirectoryError as error:
        raise StorageError(
            error.errno, f"{path} is a symbolic link or a file, where a directory of ours would be. Remove it"
        ) from error
    except PermissionError as error:
        # Ours we may read. Whose it is says more than that we may not.
        facts = os.stat(path.name, dir_fd=parent, follow_symlinks=False)
        raise _not_private(path, facts) from error
    try:
        facts = os.fstat(folder)
        if facts.st_uid != os.geteuid() or facts.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise _not_private(path, facts)
    except BaseException:
        os.close(folder)
        raise
    return folder


def _not_private(path: Path, facts: os.stat_result) -> StorageError:
    return StorageError(
        errno.EPERM,
        f"{path} belongs to user {facts.st_uid} with mode {stat.S_IMODE(facts.st_mode):04o}; it must be of user "
        f"{os.geteuid()} with mode 0700, because spill files hold training data. Remove it or take another path",
    )
