"""The choice of a backend: the fastest one that proves itself in the directories."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import torch

from lightning_ssd.errors import BackendUnavailableError, ConfigError, OffloadError
from lightning_ssd.storage.backend import Backend
from lightning_ssd.storage.drive_probe import read_back_s
from lightning_ssd.storage.filesystem import check_directory
from lightning_ssd.storage.library import OR_POSIX, LibraryBackend
from lightning_ssd.storage.posix import PosixBackend

__all__ = ["BackendChoice", "open_backend"]

BackendChoice = Literal["auto", "cufile", "kvikio", "posix"]
_OF_CUDA = (
    "moves memory of CUDA devices, and what moves here is host memory (no card, or checksums: OffloadPolicy.verify)"
)


def open_backend(
    choice: BackendChoice,
    *,
    directories: Sequence[Path],
    device: torch.device,
    allow_unsuitable_paths: bool = False,
) -> tuple[Backend, str]:
    """Choose and open a backend for ``directories``; also return the reason, in one sentence.

    Directories are made when missing.

    Args:
        choice: "auto" takes cuFile for a CUDA device, else posix. Every directory must give back by cuFile what was
            written, no slower than by posix. "auto" never takes kvikio, which waits for the device's default stream.
        directories: one per drive.
        device: whose memory a backend moves, also where it is copied from another one's.
        allow_unsuitable_paths: accept memory and network file systems.

    Raises:
        UnsuitablePathError: if a directory cannot serve.
        BackendUnavailableError: if cuFile or kvikio was asked for by name and does not work here, or not on ``device``.
        ConfigError: if there is no directory.
    """
    if not directories:
        raise ConfigError("no directory to offload to; name at least one in HardwareProfile(paths=...)")
    if choice == "cufile" and device.type != "cuda":
        raise BackendUnavailableError(
            f'backend="cufile" {_OF_CUDA}; set OffloadPolicy(verify="off") on a card, {OR_POSIX}'
        )
    for directory in directories:
        check_directory(directory, allow_unsuitable=allow_unsuitable_paths)
    if choice in ("cufile", "kvikio"):
        named, _ = _open_direct(choice, directories, device)
        return named, f"{named.name}, because {named.why}"
    posix, reason = PosixBackend(directories), "backend='posix' was asked for"
    if choice == "auto" and device.type != "cuda":
        reason = f"cuFile {_OF_CUDA}"
    elif choice == "auto":
        try:
            direct, direct_s = _open_direct("cufile", directories, device)
        except (OffloadError, torch.OutOfMemoryError) as error:
            reason = f"cuFile does not work here: {error}"
        else:
            with ExitStack() as slower:
                slower.callback(direct.close)
                posix_s = _proved_s(posix, directories, device)
                reason = (
                    f"64 MiB in each directory took cuFile {direct_s:.3f} s there and back, and posix {posix_s:.3f} s"
                )
                if direct_s <= posix_s:
                    slower.pop_all()
                    posix.close()
                    return direct, f"{direct.name}, because {direct.why}, and {reason}"
    return posix, f"{posix.name} ({posix.why}), because {reason}"


def _open_direct(choice: str, directories: Sequence[Path], device: torch.device) -> tuple[LibraryBackend, float]:
    """Return cuFile or kvikio, and the seconds that its proof took."""
    backend: LibraryBackend
    if choice == "cufile":
        from lightning_ssd.storage.cufile import CufileBackend

        backend = CufileBackend(device)
    else:
        from lightning_ssd.storage.kvikio import KvikioBackend

        backend = KvikioBackend(device_type=device.type)
    return backend, _proved_s(backend, directories, device)


def _proved_s(backend: Backend, directories: Sequence[Path], device: torch.device) -> float:
    """Return the seconds in which a backend proves that it gives back what was written. It may load and lose bytes.

    Closes the backend on failure.
    """
    taken_s = 0.0
    try:
        for directory in directories:
            if (seconds := read_back_s(backend, directory, device)) is None:
                raise BackendUnavailableError(f"{backend.name} did not read back from {directory} what was written")
            taken_s += seconds
    except BaseException:
        backend.close()
        raise
    return taken_s
