"""Write and read checkpoints piece by piece, because offloaded states may not fit into memory together."""

from __future__ import annotations

import os
import secrets
import zipfile
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_ssd.common.interrupts import deferring_interrupts
from lightning_ssd.common.status_line import StatusLine

__all__ = ["StreamedCheckpointIO"]


class StreamedCheckpointIO(TorchCheckpointIO):
    """Writes Lightning's own checkpoints, readable without this package, without a copy of the whole in memory.

    It handles local files. All other paths are left to Lightning.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        target = _local(path)
        if storage_options is not None or target is None:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        # Renamed when it is complete and on the drive: a crash leaves the old file or the new one, never half of one.
        # Named before it is there, so that an interrupt never leaves an unknown one.
        name = target.with_name(f".{target.name}-{secrets.token_hex(8)}")
        try:
            with (
                open(name, "xb", opener=partial(os.open, mode=0o600)) as stream,
                StatusLine(f"Saving {target.name}") as line,
            ):
                _save(checkpoint, _WatchedFile(stream, line, _num_bytes(checkpoint)))
                stream.flush()
                # By descriptor: other users may be able to write to the directory, and to replace the name by a link.
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


class _WatchedFile:
    """Wraps a file for ``torch.save``, and shows on a status line how much has been written.

    After the file is closed, writes are dropped. PyTorch writes the end of an interrupted archive from a destructor in
    C++, where an error would end the process. The end of a complete archive is written before.

    Args:
        stream: the file.
        line: the status line.
        total_bytes: approximate number of bytes to come; 0: unknown.
    """

    def __init__(self, stream: BinaryIO, line: StatusLine, total_bytes: int) -> None:
        self._stream, self._line = stream, line
        self._done_bytes, self._total_bytes = 0, total_bytes
        self.flush = stream.flush

    def write(self, data: Any) -> int:
        if self._stream.closed:
            return memoryview(data).nbytes
        count = self._stream.write(data)
        self._done_bytes += count
        self._line.update(self._done_bytes, self._total_bytes)
        return count


def _num_bytes(checkpoint: dict[str, Any]) -> int:
    """Return the bytes of all tensors; 0 if unknown."""
    try:
        return sum(leaf.nbytes for leaf in tree_leaves(checkpoint) if isinstance(leaf, torch.Tensor))
    except Exception:  # of whatever class: the number is not needed
        return 0


def _local(path: str | os.PathLike[str]) -> Path | None:
    """Return a local path without "file://" and "~"; ``None``: it is no local path."""
    system = get_filesystem(str(path))
    return Path(system._strip_protocol(str(path))) if type(system).__name__ == "LocalFileSystem" else None


def _save(checkpoint: dict[str, Any], stream: Any) -> None:
    """Call ``torch.save``, and raise an interrupt as what it is.

    An interrupt in the middle of a record becomes a ``RuntimeError`` ("unexpected pos"), because PyTorch still tries to
    end the archive.
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
    # The mask cannot be read without setting it.
    with deferring_interrupts():
        mask = os.umask(0o077)
        os.umask(mask)
    return mask
