import ctypes
import errno
import mmap
import os
import signal
import threading
from contextlib import closing

import pytest

from lightning_ssd.common.tensors import Region
from lightning_ssd.errors import OutOfSpaceError, ShortTransferError, StorageError
from lightning_ssd.storage import posix
from lightning_ssd.storage import spill_file as arena_module
from lightning_ssd.storage.backend import DEFAULT_CHUNK_BYTES
from lightning_ssd.storage.filesystem import DirectAlignment
from lightning_ssd.storage.posix import PosixBackend
from tests.support.suite import BackendSuite, Memory


def direct_backend(directory):
    backend = PosixBackend([directory])
    if backend.name != "posix O_DIRECT":
        pytest.skip(f"no direct I/O here: {backend.why}")
    return backend


class TestPosixDirect(BackendSuite):
    def make_backend(self, directory):
        return direct_backend(directory)


class TestPosixPageCache(BackendSuite):
    def make_backend(self, directory):
        backend = PosixBackend([directory], direct=False)
        assert backend.name == "posix page cache"
        return backend


@pytest.fixture(params=["direct", "page cache"])
def backend(request, tmp_path):
    with closing(PosixBackend([tmp_path], direct=request.param == "direct")) as backend:
        yield backend


@pytest.fixture
def direct(tmp_path):
    with closing(direct_backend(tmp_path)) as backend:
        yield backend


@pytest.fixture
def arena(backend, tmp_path):
    with closing(backend.open_arena(tmp_path)) as arena:
        yield arena


@pytest.fixture
def direct_arena(direct, tmp_path):
    with closing(direct.open_arena(tmp_path)) as arena:
        yield arena


def write_and_read(backend, arena, nbytes, phase=0):
    written, read = Memory.random(nbytes, phase), Memory.make(nbytes, phase)
    extent = arena.allocate(nbytes)
    backend.write(arena, written.region, extent.offset)
    backend.read(arena, read.region, extent.offset)
    return read.content == written.content and read.guards_intact()


class Calls:
    """Stands in for ``os.pwritev`` and ``os.preadv``: changes single calls, passes the others on."""

    def __init__(self, monkeypatch, change):
        self.count = 0
        for name in ("pwritev", "preadv"):
            real = getattr(os, name)

            def fake(fd, views, offset, real=real):
                self.count += 1
                return change(real, fd, views[0], offset)

            monkeypatch.setattr(posix.os, name, fake)


def failing(code):
    def change(*_):
        raise OSError(code, os.strerror(code))

    return change


