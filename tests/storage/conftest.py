"""Where storage tests write: a temporary directory, or a small real file system of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts an ext4 of so many MiB, in a file, and gives its directory."""
    if os.geteuid() != 0 or not shutil.which("mkfs.ext4") or not shutil.which("mount"):
        pytest.skip("needs root, mkfs.ext4 and mount for a file system of its own")

    with ExitStack() as stack:

        def make(mebibytes: int) -> Path:
            image, directory = tmp_path / "image", tmp_path / "mounted"
            with image.open("wb") as file:
                file.truncate(mebibytes << 20)
            directory.mkdir()
            subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", image], check=True)
            mounted = subprocess.run(
                ["mount", "-o", "loop", image, directory], capture_output=True, text=True, check=False
            )
            if mounted.returncode:
                pytest.skip(f"cannot mount a loop device here: {mounted.stderr.strip()}")
            stack.callback(subprocess.run, ["umount", "--lazy", directory], check=True)
            return directory

        yield make
