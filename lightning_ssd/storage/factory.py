"""The choice of a backend: the fastest one that proves itself in the directories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from lightning_ssd.errors import BackendUnavailableError, ConfigError, OffloadError
from lightning_ssd.storage.backend import Backend
from lightning_ssd.storage.drive_probe import read_back_s
from lightning_ssd.storage.filesystem import check_directory
from lightning_ssd.storage.library import LibraryBackend
from lightning_ssd.storage.posix import PosixBackend

__all__ = ["BackendChoice", "open_backend"]

BackendChoice = Literal["auto", "cufile", "kvikio", "posix"]


def open_backend(
    choice: BackendChoice,
    *,
    directories: Sequence[Path],
    device: torch.device,
    allow_unsuitable_paths: bool = False,
) -> tuple[Backend, str]:
    """Choose and open a backend for ``directories``, which are made when missing; say in one sentence why this one.

    Args:
        choice: "auto" takes cuFile for a CUDA device if every directory gives back from there what was written, and no
            slower than by posix; else posix. kvikio waits for the device's default stream, so that it is never taken.
        directories: one per drive.
        device: whose memory a backend moves, also where it is copied from another one's.
        allow_unsuitable_paths: accept memory and network file systems.

    Raises:
        UnsuitablePathError: if a directory cannot serve.
        BackendUnavailableError: if cuFile or kvikio was asked for by name and does not work here.
        ConfigError: if there is no directory.
    """
    if not directories:
        raise ConfigError("no directory to offload to; name at least one in HardwareProfile(paths=...)")
    for directory in directories:
        check_directory(directory, allow_unsuitable=allow_unsuitable_paths)
    if choice in ("cufile", "kvikio"):
        named, _ = _open_direct(choice, directories, device)
        return named, f"{named.name}, because {named.why}"
    posix, reason = PosixBackend(directories), "backend='posix' was asked for"
    if choice == "auto" and device.type != "cuda":
        reason = f"cuFile moves memory of CUDA devices, and what moves here is the {device.type}'s"
    elif choice == "auto":
        try:
            direct, direct_s = _open_direct("cufile", directories, device)
        except (OffloadError, torch.OutOfMemoryError) as error:
            reason = f"cuFile does not work here: {error}"
        else:
            posix_s = _proved_s(posix, directories, device)
            reason = f"64 MiB in each directory took cuFile {direct_s:.3f} s there and back, and posix {posix_s:.3f} s"
            if direct_s <= posix_s:
                posix.close()
                return direct, f"{direct.name}, because {direct.why}, and {reason}"
            direct.close()
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
    """Return the seconds in which a backend proves that it gives back what was written. It may load and lose bytes."""
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
