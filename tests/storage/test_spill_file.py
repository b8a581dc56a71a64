"""The spill file: anonymous and private, in extents that no two owners share, its own process's alone."""

from __future__ import annotations

import errno
import gc
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_ssd.errors import OffloaderClosedError, StorageError
from lightning_ssd.memory.file_mapping import FileView
from lightning_ssd.storage import spill_file as arena_module
from lightning_ssd.storage.extents import Extent
from lightning_ssd.storage.spill_file import Arena
from tests.support.arenas import MIB, open_arena
from tests.support.threads import at_once
from tests.support.weight_loops import in_a_fork


def refuse_tmpfile(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Behave like a file system without anonymous files."""
    real = os.open

    def fake(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(code, os.strerror(code))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(arena_module.os, "open", fake)


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    with_arena = open_arena(tmp_path)
    yield with_arena
    with_arena.close()


class TestFile:
    @pytest.fixture(params=[None, errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT])
    def arena(self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
        """With anonymous files, and where a file system or a kernel has none."""
        if request.param is not None:
            refuse_tmpfile(monkeypatch, request.param)
        with_arena = open_arena(tmp_path)
        assert os.fstat(with_arena.fd).st_nlink == 0
        yield with_arena
        with_arena.close()

    def test_close_leaves_nothing(self, arena: Arena, tmp_path: Path) -> None:
        arena.allocate(MIB)
        arena.close()
        arena.close()
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize(("code", "is_told"), [(errno.ENOTCONN, False), (errno.EIO, False), (errno.EBADF, True)])
    def test_a_lost_file_system_fails_no_close(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, is_told: bool
    ) -> None:
        """Its bytes were to go anyway. A descriptor that is none is a fault of ours."""
        arena, real = open_arena(tmp_path), os.close
        lost = arena.fd

        def fail(fd: int) -> None:
            real(fd)
            if fd == lost:
                raise OSError(code, os.strerror(code))

        monkeypatch.setattr(arena_module.os, "close", fail)
        if is_told:
            with pytest.raises(OSError, match="Bad file descriptor"):
                arena.close()
        else:
            arena.close()
            assert os.listdir(tmp_path) == []

    def test_two_arenas_share_a_directory(self, arena: Arena, tmp_path: Path) -> None:
        other = open_arena(tmp_path)
        assert os.fstat(arena.fd).st_ino != os.fstat(other.fd).st_ino
        other.close()
        again = open_arena(tmp_path)
        assert again.allocate(MIB).nbytes == MIB
        again.close()

    def test_missing_directory(self, tmp_path: Path) -> None:
        with pytest.raises(StorageError, match=r"cannot create a spill file in .*absent.*No such file") as caught:
            open_arena(tmp_path / "absent")
        assert caught.value.errno == errno.ENOENT

    def test_directories_that_vanish_are_made_again(self, tmp_path: Path) -> None:
        """Others close their arenas, and with them the directory, at any moment."""

        def work() -> None:
            for _ in range(50):
                arena = open_arena(tmp_path)
                arena.close()

        at_once(*[work] * 3)


class TestPrivateDirectory:
    def test_refuses_a_directory_that_others_may_enter(self, tmp_path: Path) -> None:
        folder = tmp_path / f".lightning_ssd-{os.geteuid()}"
        folder.mkdir()
        folder.chmod(0o755)
        with pytest.raises(StorageError, match=r"mode 0755; it must be of user .* with mode 0700"):
            open_arena(tmp_path)


class TestExtents:
    def test_sizes_and_reuse(self, arena: Arena) -> None:
        first, second = arena.allocate(1), arena.allocate(5000)
        assert (first, second) == (Extent(0, 4096), Extent(4096, 8192))
        assert arena.used_bytes == 12288
        arena.free(first)
        assert arena.allocate(4096) == first
        assert arena.size_bytes == os.fstat(arena.fd).st_size

    def test_zero_bytes_take_no_place(self, arena: Arena) -> None:
        nothing = arena.allocate(0)
        assert nothing.nbytes == 0
        arena.free(nothing)
        arena.free(nothing)
        assert arena.size_bytes == 0

    def test_double_and_foreign_frees(self, arena: Arena) -> None:
        extent = arena.allocate(8192)
        with pytest.raises(ValueError, match="not lent"):
            arena.free(Extent(extent.offset, 4096))
        arena.free(extent)
        with pytest.raises(ValueError, match="freed twice"):
            arena.free(extent)

    def test_disk_use_is_constant_over_steps(self, arena: Arena) -> None:
        random.seed(1)
        sizes = [random.randrange(1, 6) * MIB + 17 for _ in range(30)]
        seen = set()
        for _ in range(20):
            lent = [arena.allocate(nbytes) for nbytes in sizes]
            random.shuffle(lent)
            for extent in lent:
                arena.free(extent)
            seen.add((arena.size_bytes, os.fstat(arena.fd).st_blocks))
        assert len(seen) == 1

    def test_freeing_inside_a_locked_section_does_not_deadlock(self, arena: Arena) -> None:
        """Garbage collection may finalise an extent's owner while this very thread is inside ``allocate``."""

        class Owner:
            def __init__(self) -> None:
                self.extent, self.itself = arena.allocate(4096), self

            def __del__(self) -> None:
                arena.free(self.extent)

        for _ in range(100):
            Owner()
        with arena._lock:
            gc.collect()
        assert arena.used_bytes == 0


class TestOwnership:
    @pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
    def test_a_forked_child_cannot_use_it(self, arena: Arena) -> None:
        """And where it closes it, it leaves the bytes."""
        extent = arena.allocate(MIB)
        os.pwrite(arena.fd, b"of the parent", extent.offset)

        def use() -> None:
            arena.free(extent)
            with pytest.raises(StorageError, match="cannot be shared with its child"):
                arena.allocate(MIB)
            arena.close()

        with arena._lock:  # another thread of the parent might hold it at the fork
            assert in_a_fork(use) == 0
        assert arena.used_bytes == MIB
        assert os.fstat(arena.fd).st_size == arena.size_bytes > 0
        assert os.pread(arena.fd, 13, extent.offset) == b"of the parent"

    @pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
    @pytest.mark.parametrize("is_mapped", [False, True])
    def test_a_forked_child_keeps_no_space(self, arena: Arena, is_mapped: bool) -> None:
        """But where the file is shown as memory, which outlives it."""
        extent = arena.allocate(MIB)
        if is_mapped:
            arena.show(FileView(MIB), 0, extent.offset, MIB)
        size, mine = arena.size_bytes, os.dup(arena.fd)  # looks at the file after it is closed
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(theirs)
                os.read(ours, 1)  # until the parent has closed the other end
            finally:
                os._exit(0)
        try:
            arena.close()
            assert os.fstat(mine).st_size == (size if is_mapped else 0)
            assert (os.fstat(mine).st_blocks == 0) is not is_mapped
        finally:
            os.close(theirs)
            os.close(ours)
            os.close(mine)
            os.waitpid(child, 0)

    def test_after_close(self, arena: Arena) -> None:
        extent = arena.allocate(MIB)
        arena.close()
        arena.free(extent)
        with pytest.raises(OffloaderClosedError, match="is closed"):
            arena.allocate(MIB)
        with pytest.raises(OffloaderClosedError):
            _ = arena.fd

    def test_close_waits_for_transfers(self, arena: Arena) -> None:
        """The number must not go to another file while somebody writes to it."""
        with arena.use() as fd:
            arena.close()
            with pytest.raises(OffloaderClosedError), arena.use():
                pass
            os.fstat(fd)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
