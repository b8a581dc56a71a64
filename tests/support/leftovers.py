"""Threads and open files of ours that something has left behind."""

import os
import threading
from pathlib import Path


def open_files(directory: Path) -> list[str]:
    """Descriptors of this process that lead into ``directory``; anonymous files show as deleted ones."""
    targets = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return [target for target in targets if target.startswith(str(directory))]


def assert_nothing_left(directory: Path) -> None:
    assert [t.name for t in threading.enumerate() if t.name.startswith("lightning_ssd")] == []
    assert open_files(directory) == []
