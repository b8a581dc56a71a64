"""The files that weights wait in, and the memory that shows them.

What is frozen and what changes (trained weights, gradients) have files of their own: the system writes in pieces of up
to 2 MiB, and a piece in which one byte was changed is written whole.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_ssd.common.rounding import round_up
from lightning_ssd.common.tensors import Region, StorageKey, storage_of
from lightning_ssd.common.uninterrupted import Task
from lightning_ssd.errors import OutOfSpaceError, StorageError, UnsuitablePathError, as_storage_error
from lightning_ssd.memory.file_mapping import FileView
from lightning_ssd.memory.mmap import PAGE_BYTES, VECTOR_BYTES, libc
from lightning_ssd.storage.backend import DEFAULT_CHUNK_BYTES, Backend
from lightning_ssd.storage.spill_file import Arena, Extent

__all__ = ["FiledStorage", "MappedStorage", "WeightFiles", "filed_storage", "is_mapped", "unreadable"]

_WAIT_BEFORE, _WRITE = 1, 2  # SYNC_FILE_RANGE_WAIT_BEFORE and SYNC_FILE_RANGE_WRITE
_sync_file_range: Callable[..., int] | None = getattr(libc, "sync_file_range", None)

_mapped: dict[int, tuple[StorageKey, weakref.ref[MappedStorage]]] = {}
"""All that there are in this process, open or not, by the address of their storages."""
_never_private: list[MappedStorage] = []


def is_mapped(storage: torch.UntypedStorage) -> bool:
    """Whether the memory of a storage is one of ours that shows a file, also of an offloader that is closed."""
    return storage._cdata in _mapped


def _after_fork() -> None:
    """A fork has no copy of its own, and the parent goes on to write to the file: nothing may be read there."""
    for _, reference in _mapped.values():
        mapped = reference()
        if mapped is not None:
            mapped.hide()


os.register_at_fork(after_in_child=_after_fork)


class MappedStorage(ABC):
    """One storage whose memory shows a part of a file, so that its pages may leave and come back at any moment.

    Whoever touches it finds the bytes, and what anybody writes to it is kept, whoever holds a view of it.

    Args:
        view: the memory.
        start: where in the view it begins.
        nbytes: of the storage.
    """

    key: StorageKey
    start: int
    """Where in its pages it begins."""

    def __init__(self, view: FileView, start: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._view: FileView | None = view
        self.start = start
        self._shown_bytes = round_up(start + nbytes, PAGE_BYTES)

    def show(self) -> torch.UntypedStorage:
        """A storage over the memory, to which :attr:`key` refers weakly from then on.

        Again only when nobody has the last one any more.
        """
        if self._view is None:
            raise RuntimeError("its place in the file was given back")
        storage = self._view.tensor(self.start, torch.uint8, (self.nbytes,), (1,)).untyped_storage()
        self.key = StorageKey(storage)
        for cdata, (key, _) in list(_mapped.items()):
            if not key.alive():
                _mapped.pop(cdata, None)
        _mapped[self.key.cdata] = self.key, weakref.ref(self)
        return storage

    def bring_in(self) -> None:
        """Read what is not in memory, and map it. Blocks.

        Raises:
            OSError: the drive refuses.
        """
        view = self._view  # once: another thread may forget it meanwhile
        if view is not None:
            view.bring_in(0, self._shown_bytes)

    def bring_in_to_stay(self) -> None:
        """As :meth:`bring_in`, and so that the system takes it back late, although it was not used yet.

        Raises:
            OSError: the drive refuses.
        """
        self.bring_in()

    @abstractmethod
    def read(self, scratch: FileView, is_wanted: Callable[[], bool]) -> None:
        """Have the bytes come to the system's page cache. Blocks.

        Args:
            scratch: shows them meanwhile, part by part.
            is_wanted: asked before each part; the rest is left where it says no.

        Raises:
            OSError: the drive refuses.
        """

    @abstractmethod
    def send_out(self) -> None:
        """Take the pages out of this process, unless something would be lost."""

    @abstractmethod
    def make_private(self) -> None:
        """Whatever is written to the memory from now on stays in this process; nobody sends the pages out any more, nor
        writes to the file. Idempotent.
        """

    @abstractmethod
    def hide(self) -> None:
        """In a fork: let nobody see what the parent writes, if it still may."""

    def forget(self) -> None:
        """Nobody holds the storage any more: unmap the memory, then give its place in the file back. Idempotent."""
        self._view = None


class FiledStorage(MappedStorage):
    """In a file of ours. The mapping is shared with it: what is written to the memory goes there.

    Args:
        view: the memory.
        arena: has the file.
        extent: where in the file.
        nbytes: of the storage.
        start: where in the extent it begins.
    """

    def __init__(self, view: FileView, arena: Arena, extent: Extent, nbytes: int, *, start: int = 0) -> None:
        super().__init__(view, start, nbytes)
        self._arena = arena
        self._fd = arena.fd  # a forked child has it too, and may not ask the arena
        self._extent = extent
        self._shown_bytes = extent.nbytes
        self._is_private = False
        # Guards that it becomes private against whoever takes pages out. A leaf lock.
        self._sharing = threading.RLock()

    def lies_in(self, arenas: Sequence[Arena]) -> bool:
        """Whether one of these has its file."""
        return any(arena is self._arena for arena in arenas)

    def read(self, scratch: FileView, is_wanted: Callable[[], bool]) -> None:
        self.read_part(0, self.nbytes, scratch, is_wanted)

    def send_out(self) -> None:
        self._send_out(0, self._extent.nbytes)

    def _send_out(self, start: int, nbytes: int) -> None:
        if self._is_private:  # what was written would be lost; or as in a fork, see make_private
            return
        with self._sharing:
            view = self._view
            if view is not None and not self._is_private:
                view.send_out(start, nbytes)

    def bring_in_to_stay(self) -> None:
        self.bring_in()
        with self._sharing:
            view = self._view  # once, as in bring_in
            if view is not None and not self._is_private:
                view.bring_in_again(0, self._shown_bytes)

    def read_part(self, start: int, nbytes: int, scratch: FileView, is_wanted: Callable[[], bool]) -> None:
        """As :meth:`read`, of some bytes and the rest of their pages."""
        first, length = self._pages(start, nbytes)
        if not self._is_private:
            with self._arena.use() as fd:
                scratch.read(fd, self._extent.offset + first, length, is_wanted)

    def _pages(self, start: int, nbytes: int) -> tuple[int, int]:
        """Where in the extent the pages of some bytes begin, and how long they are together."""
        start += self.start
        first = start // PAGE_BYTES * PAGE_BYTES
        return first, round_up(start + nbytes, PAGE_BYTES) - first

    def bring_in_part(self, start: int, nbytes: int, *, changes: bool) -> None:
        """Read and map some bytes, and the rest of their pages. Blocks.

        Args:
            start: the first one.
            nbytes: how many.
            changes: all of them will be written to.

        Raises:
            OSError: the drive refuses.
        """
        view = self._view
        if view is not None and not self._is_private:
            view.bring_in(*self._pages(start, nbytes), changes=changes)

    def send_out_part(self, start: int, nbytes: int) -> None:
        """As :meth:`send_out`, of some bytes and the rest of their pages."""
        self._send_out(*self._pages(start, nbytes))

    def begin_writing_part(self, start: int, nbytes: int) -> None:
        """Have the system begin to write some bytes, and the rest of their pages, to the drive.

        Seldom waits: where the drive has as much to do as it takes.
        """
        first, length = self._pages(start, nbytes)
        if not self._is_private:
            with self._arena.use() as fd:
                _begin_writing(fd, self._extent.offset + first, length)

    def make_private(self) -> None:
        """Where the system allows no more private memory, it stays as it is, which is as good, but for a fork."""
        if self._is_private:  # as in a fork, in which nobody gives the lock back
            return
        with self._sharing:
            if self._view is None or self._is_private:
                return
            try:
                self._view.show(0, self._fd, self._extent.offset, self._extent.nbytes)
            except MemoryError:
                _never_private.append(self)  # so that a fork is kept from it
                return
            self._is_private = True

    def hide(self) -> None:
        if self._view is not None and not self._is_private:
            self._is_private = True
            self._view.hide()

    def fill(self, region: Region) -> None:
        """Replace the bytes by those of other memory, through the system's page cache: what is written over is not read
        before, as touching its pages would. Nobody may look at it meanwhile.

        The system begins to write them at once. Else they would fill its page cache until it looks for room there, and
        drive out what was read ahead.

        Raises:
            StorageError: the system refuses. The bytes are of no use then.
        """
        with self._arena.use() as direct:
            try:
                fd = _opened_again(direct)
                if fd is None:
                    self._copy_in(region)
                else:
                    try:
                        _write_all(fd, region, self._extent.offset + self.start)
                    finally:
                        os.close(fd)
                _begin_writing(direct, self._extent.offset, self._extent.nbytes)
            except OSError as error:
                what = f"a weight or gradient could not be written to {self._arena.path}"
                raise as_storage_error(error, what) from error

    def _copy_in(self, region: Region) -> None:
        """Through the memory, whose old bytes are read first: where the drive refuses, touching them is a signal."""
        view = self._view
        assert view is not None
        for start in range(0, region.nbytes, DEFAULT_CHUNK_BYTES):
            nbytes = min(DEFAULT_CHUNK_BYTES, region.nbytes - start)
            view.bring_in(*self._pages(start, nbytes), changes=True)
            ctypes.memmove(view.address + self.start + start, region.address + start, nbytes)

    def forget(self) -> None:
        if self._view is not None:  # else it was, and somebody else may have the place by now
            super().forget()
            self._arena.free(self._extent)


def _opened_again(direct: int) -> int | None:
    """A descriptor for writing through the page cache: the arena's own may go around it, which wants other addresses.
    ``None``: the system gives none (no ``/proc``, or a sandbox that opens nothing in it).
    """
    try:
        return os.open(f"/proc/self/fd/{direct}", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _write_all(fd: int, region: Region, offset: int) -> None:
    left = region.view()
    while left:
        count = os.pwrite(fd, left, offset)
        left, offset = left[count:], offset + count


def _begin_writing(fd: int, offset: int, nbytes: int) -> None:
    """A hint: what the drive refuses is told by whoever waits for the end of the writing (``fdatasync``)."""
    if _sync_file_range is not None:
        _sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(nbytes), _WRITE)


def filed_storage(tensor: torch.Tensor) -> FiledStorage | None:
    """What shows the memory of a tensor in a file of ours; ``None``: it lies elsewhere."""
    if tensor.layout is not torch.strided:
        return None
    try:
        entry = _mapped.get(storage_of(tensor)._cdata)
    except (NotImplementedError, RuntimeError):  # it has no storage
        return None
    found = None if entry is None else entry[1]()
    return found if isinstance(found, FiledStorage) else None


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

    Raises:
        StorageError: a file cannot be made.
        UnsuitablePathError: a file system cannot set space aside.
    """

    def __init__(self, backend: Backend, directories: Sequence[Path], *, first: int = 0) -> None:
        self._backend = backend
        with ExitStack() as opened:
            self._still, self._changing = (_Files(self._open(opened, directories), first) for _ in range(2))
            opened.pop_all()
        self.written_bytes = 0
        self.has_lost = False
        """Whether a drive could not write what was changed. The system tells once: it must not be overlooked."""
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
                    "there would end the process when it is full; allowed: others, such as ext4 or xfs",
                )
            arenas.append(arena)
        return arenas

    def check_room(self, sizes: Sequence[int], *, changes: bool) -> None:
        """Take the space for storages of these sizes before the first one is written.

        Args:
            sizes: of all; see :meth:`size_of`.
            changes: whether they are trained weights or gradients.

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

    def write(self, storage: torch.UntypedStorage, *, changes: bool) -> FiledStorage:
        """Write the bytes of a storage on a CPU to a file; return memory that shows them.

        Args:
            storage: it.
            changes: whether it has weights that are trained.

        Raises:
            OutOfSpaceError: there is no room.
            StorageError: the drive refuses.
            MemoryError: the system cannot map so much.
        """
        nbytes, start = storage.nbytes(), storage.data_ptr() % VECTOR_BYTES
        if start:
            return self._write_unaligned(storage, start, changes=changes)
        arena, extent = self._allocate(self._changing if changes else self._still, nbytes)
        try:
            body = nbytes // self._backend.block_bytes * self._backend.block_bytes
            for start in range(0, body, DEFAULT_CHUNK_BYTES):
                region = Region(storage.data_ptr() + start, min(DEFAULT_CHUNK_BYTES, body - start))
                self._backend.write(arena, region, extent.offset + start)
            self._write_tail(arena, Region(storage.data_ptr() + body, nbytes - body), extent.offset + body)
            view = _shown(arena, extent)
        except BaseException:
            arena.free(extent)
            raise
        self.written_bytes += extent.nbytes
        return FiledStorage(view, arena, extent, nbytes)

    def _write_unaligned(self, storage: torch.UntypedStorage, start: int, *, changes: bool) -> FiledStorage:
        """Through the page cache, since it does not begin with a block: what it is shown by is aligned as it is."""
        mapped = self.map_new(storage.nbytes(), start, changes=changes)
        try:
            mapped.fill(Region.of(storage))
        except BaseException:
            mapped.forget()
            raise
        self.written_bytes += mapped.nbytes
        return mapped

    @staticmethod
    def size_of(storage: torch.UntypedStorage) -> int:
        """What a storage takes in a file, but for the rest of the last block."""
        return storage.nbytes() + storage.data_ptr() % VECTOR_BYTES

    def _write_tail(self, arena: Arena, tail: Region, offset: int) -> None:
        """Less than a block, with zeros behind it."""
        if tail.nbytes:
            block = torch.zeros(self._backend.block_bytes, dtype=torch.uint8)
            ctypes.memmove(block.data_ptr(), tail.address, tail.nbytes)
            self._backend.write(arena, Region(block.data_ptr(), block.nbytes), offset)

    def map_new(self, nbytes: int, start: int = 0, *, changes: bool = True) -> FiledStorage:
        """Memory that shows a part of a file with arbitrary bytes.

        Args:
            nbytes: of the memory.
            start: where in its pages it begins.
            changes: whether it is for weights that are trained, or gradients.

        Raises:
            OutOfSpaceError: there is no room.
            MemoryError: the system cannot map so much.
        """
        arena, extent = self._allocate(self._changing if changes else self._still, start + nbytes)
        try:
            return FiledStorage(_shown(arena, extent), arena, extent, nbytes, start=start)
        except BaseException:
            arena.free(extent)
            raise

    def _allocate(self, files: _Files, nbytes: int) -> tuple[Arena, Extent]:
        arena = files.arenas[files.next % len(files.arenas)]
        files.next += 1
        return arena, arena.allocate(self._padded(nbytes))

    def is_still(self, storage: MappedStorage) -> bool:
        """Whether it lies where what is frozen does."""
        return isinstance(storage, FiledStorage) and storage.lies_in(self._still.arenas)

    @property
    def _arenas(self) -> list[Arena]:
        return [*self._still.arenas, *self._changing.arenas]

    def check_written(self) -> None:
        """See whether the system could write what it has written since the last time. Waits for what it writes now.

        Raises:
            StorageError: a drive refuses: what is in memory is right, but may leave it.
        """
        look = _sync_file_range
        if look is None:
            return
        for arena in self._arenas:
            with arena.use() as fd:
                if look(fd, ctypes.c_int64(0), ctypes.c_int64(0), _WAIT_BEFORE):
                    raise self._lost(arena, OSError(ctypes.get_errno(), ""))

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
                    raise self._lost(arena, error) from error

    def _lost(self, arena: Arena, error: OSError) -> StorageError:
        self.has_lost = True
        what = f"weights or gradients that were changed could not be written to {arena.path}; go on from a checkpoint"
        return as_storage_error(error, what)

    @property
    def used_bytes(self) -> int:
        """What waits in them."""
        return sum(arena.used_bytes for arena in self._arenas)

    @property
    def disk_bytes(self) -> int:
        """Size of the files."""
        return sum(arena.size_bytes for arena in self._arenas)

    def close(self) -> None:
        """Close the files. What shows them goes on to do so. Idempotent."""
        if self._check is not None:
            self._check.wait()
        for arena in self._arenas:
            arena.close()

    def _padded(self, nbytes: int) -> int:
        return round_up(nbytes, self._backend.block_bytes)


def _shown(arena: Arena, extent: Extent) -> FileView:
    view = FileView(extent.nbytes, offset=extent.offset)
    arena.show(view, 0, extent.offset, extent.nbytes, shared=True)
    return view


def unreadable(names: Sequence[str], nbytes: int, error: OSError) -> StorageError:
    """What a drive's refusal means to the user."""
    return StorageError(
        error.errno or errno.EIO,
        f"weight {', '.join(names)} ({nbytes:,} bytes) could not be read from its drive: "
        f"{os.strerror(error.errno or errno.EIO)}; training cannot go on without it. Go on from a checkpoint, with "
        "another drive",
    )
