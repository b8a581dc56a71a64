"""Whether bytes come back from a directory as they were written, and how fast."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from lightning_ssd.common.accelerators import accelerator_of
from lightning_ssd.common.tensors import Region
from lightning_ssd.storage.backend import DEFAULT_CHUNK_BYTES, Backend, open_staging

__all__ = ["PROBE_BYTES", "Rates", "read_back_s"]

PROBE_BYTES = 64 << 20
"""Four chunks. Each directory is written so much by each way that is tried."""
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured bytes per second."""

    write_per_s: float
    read_per_s: float
    by_directory: tuple[float, ...] = ()
    """Rate of writes of each directory, where several were written to at once; 0: it has taken none."""


def read_back_s(
    backend: Backend, directory: Path, device: torch.device = _CPU, *, nbytes: int = PROBE_BYTES
) -> float | None:
    """Move ``nbytes`` random bytes from memory of ``device`` to a file and back; return the seconds.

    They go in chunks through the staging memory of the backend. Reads begin in the middle of chunks, so that they cross
    the borders of what was written.

    Returns:
        ``None`` if other bytes came back.

    Raises:
        StorageError: they could not be moved.
    """
    generator = torch.Generator().manual_seed(0)
    written = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator, device="cpu").to(device)
    read, accelerator = torch.zeros_like(written), accelerator_of(device)

    def copy(target: torch.Tensor, source: torch.Tensor) -> Region:
        target.copy_(source)
        if accelerator is not None:
            accelerator.synchronize()  # backends reach device memory outside of any stream
        return Region(target.data_ptr(), target.nbytes)

    with closing(open_staging(backend, device)) as staging, closing(backend.open_arena(directory)) as arena:
        offset, chunk = arena.allocate(nbytes).offset, min(DEFAULT_CHUNK_BYTES, nbytes)
        with staging.lease(chunk) as staged:
            begin_s = time.perf_counter()
            for start, stop in pairwise([*range(0, nbytes, chunk), nbytes]):
                backend.write(arena, copy(staged[: stop - start], written[start:stop]), offset + start)
            for start, stop in pairwise([0, *range(chunk // 2, nbytes, chunk), nbytes]):
                backend.read(arena, Region(staged.data_ptr(), stop - start), offset + start)
                copy(read[start:stop], staged[: stop - start])
            seconds = time.perf_counter() - begin_s
    return seconds if torch.equal(written, read) else None
