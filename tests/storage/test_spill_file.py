"""The spill file: anonymous and private, in extents that no two owners share, its own process's alone."""

import errno
import gc
import itertools
import os
import random
from contextlib import closing
from types import SimpleNamespace

import pytest

from lightning_ssd.errors import OffloaderClosedError, OutOfSpaceError, StorageError
from lightning_ssd.memory.file_mapping import FileView
from lightning_ssd.storage import spill_file as arena_module
from tests.support.arenas import MIB, open_arena
from tests.support.weight_loops import in_a_fork


def refuse_tmpfile(monkeypatch, code):
    """Behave like a file system without anonymous files."""
    real = os.open

    def fake(path, flags, *args, **kwargs):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(code, os.strerror(code))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(arena_module.os, "open", fake)


@pytest.fixture
def arena(tmp_path):
    with closing(open_arena(tmp_path)) as opened:
        yield opened


class TestFile:
    @pytest.fixture(params=[None, errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT])
    def arena(self, request, tmp_path, monkeypatch):
        """With anonymous files, and where a file system or a kernel has none."""
        if request.param is not None:
            refuse_tmpfile(monkeypatch, request.param)
        with closing(open_arena(tmp_path)) as opened:
            assert os.fstat(opened.fd).st_nlink == 0
            yield opened

    def test_close_leaves_nothing(self, arena, tmp_path):
        arena.allocate(MIB)
        arena.close()
        arena.close()
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize(("code", "is_told"), [(errno.ENOTCONN, False), (errno.EIO, False), (errno.EBADF, True)])
    def test_a_lost_file_system_fails_no_close(self, tmp_path, monkeypatch, code, is_told):
        """Its bytes were to go anyway. A descriptor that is none is a fault of ours."""
        arena, real = open_arena(tmp_path), os.close
        lost = arena.fd

        def fail(fd):
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

    def test_two_arenas_share_a_directory(self, arena, tmp_path):
        other = open_arena(tmp_path)
        assert os.fstat(arena.fd).st_ino != os.fstat(other.fd).st_ino
        other.close()
        again = open_arena(tmp_path)
        assert again.allocate(MIB).nbytes == MIB
        again.close()

    def test_missing_directory(self, tmp_path):
        with pytest.raises(StorageError, match=r"cannot create a spill file in .*absent.*No such file") as caught:
            open_arena(tmp_path / "absent")
        assert caught.value.errno == errno.ENOENT


class TestExtents:
    def test_zero_bytes_take_no_place(self, arena):
        nothing = arena.allocate(0)
        assert nothing.nbytes == 0
        arena.free(nothing)
        arena.free(nothing)
        assert arena.size_bytes == 0

    def test_disk_use_is_constant_over_steps(self, arena):
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

    def test_freeing_inside_a_locked_section_does_not_deadlock(self, arena):
        """Garbage collection may finalise an extent's owner while this very thread is inside ``allocate``."""

        class Owner:
            def __init__(self):
                self.extent, self.itself = arena.allocate(4096), self

            def __del__(self):
                arena.free(self.extent)

        for _ in range(100):
            Owner()
        with arena._lock:
            gc.collect()
        assert arena.used_bytes == 0


class TestOwnership:
    @pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
    def test_a_forked_child_cannot_use_it(self, arena):
        """And where it closes it, it leaves the bytes."""
        extent = arena.allocate(MIB)
        os.pwrite(arena.fd, b"of the parent", extent.offset)

        def use():
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
    def test_a_forked_child_keeps_no_space(self, arena, is_mapped):
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

    def test_after_close(self, arena):
        extent = arena.allocate(MIB)
        arena.close()
        arena.free(extent)
        with pytest.raises(OffloaderClosedError, match="is closed"):
            arena.allocate(MIB)
        with pytest.raises(OffloaderClosedError):
            _ = arena.fd

    def test_close_waits_for_transfers(self, arena):
        """The number must not go to another file while somebody writes to it."""
        with arena.use() as fd:
            arena.close()
            with pytest.raises(OffloaderClosedError), arena.use():
                pass
            os.fstat(fd)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def free_bytes(directory):
    facts = os.statvfs(directory)
    return facts.f_bavail * facts.f_frsize


