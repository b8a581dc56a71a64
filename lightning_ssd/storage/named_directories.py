"""The directories that a user names: judged before anything of ours is in them, as if never asked for if refused."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from lightning_ssd.errors import ConfigError
from lightning_ssd.storage.probe import make_directory, refuse_unsuitable
from lightning_ssd.wording import printable

__all__ = ["made", "tell_of_shared_drives"]

_log = logging.getLogger(__name__)


@contextmanager
def made(paths: Sequence[Path], *, allow_unsuitable: bool) -> Iterator[None]:
    """Around what is opened in the directories: those that were missing are there, and go again where it fails.

    Args:
        paths: one directory per drive, as the user wrote them.
        allow_unsuitable: accept memory and network file systems.

    Raises:
        UnsuitablePathError: one cannot be made, or cannot serve.
        ConfigError: two of them are one directory.
    """
    with ExitStack() as undo:
        for path in paths:
            for missing in [part for part in (*reversed(path.parents), path) if not os.path.exists(part)]:
                undo.callback(_remove, missing)
            make_directory(path)
            refuse_unsuitable(path, allow_unsuitable=allow_unsuitable)
        _refuse_twice(paths)
        yield
        undo.pop_all()


def _remove(path: Path) -> None:
    """Unless somebody else uses it by now."""
    with suppress(OSError):
        path.rmdir()


def _refuse_twice(paths: Sequence[Path]) -> None:
    """By number, not by name: links, other spellings and second mounts are the same directory."""
    known: dict[tuple[int, int], Path] = {}
    for path in paths:
        facts = os.stat(path)
        other = known.setdefault((facts.st_dev, facts.st_ino), path)
        if other is not path:
            names = printable(path) if other == path else f"{printable(other)} and {printable(path)}, which are one,"
            raise ConfigError(
                f"HardwareProfile.paths (or $LIGHTNING_SSD_PATHS) names a directory twice: {names} would be taken for "
                "two drives; allowed: one directory per drive. Leave one of them out"
            )


def tell_of_shared_drives(paths: Sequence[Path]) -> None:
    """Log which directories are parts of one file system: they work, but are no faster than one of them."""
    devices: dict[int, list[str]] = {}
    for path in paths:
        devices.setdefault(os.stat(path).st_dev, []).append(printable(path))
    for names in devices.values():
        if len(names) > 1:
            _log.warning(
                "%s lie on one file system, so that they are one drive and no faster than one directory there; name "
                "one directory per drive in HardwareProfile.paths",
                " and ".join(names),
            )
