"""A slow drive, on purpose: a token bucket around the backend moves bytes no faster than asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from lightning_ssd.common.tensors import Region
from lightning_ssd.common.validation import parse_size
from lightning_ssd.storage.backend import DEFAULT_CHUNK_BYTES, DEFAULT_WORKERS, Backend
from lightning_ssd.storage.spill_file import Arena
from recipes.benchmarks.harness.wrapped_backend import WrappedBackend

__all__ = ["BucketBackend", "TokenBucket", "parse_rate"]

_PIECE_S = 0.02


def parse_rate(text: str) -> float:
    """Bytes per second from text such as "50MB/s".

    Raises:
        ConfigError: if the text is of another form.
        ValueError: if the rate is 0.
    """
    rate = float(parse_size(text.strip().removesuffix("/s"), name="throttle"))
    if rate <= 0:
        raise ValueError(f"throttle={text!r}; allowed: a rate above 0, such as 50MB/s")
    return rate


class TokenBucket:
    """Hands out the right to move bytes at a rate; nothing is saved up while nobody asks.

    Args:
        bytes_per_s: the rate.
        clock: seconds, for tests.
        sleep: likewise.
    """

    def __init__(
        self,
        bytes_per_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate = bytes_per_s
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()  # protects _free_s; never held while sleeping
        self._free_s = clock()

    def take(self, nbytes: int) -> None:
        """Return when ``nbytes`` would have passed, behind all that was asked for before."""
        with self._lock:
            self._free_s = max(self._free_s, self._clock()) + nbytes / self._rate
            until_s = self._free_s
        self._sleep(max(0.0, until_s - self._clock()))


class BucketBackend(WrappedBackend):
    """Passes everything on to ``inner``, each direction through a bucket that all workers share."""

    def __init__(self, inner: Backend, bytes_per_s: float) -> None:
        super().__init__(inner)
        self._writes, self._reads = TokenBucket(bytes_per_s), TokenBucket(bytes_per_s)
        self._piece_bytes = max(1 << 16, min(DEFAULT_CHUNK_BYTES, round(bytes_per_s * _PIECE_S / DEFAULT_WORKERS)))

    @property
    def name(self) -> str:
        return f"{self.inner.name} (throttled)"

    def write(self, arena: Arena, region: Region, offset: int) -> None:
        self._wait(self._writes, region.nbytes)
        super().write(arena, region, offset)

    def read(self, arena: Arena, region: Region, offset: int) -> None:
        self._wait(self._reads, region.nbytes)
        super().read(arena, region, offset)

    def _wait(self, bucket: TokenBucket, nbytes: int) -> None:
        """In small pieces, so that two workers share the rate as they would share a drive."""
        for start in range(0, nbytes, self._piece_bytes):
            bucket.take(min(self._piece_bytes, nbytes - start))
