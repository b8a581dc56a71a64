"""The room that a spill file takes on its drive: it grows, is reserved, fills the drive, and is all given back."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import subprocess
import textwrap
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from lightning_ssd.errors import OutOfSpaceError
from lightning_ssd.storage import spill_file as arena_module
from tests.support.arenas import MIB, open_arena


def free_bytes(directory: Path) -> int:
    facts = os.statvfs(directory)
    return facts.f_bavail * facts.f_frsize


class TestGrowth:
    def test_in_chunks_of_a_quarter(self, tmp_path: Path) -> None:
        arena = open_arena(tmp_path, growth_bytes=MIB)
        sizes = []
        for _ in range(64):
            arena.allocate(MIB // 2)
            sizes.append(arena.size_bytes)
        steps = [b - a for a, b in itertools.pairwise(sizes) if b > a]
        assert sizes[0] == MIB
        assert steps[-1] >= sizes[-1] // 6
        assert len(set(sizes)) < 20
        arena.close()

    def test_uses_the_free_end(self, tmp_path: Path) -> None:
        arena = open_arena(tmp_path, growth_bytes=4096)
        arena.allocate(4096 * 3)
        last = arena.allocate(4096)
        arena.free(last)
        assert arena.allocate(4096 * 3).offset == last.offset
        assert arena.size_bytes == 4096 * 6
        arena.close()

    def test_without_fallocate(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(arena_module, "_fallocate", None)
        arena = open_arena(tmp_path)
        assert arena.allocate(MIB).nbytes == MIB
        assert arena.size_bytes == os.fstat(arena.fd).st_size
        arena.close()


class TestReservation:
    def test_what_is_reserved_is_there_and_is_not_grown_again(self, spill_dir: Path) -> None:
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

    def test_is_refused_as_a_whole(self, small_disk: Callable[[int], Path]) -> None:
        directory = small_disk(24)
        with closing(open_arena(directory)) as arena:
            free = free_bytes(directory)
            with pytest.raises(OutOfSpaceError, match=r"full: 31,457,280 more bytes are needed, [\d,]+ are free"):
                arena.reserve(30 * MIB)
            assert arena.size_bytes == os.fstat(arena.fd).st_size == 0
            assert free_bytes(directory) >= free - 16 * 512, "what a refused reservation had taken was not given back"


class TestFullDisk:
    def test_names_path_need_and_free_space_then_rests(self, small_disk: Callable[[int], Path]) -> None:
        directory, now = small_disk(24), [100.0]
        free = os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize
        arena = open_arena(directory, clock=lambda: now[0])
        kept = arena.allocate(4 * MIB)
        blocks = os.fstat(arena.fd).st_blocks
        with pytest.raises(OutOfSpaceError, match=r"full: 20,971,520 more bytes are needed, [\d,]+ are free") as caught:
            arena.allocate(20 * MIB)
        assert str(arena.path) in str(caught.value)
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

    def test_fills_the_disk_when_only_the_exact_need_fits(self, small_disk: Callable[[int], Path]) -> None:
        directory = small_disk(24)
        arena = open_arena(directory, growth_bytes=4 * MIB)
        extents = [arena.allocate(MIB) for _ in range(16)]
        with pytest.raises(OutOfSpaceError):
            extents += [arena.allocate(MIB) for _ in range(24)]
        assert free_bytes(directory) < 2 * MIB
        arena.close()

    def test_kill_leaves_no_byte(self, small_disk: Callable[[int], Path], forks: list[str]) -> None:
        directory = small_disk(64)
        empty = os.statvfs(directory).f_bfree
        code = """
            import os, sys
            from lightning_ssd.storage.spill_file import Arena
            arena = Arena(sys.argv[1], block_bytes=4096, direct=False, growth_bytes=1 << 20)
            extent = arena.allocate(32 << 20)
            os.pwrite(arena.fd, os.urandom(extent.nbytes), extent.offset)
            print(os.getpid(), flush=True)
            sys.stdin.read()
        """
        command = [*forks, "-c", textwrap.dedent(code), str(directory)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            pid = int(child.stdout.readline())
            assert (empty - os.statvfs(directory).f_bfree) * os.statvfs(directory).f_frsize >= 32 * MIB
            os.kill(pid, signal.SIGKILL)
            assert child.wait() == -signal.SIGKILL
        (folder,) = directory.glob(".lightning_ssd-*")
        assert list(folder.iterdir()) == []
        folder.rmdir()
        assert os.statvfs(directory).f_bfree == empty
