"""How bytes reach a file: the contract of all backends, and the choice of one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from lightning_ssd.errors import BackendUnavailableError, ConfigError, OffloadError
from lightning_ssd.storage.arena import Arena
from lightning_ssd.tensors import Region

if TYPE_CHECKING:
    from lightning_ssd.storage.kvikio import KvikioBackend

__all__ = ["DEFAULT_CHUNK_BYTES", "DEFAULT_WORKERS", "Backend", "WrappedBackend", "open_backend"]

# Both from the sweep in recipes/results/bench_io_cpu.md.
DEFAULT_CHUNK_BYTES = 16 << 20
"""Largest request. 1 MiB costs two to three times the core time; 64 MiB makes an urgent read wait for 30 ms."""
DEFAULT_WORKERS = 2
"""Threads per direction. One leaves the drive idle between requests; more gain nothing."""
_GDS = "kvikio GDS"


class Backend(Protocol):
    """Moves bytes between memory and an arena's file.

    Both moves block, may be called from many threads at once, and do not hold the GIL while bytes move. They move
    exactly ``region.nbytes`` bytes or raise. The caller promises that ``offset`` and ``region.nbytes`` are multiples
    of ``block_bytes`` and that the memory lives and stays as it is until the call returns (a backend that moves device
    memory takes any ``nbytes``). The address may be anything: one that is no multiple of ``memory_alignment`` is moved
    through a staging buffer, which costs a copy.
    """

    @property
    def name(self) -> str:
        """What really happens, for reports: "posix O_DIRECT", "posix page cache", "kvikio GDS" or "kvikio POSIX"."""

    @property
    def memory_alignment(self) -> int:
        """Addresses that are multiples of this are moved without a copy.

        Ask anew for each storage: it may rise when a drive turns out to want more than it said.
        """

    @property
    def block_bytes(self) -> int:
        """Granularity of offsets, lengths and extents. Fixed."""

    @property
    def moves_device_memory(self) -> bool:
        """Whether addresses may be those of device memory."""

    def open_arena(self, directory: Path) -> Arena:
        """A new arena in ``directory``. The caller closes it, before the backend."""

    def write(self, arena: Arena, region: Region, offset: int) -> None:
        """Memory to file.

        Raises:
            OutOfSpaceError: the file system is full.
            ShortTransferError: the system moved less, again and again.
            StorageError: any other failure, with ``errno``, path, offset and length.
        """

    def read(self, arena: Arena, region: Region, offset: int) -> None:
        """File to memory. Raises as :meth:`write`; reading behind the end of the file is a ShortTransferError."""

    def close(self) -> None:
        """Free buffers and restore library-wide settings. Idempotent."""


class WrappedBackend:
    """Passes everything on; for those who change one thing about another backend.

    Args:
        inner: the other one. Closing this closes it.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def memory_alignment(self) -> int:
        return self.inner.memory_alignment

    @property
    def block_bytes(self) -> int:
        return self.inner.block_bytes

    @property
    def moves_device_memory(self) -> bool:
        return self.inner.moves_device_memory

    def open_arena(self, directory: Path) -> Arena:
        return self.inner.open_arena(directory)

    def write(self, arena: Arena, region: Region, offset: int) -> None:
        self.inner.write(arena, region, offset)

    def read(self, arena: Arena, region: Region, offset: int) -> None:
        self.inner.read(arena, region, offset)

    def close(self) -> None:
        self.inner.close()


def open_backend(
    choice: Literal["auto", "kvikio", "posix"],
    *,
    directories: Sequence[Path],
    device: torch.device,
    allow_unsuitable_paths: bool = False,
) -> tuple[Backend, str]:
    """Choose and open a backend for ``directories``, which are made when missing; say in one sentence why this one.

    Args:
        choice: "auto" takes kvikio for a CUDA device where it has GPUDirect Storage and reads back what it wrote; else
            posix. Without it kvikio copies on a stream that waits for the device's default stream, and that one for it.
        directories: one per drive.
        device: whose memory moves, if it is CUDA's; kvikio proves itself there.
        allow_unsuitable_paths: accept memory and network file systems.

    Raises:
        UnsuitablePathError: if a directory cannot serve.
        BackendUnavailableError: if kvikio was asked for by name and does not work here.
        ConfigError: if there is no directory.
    """
    # Imported here: these files use the protocol above.
    from lightning_ssd.storage.posix import PosixBackend
    from lightning_ssd.storage.probe import check_directory

    if not directories:
        raise ConfigError("no directory to offload to; name at least one in HardwareProfile(paths=...)")
    for directory in directories:
        check_directory(directory, allow_unsuitable=allow_unsuitable_paths)
    reason = "backend='posix' was asked for"
    if choice == "kvikio" or (choice == "auto" and device.type == "cuda"):
        try:
            backend = _open_kvikio(directories, device)
            if choice == "kvikio" or backend.name == _GDS:
                return backend, f"{backend.name}, because {backend.why}"
            backend.close()
            reason = f"kvikio has no GPUDirect Storage here: {backend.why}"
        except OffloadError as error:
            if choice == "kvikio":
                raise
            reason = f"kvikio does not work here: {error}"
    elif choice == "auto":
        reason = f"kvikio serves CUDA devices, and this run uses {device.type}"
    posix = PosixBackend(directories)
    return posix, f"{posix.name} ({posix.why}), because {reason}"


def _open_kvikio(directories: Sequence[Path], device: torch.device) -> KvikioBackend:
    """Open kvikio, with GDS if every directory takes it, and let it prove itself: it may load and still lose bytes."""
    from lightning_ssd.storage.kvikio import KvikioBackend

    backend = KvikioBackend(device_type=device.type)
    try:
        _prove_kvikio(backend, directories, device)
    except OffloadError as error:
        if backend.name != _GDS:
            raise
        backend = KvikioBackend(device_type=device.type, gds=False)
        backend.why = f"GDS does not work here: {error}"
        _prove_kvikio(backend, directories, device)
    return backend


def _prove_kvikio(backend: KvikioBackend, directories: Sequence[Path], device: torch.device) -> None:
    from lightning_ssd.storage.probe import read_back_ok

    try:
        for directory in directories:
            if not read_back_ok(backend, directory, device=device if backend.moves_device_memory else "cpu"):
                raise BackendUnavailableError(f"kvikio did not read back from {directory} what it had written there")
    except BaseException:
        backend.close()
        raise
