"""The files that weights wait in.

What is frozen and what changes (trained weights, gradients) have files of their own: the system writes in pieces of up
to 2 MiB, and a piece in which one byte was changed is written whole.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_ssd.common.rounding import round_up
from lightning_ssd.common.task import Task
from lightning_ssd.common.tensors import Region
from lightning_ssd.errors import OutOfSpaceError, StorageError, UnsuitablePathError, as_storage_error
from lightning_ssd.memory.file_mapping import FileView
from lightning_ssd.memory.mmap import VECTOR_BYTES
from lightning_ssd.parameters.files.mapped_storage import MappedStorage, write_refusal
from lightning_ssd.storage.backend import DEFAULT_CHUNK_BYTES, Backend
from lightning_ssd.storage.spill_file import Arena

__all__ = ["WeightFiles"]


@dataclass(slots=True)
class _Files:
    """One in each directory, and whose turn it is."""

    arenas: list[Arena]
    next: int


class WeightFiles:
    """Two files in each directory, one of them for what changes; each weight lies in one of them, in turn.

    Args:
        backend: writes them. Its files have the bytes as they are.
        directories: where.
        first: directory that the first weight goes to.
    """

    def __init__(self, backend: Backend, directories: Sequence[Path], *, first: int = 0) -> None:
        self._backend = backend
        with ExitStack() as opened:
            self._still, self._changing = (_Files(self._open(opened, directories), first) for _ in range(2))
            opened.pop_all()
        self._check: Task[None] | None = None

    def _open(self, opened: ExitStack, directories: Sequence[Path]) -> list[Arena]:
        arenas = []
        for directory in directories:
            arena = self._backend.open_arena(directory)
            opened.callback(arena.close)
            arena.reserve(self._backend.block_bytes)
            if arena.is_sparse:
                raise UnsuitablePathError(
                    errno.EOPNOTSUPP,
                    f"{directory} lies on a file system that cannot set space aside (fallocate), so that weights "
                    "there would end the process when it is full; name a directory of another one, such as ext4 or xfs",
                )
            arenas.append(arena)
        return arenas

    def check_room(self, sizes: Sequence[int], *, changes: bool) -> None:
        """Take the space for storages of these sizes before the first one is written.

        Raises:
            OutOfSpaceError: there is not enough. Nothing was moved.
        """
        files = self._changing if changes else self._still
        needs = [0] * len(files.arenas)
        for number, nbytes in enumerate(sizes):
            needs[(files.next + number) % len(needs)] += self._padded(nbytes)
        for arena, need in zip(files.arenas, needs, strict=True):
            try:
                arena.reserve(arena.used_bytes + need)
            except OutOfSpaceError as error:
                raise OutOfSpaceError(
                    error.errno, f"weights need {need:,} bytes in {arena.directory}: {error}"
                ) from error

    def write(self, storage: torch.UntypedStorage, *, changes: bool) -> MappedStorage:
        """Write the bytes of a storage on a CPU to a file; return memory that shows them."""
        start = storage.data_ptr() % VECTOR_BYTES
        mapped = self.map_new(storage.nbytes(), start, changes=changes)
        try:
            if start:  # the bytes do not begin with a block: through the page cache
                mapped.fill(Region.of(storage))
            else:
                self._write_blocks(mapped.arena, mapped.extent.offset, Region.of(storage))
        except BaseException:
            mapped.forget()
            raise
        return mapped

    @staticmethod
    def size_of(storage: torch.UntypedStorage) -> int:
        """Return what a storage takes in a file, but for the rest of the last block."""
        return storage.nbytes() + storage.data_ptr() % VECTOR_BYTES

    def _write_blocks(self, arena: Arena, offset: int, region: Region) -> None:
        """Write past the page cache, with zeros behind the last byte."""
        body = region.nbytes // self._backend.block_bytes * self._backend.block_bytes
        for start in range(0, body, DEFAULT_CHUNK_BYTES):
            chunk = Region(region.address + start, min(DEFAULT_CHUNK_BYTES, body - start))
            self._backend.write(arena, chunk, offset + start)
        if body < region.nbytes:
            block = torch.zeros(self._backend.block_bytes, dtype=torch.uint8)
            ctypes.memmove(block.data_ptr(), region.address + body, region.nbytes - body)
            self._backend.write(arena, Region(block.data_ptr(), block.nbytes), offset + body)

    def map_new(self, nbytes: int, start: int = 0, *, changes: bool = True) -> MappedStorage:
        """Memory that shows a part of a file with arbitrary bytes.

        Args:
            nbytes: of the memory.
            start: where in its pages it begins.
            changes: whether it is for weights that are trained, or gradients.
        """
        files = self._changing if changes else self._still
        arena = files.arenas[files.next % len(files.arenas)]
        files.next += 1
        extent = arena.allocate(self._padded(start + nbytes))
        try:
            view = FileView(extent.nbytes, offset=extent.offset)
            arena.show(view, 0, extent.offset, extent.nbytes, shared=True)
            return MappedStorage(view, arena, extent, nbytes, start=start)
        except BaseException:
            arena.free(extent)
            raise

    def is_still(self, storage: MappedStorage) -> bool:
        return storage.arena in self._still.arenas

    @property
    def _arenas(self) -> list[Arena]:
        return [*self._still.arenas, *self._changing.arenas]

    def check_written(self) -> None:
        """See whether the system could write what it has written since the last time. Waits for what it writes now.

        Raises:
            StorageError: a drive refuses: what is in memory is right, but may leave it.
        """
        for arena in self._arenas:
            with arena.use() as fd:
                if (refusal := write_refusal(fd)) is not None:
                    raise _lost(arena, refusal) from refusal

    def look_for_losses(self) -> None:
        """Begin to see, in a thread, whether the system could write what it has written; tell what the last look found.

        Raises:
            StorageError: a drive has refused: what is in memory is right, but may leave it.
        """
        check = self._check
        if check is not None and not check.is_done:
            return
        self._check = Task(self.check_written, "lightning_ssd-written")
        self._check.start()
        if check is not None:
            check.result()

    def sync(self) -> None:
        """Block until the drives have all that was written to the weights in place.

        Raises:
            StorageError: one could not write something: what is in memory is right, but may leave it.
        """
        for arena in self._arenas:
            with arena.use() as fd:
                try:
                    os.fdatasync(fd)
                except OSError as error:
                    raise _lost(arena, error) from error

    def written_bytes(self) -> list[int]:
        """Return the bytes that were written in each directory, without those that programs have written in place."""
        pairs = zip(self._still.arenas, self._changing.arenas, strict=True)
        return [still.written_bytes + changing.written_bytes for still, changing in pairs]

    @property
    def used_bytes(self) -> int:
        return sum(arena.used_bytes for arena in self._arenas)

    @property
    def disk_bytes(self) -> int:
        return sum(arena.size_bytes for arena in self._arenas)

    def close(self) -> None:
        """Close the files. What shows them goes on to do so. Idempotent."""
        if self._check is not None:
            self._check.wait()
        for arena in self._arenas:
            arena.close()

    def _padded(self, nbytes: int) -> int:
        return round_up(nbytes, self._backend.block_bytes)


def _lost(arena: Arena, error: OSError) -> StorageError:
    what = f"weights or gradients that were changed could not be written to {arena.directory}; go on from a checkpoint"
    return as_storage_error(error, what)
