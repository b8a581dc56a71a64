"""The choice of a backend: the fastest one that proves itself in the directories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from lightning_ssd.errors import BackendUnavailableError, ConfigError, OffloadError
from lightning_ssd.storage.backend import Backend
from lightning_ssd.storage.drive_probe import read_back_ok
from lightning_ssd.storage.filesystem import check_directory
from lightning_ssd.storage.posix import PosixBackend

if TYPE_CHECKING:
    from lightning_ssd.storage.kvikio import KvikioBackend

__all__ = ["open_backend"]

_GDS = "kvikio GDS"


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
    try:
        for directory in directories:
            if not read_back_ok(backend, directory, device=device if backend.moves_device_memory else "cpu"):
                raise BackendUnavailableError(f"kvikio did not read back from {directory} what it had written there")
    except BaseException:
        backend.close()
        raise
