"""Checkpoints that are written and read piece by piece: states that do not fit into memory must not pass through it."""

from __future__ import annotations

import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from typing_extensions import override

__all__ = ["StreamedCheckpointIO"]


class StreamedCheckpointIO(TorchCheckpointIO):
    """Lightning's own checkpoints, byte by byte readable without us, without its copy of the whole in memory.

    Local files only: what goes elsewhere goes Lightning's way.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        if storage_options is not None or not _is_local(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path).absolute()
        target.parent.mkdir(parents=True, exist_ok=True)
        # Renamed when it is complete and on the drive: a crash leaves the old file or the new one, never half of one.
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
        try:
            with os.fdopen(handle, "wb") as stream:
                torch.save(checkpoint, stream)
                stream.flush()
                os.fsync(stream.fileno())
            os.chmod(name, 0o666 & ~_umask())
            os.replace(name, target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        if _is_local(path) and os.path.isfile(path) and zipfile.is_zipfile(path):
            found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True)
            return found
        return super().load_checkpoint(path, map_location, weights_only)


def _is_local(path: str | os.PathLike[str]) -> bool:
    return type(get_filesystem(str(path))).__name__ == "LocalFileSystem"


def _umask() -> int:
    # There is no way to ask without setting.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
