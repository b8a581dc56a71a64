"""The files that weights wait in.

What is frozen and what changes (trained weights, gradients) have files of their own: the system writes in pieces of up
to 2 MiB, and a piece in which one byte was changed is written whole.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import torch

from lightning_ssd.common.rounding import round_up
from lightning_ssd.common.task import Task
from lightning_ssd.common.tensors import Region
from lightning_ssd.errors import OutOfSpaceError, StorageError, UnsuitablePathError, as_storage_error
from lightning_ssd.memory.mmap import HUGE_PAGE_BYTES, VECTOR_BYTES
from lightning_ssd.parameters.files.mapped_storage import MappedStorage, Stripe, free_stripes, write_refusal
from lightning_ssd.storage.backend import DEFAULT_CHUNK_BYTES, Backend
from lightning_ssd.storage.spill_file import Arena, reserve_together

__all__ = ["WeightFiles"]

_STEP_BYTES = HUGE_PAGE_BYTES
"""Directories get multiples of it: the system writes no less at a time, and maps as much in one piece."""


class WeightFiles:
    """Two files in each directory, one of them for what changes. What is large lies in all directories.

    Args:
        backend: writes them. Its files have the bytes as they are.
        directories: where.
        order: numbers of the directories, which the first weights go to one after the other.
        rates: of the directories, which get bytes in proportion to them; empty: they are alike.
    """

    def __init__(
        self, backend: Backend, directories: Sequence[Path], *, order: Sequence[int] = (), rates: Sequence[float] = ()
    ) -> None:
        self._backend = backend
        self.num_drives = len(directories)
        self._order = order or range(self.num_drives)
        total = sum(rates)
        self._shares = [rate / total for rate in rates] if total else [1 / self.num_drives] * self.num_drives
        with ExitStack() as opened:
            self._still, self._changing = (self._open(opened, directories) for _ in range(2))
            opened.pop_all()
        self._check: Task[None] | None = None

    def _open(self, opened: ExitStack, directories: Sequence[Path]) -> list[Arena]:
        arenas = []
        for directory in directories:
            arena = self._backend.open_arena(directory)
            opened.callback(arena.close)
            with suppress(OutOfSpaceError):  # check_room tells where there is no other
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
            OutOfSpaceError: all directories together have not enough. Nothing was moved.
        """
        arenas = self._changing if changes else self._still
        if sizes:
            nbytes = sum(arena.used_bytes for arena in arenas) + sum(map(self._padded, sizes))
            reserve_together(arenas, nbytes, "weights")

    def write(self, storage: torch.UntypedStorage, *, changes: bool) -> MappedStorage:
        """Write the bytes of a storage on a CPU to files, to all drives at once; return memory that shows them."""
        nbytes, start = storage.nbytes(), storage.data_ptr() % VECTOR_BYTES
        if start:
            # Through the page cache, since it does not begin with a block: what it is shown by is aligned as it is.
            mapped = self.map_new(nbytes, start, changes=changes)
            try:
                mapped.fill(Region.of(storage))
            except BaseException:
                mapped.forget()
                raise
            return mapped
        stripes, others = self._allocate(nbytes, changes=changes), list[Task[None]]()
        try:
            by_drive: dict[int, list[Stripe]] = {}
            for stripe in stripes:
                by_drive.setdefault(stripe.drive, []).append(stripe)
            writes = [partial(self._write_stripes, storage, mine) for mine in by_drive.values()]
            others += [Task(write, "lightning_ssd-weights") for write in writes[1:]]
            with ExitStack() as ending:  # while one is written, nothing else may get its place
                for other in others:
                    ending.callback(other.wait)
                    other.start()
                writes[0]()
            for other in others:
                other.result()
            return MappedStorage(stripes, nbytes)
        except BaseException:
            if all(other.wait_for(0.0) for other in others):  # else an interrupt has come, and one still writes there
                free_stripes(stripes)
            raise

    def _write_stripes(self, storage: torch.UntypedStorage, stripes: Sequence[Stripe]) -> None:
        """Write those of one drive, one after the other."""
        for stripe in stripes:
            end = min(stripe.start + stripe.nbytes, storage.nbytes())
            body = stripe.start + (end - stripe.start) // self._backend.block_bytes * self._backend.block_bytes
            for start in range(stripe.start, body, DEFAULT_CHUNK_BYTES):
                region = Region(storage.data_ptr() + start, min(DEFAULT_CHUNK_BYTES, body - start))
                self._backend.write(stripe.arena, region, stripe.extent.offset + start - stripe.start)
            if body < end:  # less than a block, with zeros behind it
                block = torch.zeros(self._backend.block_bytes, dtype=torch.uint8, device="cpu")
                ctypes.memmove(block.data_ptr(), storage.data_ptr() + body, end - body)
                tail = Region(block.data_ptr(), block.nbytes)
                self._backend.write(stripe.arena, tail, stripe.extent.offset + body - stripe.start)

    @staticmethod
    def size_of(storage: torch.UntypedStorage) -> int:
        """Return what a storage takes in a file, but for the rest of the last block."""
        return storage.nbytes() + storage.data_ptr() % VECTOR_BYTES

    def map_new(self, nbytes: int, start: int = 0, *, changes: bool = True) -> MappedStorage:
        """Memory that shows parts of files with arbitrary bytes.

        Args:
            nbytes: of the memory.
            start: where in its pages it begins.
            changes: whether it is for weights that are trained, or gradients.
        """
        stripes = self._allocate(start + nbytes, changes=changes)
        try:
            return MappedStorage(stripes, nbytes, start=start)
        except BaseException:
            free_stripes(stripes)
            raise

    def _allocate(self, nbytes: int, *, changes: bool) -> list[Stripe]:
        """Return room in the directories, by what each lacks of its share; what one has no room for, others get.

        Raises:
            OutOfSpaceError: all directories together have no room.
        """
        arenas = self._changing if changes else self._still
        nbytes, used, stripes, done = self._padded(nbytes), [arena.used_bytes for arena in arenas], list[Stripe](), 0
        lacking = [(sum(used) + nbytes) * share - have for share, have in zip(self._shares, used, strict=True)]
        drives = sorted(self._order, key=lambda drive: -lacking[drive])
        wanted = [(drive, round_up(max(int(lacking[drive]), 0), _STEP_BYTES), _STEP_BYTES) for drive in drives]
        # In the end what is reserved is used to the last block.
        wanted += [(drive, nbytes, self._backend.block_bytes) for drive in drives]
        refusal: OutOfSpaceError | None = None
        try:
            for drive, most, least in wanted:
                left = piece = min(most, nbytes - done)
                while piece:
                    try:
                        extent = arenas[drive].allocate(piece)
                    except OutOfSpaceError as error:
                        refusal, half = error, piece // 2
                        piece = half // _STEP_BYTES * _STEP_BYTES or half // least * least
                        continue
                    stripes.append(Stripe(drive, arenas[drive], extent, done, piece))
                    done, left = done + piece, left - piece
                    piece = min(piece, left)
            if done < nbytes and refusal is not None:
                raise refusal
        except BaseException:
            free_stripes(stripes)
            raise
        finally:
            refusal = None  # it holds our frame, which holds our caller's, and so the storage
        return stripes

    def is_still(self, storage: MappedStorage) -> bool:
        return storage.stripes[0].arena in self._still

    @property
    def _arenas(self) -> list[Arena]:
        return [*self._still, *self._changing]

    def look_for_losses(self) -> None:
        """Begin to see, in a thread, whether the system could write what it has written; tell what the last look found.

        Raises:
            StorageError: a drive has refused: what is in memory is right, but may leave it.
        """
        check = self._check
        if check is not None and not check.is_done:
            return

        def wait_for_writes() -> None:
            for arena in self._arenas:
                with arena.use() as fd:
                    if (refusal := write_refusal(fd)) is not None:
                        raise _lost(arena, refusal) from refusal

        self._check = Task(wait_for_writes, "lightning_ssd-written")
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
        pairs = zip(self._still, self._changing, strict=True)
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