class TestAwkwardSystem:
    def test_signals_do_not_disturb(self, backend, arena):
        hits = []
        previous = signal.signal(signal.SIGALRM, lambda *_: hits.append(1))
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        try:
            for _ in range(10):
                assert write_and_read(backend, arena, 8 << 20, 64)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        assert len(hits) > 10

    @pytest.mark.parametrize("limit", [4096, 5000, 12288, 100_001])
    def test_short_calls_are_continued(self, backend, arena, monkeypatch, limit):
        """The system moves whole blocks and may report any count."""

        def change(real, fd, view, offset):
            whole = -(-min(len(view), limit) // 4096) * 4096
            return min(real(fd, [view[:whole]], offset), limit)

        calls = Calls(monkeypatch, change)
        assert write_and_read(backend, arena, 300 * 4096)
        assert calls.count > 10

    def test_no_progress_raises(self, backend, arena, monkeypatch):
        extent, memory = arena.allocate(8192), Memory.random(8192)
        calls = Calls(monkeypatch, lambda *_: 100)
        with pytest.raises(ShortTransferError, match=r"cannot write 8,192 bytes at offset 0 .* 100 bytes moved"):
            backend.write(arena, memory.region, extent.offset)
        assert calls.count == 3

    @pytest.mark.parametrize(
        ("code", "expected"),
        [(errno.EIO, StorageError), (errno.ENOSPC, OutOfSpaceError), (errno.EDQUOT, OutOfSpaceError)],
    )
    def test_errors_say_what_and_where(self, backend, arena, monkeypatch, code, expected):
        arena.allocate(4096)
        extent, memory = arena.allocate(8192), Memory.random(8192)
        Calls(monkeypatch, failing(code))
        for verb in ("write", "read"):
            with pytest.raises(expected, match=rf"cannot {verb} 8,192 bytes at offset 4,096") as caught:
                getattr(backend, verb)(arena, memory.region, extent.offset)
            assert type(caught.value) is expected
            assert caught.value.errno == code
            assert str(arena.directory) in str(caught.value)
            assert os.strerror(code) in str(caught.value)

    def test_a_full_disk_without_reservations(self, small_disk, monkeypatch):
        monkeypatch.setattr(arena_module, "_fallocate", None)
        directory = small_disk(16)
        backend = PosixBackend([directory])
        arena = backend.open_arena(directory)
        extent, memory = arena.allocate(32 << 20), Memory.random(32 << 20)
        with pytest.raises(OutOfSpaceError, match="cannot write"):
            backend.write(arena, memory.region, extent.offset)
        arena.close()

    def test_broken_promises_are_refused(self, backend, arena):
        arena.allocate(8192)
        for region, offset in ((Region(4096, 100), 0), (Region(4096, 4096), 512)):
            with pytest.raises(ValueError, match="multiples of 4096"):
                backend.write(arena, region, offset)


class TestAlignment:
    def test_aligned_memory_is_not_copied(self, direct, direct_arena):
        direct._staging.close()
        assert write_and_read(direct, direct_arena, 1 << 20, direct.memory_alignment % 4096)

    def test_staging_buffers_are_given_back(self, direct, direct_arena):
        assert write_and_read(direct, direct_arena, 40 << 20, 3)
        assert direct._staging.lent_bytes == 0
        assert [buffer.nbytes for buffer in direct._staging._spare] == [DEFAULT_CHUNK_BYTES]

    def test_a_drive_that_wants_more_than_it_says_gets_it(self, direct, direct_arena, monkeypatch):
        def change(real, fd, view, offset):
            if ctypes.addressof(ctypes.c_char.from_buffer(view)) % 2048:
                raise OSError(errno.EINVAL, "Invalid argument")
            return int(real(fd, [view], offset))

        calls = Calls(monkeypatch, change)
        assert write_and_read(direct, direct_arena, 1 << 20, 1024)
        assert calls.count == 4, "each way one refusal, then through a buffer"

    def test_a_drive_that_asks_for_more_than_a_page_gets_it(self, direct, direct_arena):
        direct.memory_alignment = 1 << 40  # no address has it
        direct._staging._spare.clear()  # of the trial at its opening
        assert write_and_read(direct, direct_arena, 1 << 20, 0)
        assert len(direct._staging._spare) == 1, "both ways through a buffer"

    def test_a_refusal_is_an_error(self, direct, direct_arena, monkeypatch):
        extent, memory = direct_arena.allocate(4096), Memory.random(4096)
        Calls(monkeypatch, failing(errno.EINVAL))
        with pytest.raises(StorageError, match="Invalid argument"):
            direct.write(direct_arena, memory.region, extent.offset)

    def test_promises_that_do_not_hold_are_found_at_opening(self, direct, tmp_path, monkeypatch):
        monkeypatch.setattr(posix, "direct_alignment", lambda fd: DirectAlignment(2, 512))
        if direct.memory_alignment <= 2:
            pytest.skip("this drive takes any address")
        assert PosixBackend([tmp_path]).memory_alignment == 4096

    def test_drives_with_large_sectors(self, direct, tmp_path, monkeypatch):
        monkeypatch.setattr(posix, "direct_alignment", lambda fd: DirectAlignment(4096, 16384))
        backend = PosixBackend([tmp_path])
        assert (backend.memory_alignment, backend.block_bytes) == (4096, 16384)
        arena = backend.open_arena(tmp_path)
        assert arena.allocate(1).nbytes == 16384
        arena.close()


class TestFallback:
    def test_file_systems_that_refuse_o_direct(self, tmp_path, monkeypatch):
        real = os.open

        def fake(path, flags, *args, **kwargs):
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return real(path, flags, *args, **kwargs)

        monkeypatch.setattr(arena_module.os, "open", fake)
        backend = PosixBackend([tmp_path])
        assert backend.name == "posix page cache"
        assert backend.why == f"{tmp_path}: the file system refuses O_DIRECT"
        arena = backend.open_arena(tmp_path)
        assert write_and_read(backend, arena, 1 << 20, 17)
        arena.close()

    @pytest.mark.parametrize("told", [None, DirectAlignment(512, 512)])
    def test_file_systems_whose_direct_io_does_not_work(self, tmp_path, monkeypatch, told):
        monkeypatch.setattr(posix, "direct_alignment", lambda fd: told)
        with monkeypatch.context() as patch:
            Calls(patch, failing(errno.EINVAL))
            backend = PosixBackend([tmp_path])
        assert backend.name == "posix page cache"
        assert (backend.memory_alignment, backend.block_bytes) == (1, 4096)

    def test_a_failing_drive_is_not_taken_for_a_refusal(self, tmp_path, monkeypatch):
        Calls(monkeypatch, failing(errno.EIO))
        with pytest.raises(StorageError, match=r"first write and read of one block in .* failed"):
            PosixBackend([tmp_path])


class TestPageCacheUse:
    @pytest.fixture
    def buffered(self, tmp_path):
        with closing(PosixBackend([tmp_path], direct=False)) as backend:
            yield backend

    def test_the_cache_does_not_grow(self, buffered, tmp_path):
        arena = buffered.open_arena(tmp_path)
        assert write_and_read(buffered, arena, 32 << 20)
        with closing(arena), mmap.mmap(arena.fd, arena.size_bytes) as mapped:
            resident = (ctypes.c_ubyte * (arena.size_bytes // 4096))()
            address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
            assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), resident) == 0
        assert sum(page & 1 for page in resident) * 4096 < 1 << 20

    def test_nothing_is_trusted_after_a_lost_write_back(self, buffered, tmp_path, monkeypatch):
        """The kernel tells one caller of the file, not the one whose bytes were lost."""
        arena, other = buffered.open_arena(tmp_path), buffered.open_arena(tmp_path)
        memory = Memory.random(4096)
        good, bad = arena.allocate(4096), arena.allocate(4096)
        buffered.write(arena, memory.region, good.offset)

        with monkeypatch.context() as patch:
            patch.setattr(posix, "_write_back", failing(errno.EIO))
            with pytest.raises(StorageError, match="cannot write 4,096 bytes at offset 4,096"):
                buffered.write(arena, memory.region, bad.offset)
        with pytest.raises(StorageError, match="nothing from this file is used any more"):
            buffered.read(arena, memory.region, good.offset)
        assert write_and_read(buffered, other, 4096)
        arena.close()
        other.close()


def test_transfers_run_beside_python(tmp_path):
    """The GIL is free during I/O: two transfers overlap, and Python goes on meanwhile."""
    backend = PosixBackend([tmp_path])
    arena = backend.open_arena(tmp_path)
    memory = Memory.random(64 << 20)
    extent = arena.allocate(memory.nbytes)
    ended = threading.Event()

    def work():
        for _ in range(3):
            backend.write(arena, memory.region, extent.offset)
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    turns = 0
    while not ended.wait(0.001):
        turns += 1
    thread.join()
    arena.close()
    backend.close()
    assert turns > 5
