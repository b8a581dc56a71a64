"""Directories of spill files: the user's, which are made and judged before use."""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from lightning_ssd.common.formatting import escape_control
from lightning_ssd.errors import ConfigError, UnsuitablePathError
from lightning_ssd.storage.filesystem import make_directory

__all__ = [
    "created_directories",
    "missing_parts",
    "warn_shared_filesystem",
]

_log = logging.getLogger(__name__)


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
