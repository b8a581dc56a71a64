"""A slow drive, on purpose: this process and its children read and write no faster than asked.

    with throttled(directory, 50e6) as throttle:
        print(throttle.how)
        with Offloader(..., _wrap_backend=throttle.wrap_backend) as offloader: ...

Where the machine allows it (root, a block device below the directory), a control group of the kernel holds the rate:
``blkio.throttle`` of version 1, which throttles direct I/O, or ``io.max`` of version 2. It is tried out before it is
believed. Elsewhere a token bucket around the backend holds it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning_ssd.common.tensors import Region
from lightning_ssd.common.validation import parse_size
from lightning_ssd.storage.backend import DEFAULT_CHUNK_BYTES, DEFAULT_WORKERS, Backend, WrappedBackend
from lightning_ssd.storage.drive_probe import measure_rates
from lightning_ssd.storage.posix import PosixBackend
from lightning_ssd.storage.spill_file import Arena
from recipes.benchmarks.harness.cgroups import GroupUnavailableError, control_group

__all__ = ["BucketBackend", "Throttle", "TokenBucket", "block_device", "parse_rate", "throttled"]

TOLERANCE = 0.25
_BLOCK_DEVICES = Path("/sys/dev/block")
_TRIALS_S = (0.4, 1.5)
_PIECE_S = 0.02
Kind = Literal["auto", "group", "bucket"]


@dataclass(frozen=True)
class Throttle:
    """What holds the rate."""

    is_real: bool
    """True: the kernel throttles the drive for these processes. False: a wrapper around the backend does."""
    how: str
    """The same in words, for reports."""
    wrap_backend: Callable[[Backend], Backend] | None
    """For ``Offloader(_wrap_backend=...)``."""


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


@contextmanager
def throttled(directory: Path, bytes_per_s: float, *, kind: Kind = "auto") -> Iterator[Throttle]:
    """Hold the rate of reads, and likewise that of writes, until the end of the block.

    Args:
        directory: on the drive.
        bytes_per_s: each direction on its own.
        kind: "auto": a control group, else the token bucket. "group" and "bucket": this one or none.

    Raises:
        GroupUnavailableError: for ``kind="group"`` where there can be none.
    """
    bucket = _bucket(bytes_per_s, "it was asked for")
    with ExitStack() as stack:
        if kind != "bucket":
            try:
                bucket = stack.enter_context(_group(directory, bytes_per_s))
            except GroupUnavailableError as error:
                if kind == "group":
                    raise
                bucket = _bucket(bytes_per_s, f"a control group cannot hold the rate here: {error}")
        yield bucket


def _bucket(bytes_per_s: float, why: str) -> Throttle:
    how = f"a token bucket around the backend at {bytes_per_s / 1e6:g} MB/s, since {why}"
    return Throttle(False, how, lambda inner: BucketBackend(inner, bytes_per_s))


@contextmanager
def _group(directory: Path, bytes_per_s: float) -> Iterator[Throttle]:
    device = block_device(directory)
    rate = round(bytes_per_s)
    v1 = {f"blkio.throttle.{name}_bps_device": f"{device} {rate}" for name in ("read", "write")}
    v2 = {"io.max": f"{device} rbps={rate} wbps={rate}"}
    with control_group("blkio", v1=v1, v2=v2) as group:
        group.add_own_processes()
        _try_out(directory, bytes_per_s)
        version = "io.max of version 2" if (group.directory / "io.max").exists() else "blkio.throttle of version 1"
        yield Throttle(True, f"control group {version} at {bytes_per_s / 1e6:g} MB/s on device {device}", None)


def _try_out(directory: Path, bytes_per_s: float) -> None:
    """Some file systems hand their writes to threads outside of the group; then the limit is there and limits not."""
    backend = PosixBackend([directory])
    try:
        for seconds in _TRIALS_S:
            # The kernel cuts time into slices, so that a short trial may get more than its share; a longer one decides.
            nbytes = max(4, round(bytes_per_s * seconds / (1 << 20))) << 20
            rates = measure_rates(backend, directory, nbytes=nbytes)
            worst = max(rates.write_per_s, rates.read_per_s)
            if worst <= bytes_per_s * (1 + TOLERANCE):
                return
    finally:
        backend.close()
    raise GroupUnavailableError(f"it let {worst / 1e6:.0f} MB/s through instead of {bytes_per_s / 1e6:.0f}")


def block_device(directory: Path) -> str:
    """``major:minor`` of the whole drive under a directory, as control groups want it.

    Follows an overlay to its upper directory, a file system with device numbers of its own (btrfs) to the source of
    its mount, and a partition to its drive. A loop or device-mapper device is a drive of its own.

    Raises:
        GroupUnavailableError: there is no block device, or it cannot be seen from here.
    """
    seen: set[Path] = set()
    while True:
        number = os.stat(directory).st_dev
        device = f"{os.major(number)}:{os.minor(number)}"
        if os.major(number) and (_BLOCK_DEVICES / device).exists():
            return _whole(device)
        kind, source, options = _mount(directory)
        seen.add(directory)
        upper = dict(option.partition("=")[::2] for option in options.split(",")).get("upperdir")
        if kind == "overlay" and upper and Path(upper).is_dir() and Path(upper) not in seen:
            directory = Path(upper)
            continue
        if source.startswith("/dev/") and Path(source).is_block_device():
            number = os.stat(source).st_rdev
            return _whole(f"{os.major(number)}:{os.minor(number)}")
        raise GroupUnavailableError(f"no block device can be seen below {kind} (source {source})")


def _whole(device: str) -> str:
    node = (_BLOCK_DEVICES / device).resolve()
    return (node.parent / "dev").read_text().strip() if (node / "partition").exists() else device


def _mount(directory: Path) -> tuple[str, str, str]:
    """Type, source and options of the mount, by its id: paths may be mounted over one another."""
    fd = os.open(directory, os.O_PATH | os.O_CLOEXEC)
    try:
        lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
    finally:
        os.close(fd)
    mount_id = next(line.split()[1] for line in lines if line.startswith("mnt_id:"))
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if line.split(" ", 1)[0] == mount_id:
            kind, source, options = line.rpartition(" - ")[2].split(" ", 2)
            return kind, source, options
    raise GroupUnavailableError("the mount below the directory is not listed")


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
