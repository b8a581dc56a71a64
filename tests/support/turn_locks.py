"""The files by which processes take turns on a drive, as seen from outside."""

from __future__ import annotations

import fcntl
from pathlib import Path


def locks(runtime: Path) -> dict[str, Path]:
    return {path.suffix[1:]: path for path in runtime.iterdir()}


def is_taken(path: Path) -> bool:
    """Asks as another process would: ``flock`` belongs to the opening, not to the process."""
    with path.open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
