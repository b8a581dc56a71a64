"""Checkpoints that are written and read piece by piece: states that do not fit into memory must not pass through it."""

from __future__ import annotations

import os
import secrets
import zipfile
from functools import partial
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
        target = _local(path)
        if storage_options is not None or target is None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        # Renamed when it is complete and on the drive: a crash leaves the old file or the new one, never half of one.
        # Named before it is there, so that an interrupt never leaves one that nobody knows of.
        name = target.with_name(f".{target.name}-{secrets.token_hex(8)}")
        try:
            with open(name, "xb", opener=partial(os.open, mode=0o600)) as stream:
                _save(checkpoint, stream)
                stream.flush()
                # By descriptor: others may be able to write to the directory, and to put a link in the name's place.
                os.fchmod(stream.fileno(), 0o666 & ~_umask())
                os.fsync(stream.fileno())
            os.replace(name, target)
        except BaseException:
            name.unlink(missing_ok=True)
            raise

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        source = _local(path)
        if source is not None and source.is_file() and zipfile.is_zipfile(source):
            found: dict[str, Any] = torch.load(source, map_location=map_location, weights_only=weights_only, mmap=True)
            return found
        return super().load_checkpoint(path, map_location, weights_only)


def _local(path: str | os.PathLike[str]) -> Path | None:
    """Without "file://" and "~"; ``None``: it leads elsewhere."""
    system = get_filesystem(str(path))
    return Path(system._strip_protocol(str(path))) if type(system).__name__ == "LocalFileSystem" else None


def _save(checkpoint: dict[str, Any], stream: Any) -> None:
    """``torch.save``. An interrupt in the middle of a record comes out of it as a ``RuntimeError`` ("unexpected pos"),
    because it ends the archive all the same: here it comes out as what it is.
    """
    try:
        torch.save(checkpoint, stream)
    except RuntimeError as error:
        cause: BaseException | None = error
        while isinstance(cause, Exception):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise cause from None


def _umask() -> int:
    # There is no way to ask without setting.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
