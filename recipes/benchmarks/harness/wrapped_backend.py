"""A backend around another one, for benchmarks and tests that slow it down, watch it or have it fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_ssd.common.tensors import Region
from lightning_ssd.storage.backend import Backend
from lightning_ssd.storage.spill_file import Arena

__all__ = ["WrappedBackend"]


class WrappedBackend:
    """Passes everything on; for those who change one thing about another backend.

    Args:
        inner: the other one. Closing this closes it.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self.inner, name)

    def open_arena(self, directory: Path) -> Arena:
        return self.inner.open_arena(directory)

    def write(self, arena: Arena, region: Region, offset: int) -> None:
        self.inner.write(arena, region, offset)

    def read(self, arena: Arena, region: Region, offset: int) -> None:
        self.inner.read(arena, region, offset)

    def close(self) -> None:
        self.inner.close()
