"""Whether bytes come back from a directory as they were written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_ssd.common.tensors import Region
from lightning_ssd.storage.backend import Backend

__all__ = ["Rates", "read_back_ok"]


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured bytes per second."""

    write_per_s: float
    read_per_s: float
    by_directory: tuple[float, ...] = ()
    """Rate of writes of each directory, where several were written to at once; 0: it has taken none."""


def read_back_ok(
    backend: Backend, directory: Path, *, device: torch.device | str = "cpu", nbytes: int = 1 << 20
) -> bool:
    """Whether random bytes come back as they were written, from and to memory of ``device``."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator, device="cpu")
    written = numbers.to(device)
    read = torch.zeros_like(written)
    if written.is_cuda:
        torch.cuda.synchronize(written.device)  # backends reach device memory outside of any stream
    arena = backend.open_arena(directory)
    try:
        extent = arena.allocate(nbytes)
        backend.write(arena, Region(written.data_ptr(), nbytes), extent.offset)
        backend.read(arena, Region(read.data_ptr(), nbytes), extent.offset)
    finally:
        arena.close()
    return torch.equal(written, read)
