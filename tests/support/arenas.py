"""Spill files of tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_ssd.storage.spill_file import Arena

MIB = 1 << 20


def open_arena(directory: Path, **changes: Any) -> Arena:
    return Arena(directory, **({"block_bytes": 4096, "direct": False} | changes))