class TestGrowth:
    def test_in_chunks_of_a_quarter(self, tmp_path, monkeypatch):
        monkeypatch.setattr(arena_module, "_FIRST_GROWTH_BYTES", MIB)
        with closing(open_arena(tmp_path)) as arena:
            sizes = [(arena.allocate(MIB // 2), arena.size_bytes)[1] for _ in range(64)]
        steps = [b - a for a, b in itertools.pairwise(sizes) if b > a]
        assert sizes[0] == MIB
        assert steps[-1] >= sizes[-1] // 6
        assert len(set(sizes)) < 20

    def test_uses_the_free_end(self, tmp_path, monkeypatch):
        monkeypatch.setattr(arena_module, "_FIRST_GROWTH_BYTES", 4096)
        with closing(open_arena(tmp_path)) as arena:
            arena.allocate(4096 * 3)
            last = arena.allocate(4096)
            arena.free(last)
            assert arena.allocate(4096 * 3).offset == last.offset
            assert arena.size_bytes == 4096 * 6

    def test_without_fallocate(self, tmp_path, monkeypatch):
        monkeypatch.setattr(arena_module, "_fallocate", None)
        with closing(open_arena(tmp_path)) as arena:
            assert arena.allocate(MIB).nbytes == MIB
            assert arena.size_bytes == os.fstat(arena.fd).st_size


class TestReservation:
    def test_what_is_reserved_is_there_and_is_not_grown_again(self, spill_dir):
        with closing(open_arena(spill_dir)) as arena:
            arena.reserve(0)
            assert arena.size_bytes == 0
            kept = arena.allocate(MIB)
            assert os.fstat(arena.fd).st_blocks * 512 >= MIB
            arena.reserve(80 * MIB + 1)
            assert arena.size_bytes == os.fstat(arena.fd).st_size == 80 * MIB + arena.block_bytes
            arena.reserve(80 * MIB)
            for _ in range(79):
                arena.allocate(MIB)
            assert arena.size_bytes == 80 * MIB + arena.block_bytes, "grew into what was reserved already"
            arena.free(kept)

    def test_is_refused_as_a_whole(self, small_disk):
        directory = small_disk(24)
        with closing(open_arena(directory)) as arena:
            free = free_bytes(directory)
            with pytest.raises(OutOfSpaceError, match=r"full: 31,457,280 more bytes are needed, [\d,]+ are free"):
                arena.reserve(30 * MIB)
            assert arena.size_bytes == os.fstat(arena.fd).st_size == 0
            assert free_bytes(directory) >= free - 16 * 512, "what a refused reservation had taken was not given back"


class TestFullDisk:
    def test_names_path_need_and_free_space_then_rests(self, small_disk, monkeypatch):
        directory, now = small_disk(24), [100.0]
        free = free_bytes(directory)
        monkeypatch.setattr(arena_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
        arena = open_arena(directory)
        kept = arena.allocate(4 * MIB)
        blocks = os.fstat(arena.fd).st_blocks
        with pytest.raises(OutOfSpaceError, match=r"full: 20,971,520 more bytes are needed, [\d,]+ are free") as caught:
            arena.allocate(20 * MIB)
        assert str(arena.directory) in str(caught.value)
        assert caught.value.errno == errno.ENOSPC
        assert os.fstat(arena.fd).st_blocks <= blocks + 16, "what a refused reservation had taken was not given back"

        calls = []
        reserve = arena_module._reserve
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(arena_module, "_reserve", lambda *args: calls.append(args) or reserve(*args))
            with pytest.raises(OutOfSpaceError):
                arena.allocate(20 * MIB)
            assert calls == [], "asked the file system again at once"
            small = arena.allocate(MIB)
            assert len(calls) == 1, "a smaller request must still be tried"
            arena.free(kept)
            assert arena.allocate(4 * MIB) == kept
            assert len(calls) == 1, "freed space must serve without growing"
            now[0] += 60
            with pytest.raises(OutOfSpaceError):
                arena.allocate(20 * MIB)
            assert len(calls) > 1
        arena.free(small)
        arena.close()
        assert free_bytes(directory) == free

    def test_fills_the_disk_when_only_the_exact_need_fits(self, small_disk, monkeypatch):
        directory = small_disk(24)
        monkeypatch.setattr(arena_module, "_FIRST_GROWTH_BYTES", 4 * MIB)
        with closing(open_arena(directory)) as arena:
            extents = [arena.allocate(MIB) for _ in range(16)]
            with pytest.raises(OutOfSpaceError):
                extents += [arena.allocate(MIB) for _ in range(24)]
            assert free_bytes(directory) < 2 * MIB
