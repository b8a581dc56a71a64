"""How fast a directory is, and whether bytes come back from it as they were written."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_ssd.common.tensors import Region
from lightning_ssd.memory.mmap import PAGE_BYTES
from lightning_ssd.storage.backend import DEFAULT_CHUNK_BYTES, DEFAULT_WORKERS, Backend
from lightning_ssd.storage.spill_file import Arena

__all__ = ["Rates", "measure_rates", "read_back_ok"]

_PROBE_BYTES = 16 << 20
"""Enough for a first guess of a drive's rates: a run soon tells them better."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured bytes per second."""

    write_per_s: float
    read_per_s: float


def measure_rates(
    backend: Backend,
    directory: Path,
    *,
    nbytes: int = _PROBE_BYTES,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    num_workers: int = DEFAULT_WORKERS,
    device: torch.device | str = "cpu",
) -> Rates:
    """Write ``nbytes`` and read them back, after one round that preallocates and warms up."""
    span = min(nbytes, num_workers * chunk_bytes)  # of memory: workers use its chunks in turn
    memory = torch.empty(span + PAGE_BYTES, dtype=torch.uint8, device=device).fill_(1)
    if memory.is_cuda:
        torch.cuda.synchronize(memory.device)  # backends reach device memory outside of any stream
    base = memory.data_ptr() + -memory.data_ptr() % PAGE_BYTES
    arena = backend.open_arena(directory)
    try:
        extent = arena.allocate(nbytes)
        offsets = range(0, nbytes - nbytes % backend.block_bytes, chunk_bytes)

        def timed(move: Callable[[Arena, Region, int], None]) -> float:
            def one(start: int) -> None:
                region = Region(base + start % span, min(chunk_bytes, offsets.stop - start))
                move(arena, region, extent.offset + start)

            begin = time.perf_counter()
            with ThreadPoolExecutor(num_workers) as pool:
                list(pool.map(one, offsets))
            return offsets.stop / (time.perf_counter() - begin)

        timed(backend.write)
        return Rates(timed(backend.write), timed(backend.read))
    finally:
        arena.close()


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
