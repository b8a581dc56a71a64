"""Turns on a drive within one process: its threads share one. The lock files are the user's alone."""

from __future__ import annotations

import os
import stat
import tempfile
import threading
from pathlib import Path

import pytest

from lightning_ssd.errors import OffloaderClosedError, StorageError
from lightning_ssd.storage import drive_turn_lock as arbiter_module
from lightning_ssd.storage.drive_turn_lock import DriveLock
from tests.support.patience import PATIENCE_S
from tests.support.turn_locks import is_taken, locks

pytestmark = pytest.mark.usefixtures("runtime")


class TestInOneProcess:
    def test_each_direction_has_a_lock_of_its_own(self, arbiter: DriveLock, runtime: Path) -> None:
        read, write = locks(runtime)["read"], locks(runtime)["write"]
        with arbiter.reading():
            assert (is_taken(read), is_taken(write)) == (True, False)
        with arbiter.writing():
            assert (is_taken(read), is_taken(write)) == (False, True)
        assert (is_taken(read), is_taken(write)) == (False, False)

    def test_locks_are_named_by_the_drive(self, arbiter: DriveLock, tmp_path: Path, runtime: Path) -> None:
        device = tmp_path.stat().st_dev
        name = f"{os.major(device)}_{os.minor(device)}"
        assert {path.name for path in runtime.iterdir()} == {f"{name}.read", f"{name}.write"}
        (tmp_path / "other").mkdir()
        other = DriveLock(tmp_path / "other")
        assert len(list(runtime.iterdir())) == 2, "the same drive"
        other.close()

    @pytest.mark.parametrize("num_arbiters", [1, 2])
    def test_threads_share_a_turn_until_the_last_leaves(self, tmp_path: Path, runtime: Path, num_arbiters: int) -> None:
        arbiters = [DriveLock(tmp_path) for _ in range(num_arbiters)]
        both_inside, go_on = threading.Barrier(2, timeout=PATIENCE_S), threading.Event()

        def hold() -> None:
            with arbiters[-1].writing():
                both_inside.wait()
                go_on.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        write = locks(runtime)["write"]
        try:
            with arbiters[0].writing():
                both_inside.wait()
            assert is_taken(write)
        finally:
            go_on.set()
            thread.join()
        assert not is_taken(write)
        for one in arbiters:
            one.close()

    def test_an_error_inside_ends_the_turn(self, arbiter: DriveLock, runtime: Path) -> None:
        with pytest.raises(ZeroDivisionError), arbiter.reading():
            raise ZeroDivisionError
        assert not is_taken(locks(runtime)["read"])

    def test_close_gives_back_what_is_open(self, tmp_path: Path) -> None:
        def num_open() -> int:
            return len(os.listdir("/proc/self/fd"))

        before = num_open()
        first, second = DriveLock(tmp_path), DriveLock(tmp_path)
        assert num_open() == before + 2, "one opening per process and direction"
        first.close()
        first.close()
        with second.writing():
            pass
        with pytest.raises(OffloaderClosedError, match="closed"):
            first.reading()
        inside = second.reading()
        with inside:
            second.close()
            assert num_open() == before + 1, "somebody is inside"
        assert num_open() == before

    def test_disabled_it_does_nothing(self, tmp_path: Path, runtime: Path) -> None:
        off = DriveLock(tmp_path / "nowhere", enabled=False)
        with off.reading(), off.writing():
            assert not runtime.exists()
        off.close()
        with off.reading():
            pass

    def test_a_missing_directory_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(StorageError, match=r"cannot find the drive of .*nowhere"):
            DriveLock(tmp_path / "nowhere")

    def test_locks_that_do_not_work_are_an_error_with_a_name(
        self, arbiter: DriveLock, runtime: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(fd: int, operation: int) -> None:
            raise OSError(37, "No locks available")

        with monkeypatch.context() as patch:
            patch.setattr(arbiter_module.fcntl, "flock", refuse)
            with pytest.raises(StorageError, match=r"cannot lock .*write"), arbiter.writing():
                pytest.fail("let in")
        with arbiter.writing():
            assert is_taken(locks(runtime)["write"])


class TestPrivateDirectory:
    def test_is_ours_alone(self, arbiter: DriveLock, runtime: Path) -> None:
        assert stat.S_IMODE(runtime.stat().st_mode) == 0o700
        assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in runtime.iterdir())

    @pytest.mark.parametrize("kind", ["unset", "relative", "missing", "foreign"])
    def test_without_a_runtime_directory_it_lies_among_temporary_files(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
    ) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        if kind == "unset":
            monkeypatch.delenv("XDG_RUNTIME_DIR")
        elif kind == "foreign":
            monkeypatch.setattr(arbiter_module, "_is_ours", lambda directory: False)
        else:
            monkeypatch.setenv("XDG_RUNTIME_DIR", "." if kind == "relative" else str(tmp_path / "missing"))
        one = DriveLock(tmp_path)
        directory = tmp_path / f"lightning_ssd-{os.geteuid()}"
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert len(list(directory.iterdir())) == 2
        one.close()

    def test_links_are_refused(self, tmp_path: Path, runtime: Path) -> None:
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        runtime.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(StorageError, match="symbolic link"):
            DriveLock(tmp_path)
        assert not list((tmp_path / "elsewhere").iterdir())

    def test_a_lock_file_that_is_a_link_is_refused(self, tmp_path: Path, runtime: Path) -> None:
        DriveLock(tmp_path).close()
        write = locks(runtime)["write"]
        write.unlink()
        write.symlink_to(tmp_path / "elsewhere")
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(StorageError, match="cannot open the lock file"):
            DriveLock(tmp_path)
        assert not (tmp_path / "elsewhere").exists()
        assert len(os.listdir("/proc/self/fd")) == before, "the other lock is open still"

    def test_open_modes_and_foreign_owners_are_refused(
        self, tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runtime.mkdir()
        runtime.chmod(0o770)
        with pytest.raises(StorageError, match=r"mode 0770; allowed: .* mode 0700"):
            DriveLock(tmp_path)
        runtime.chmod(0o700)
        monkeypatch.setattr(arbiter_module, "_is_ours", lambda directory: True)
        monkeypatch.setattr(arbiter_module.os, "geteuid", lambda: 12345)
        with pytest.raises(StorageError, match="allowed: user 12345"):
            DriveLock(tmp_path)
