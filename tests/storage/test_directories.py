"""Directories of ours stay while anybody needs them, and go with the last one."""

import fcntl
import os
import subprocess
import sys
import tempfile

import pytest

from lightning_ssd.storage.directories import HeldDirectory, created_directories
from tests.support.threads import at_once


def test_goes_with_the_last_holder(tmp_path):
    path = tmp_path / "deep" / "rank"
    first, second = HeldDirectory(path), HeldDirectory(path)
    first.close()
    first.close()
    assert path.is_dir()
    second.close()
    assert not path.exists()
    assert path.parent.is_dir(), "not ours"
    held = HeldDirectory(path)
    (path / "file").write_text("the user's")
    held.close()
    assert (path / "file").read_text() == "the user's"


@pytest.mark.parametrize("working", ["usual", "/"])
@pytest.mark.parametrize("is_usual", [False, True], ids=["elsewhere", "in a usual place"])
def test_a_directory_that_is_made_on_the_systems_drive_is_told(is_usual, working, tmp_path, monkeypatch, caplog):
    if os.stat(tmp_path).st_dev != os.stat("/").st_dev:
        pytest.skip("temporary files lie on a drive of their own")
    (tmp_path / "usual").mkdir()
    monkeypatch.chdir(tmp_path / working)
    monkeypatch.setenv("HOME", working if working == "/" else "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "usual"))
    (tmp_path / "mnt").mkdir()
    path = tmp_path / "usual" / "spill" if is_usual else tmp_path / "mnt" / "spill"
    for is_first in (True, False):
        caplog.clear()
        with created_directories([path], allow_unsuitable=False):
            pass
        assert ("has been made on the drive of /" in caplog.text) == (is_first and not is_usual)


def test_where_there_is_neither_a_home_nor_a_working_directory_one_is_made_all_the_same(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it returns for a user without a home
    with created_directories([tmp_path / "spill"], allow_unsuitable=False):
        assert (tmp_path / "spill").is_dir()


def test_another_process_holds_it_until_it_dies(tmp_path):
    path = tmp_path / "rank"
    script = (
        "import fcntl, os, sys; f = os.open(sys.argv[1], os.O_RDONLY); fcntl.flock(f, fcntl.LOCK_SH); "
        "print(1, flush=True); input()"
    )
    held = HeldDirectory(path)
    other = subprocess.Popen(
        [sys.executable, "-S", "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    other.stdout.readline()
    held.close()
    assert path.is_dir()
    other.kill()
    other.communicate()
    HeldDirectory(path).close()
    assert not path.exists()


def test_many_that_open_and_close_never_lose_it(tmp_path):
    """Whoever holds it can make files in it, however the others come and go."""

    def come_and_go():
        for _ in range(200):
            held = HeldDirectory(tmp_path / "rank")
            os.close(os.open(tmp_path / "rank", os.O_RDONLY | os.O_DIRECTORY))
            held.close()

    at_once(*[come_and_go] * 4)
    assert not (tmp_path / "rank").exists()


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(folder, operation):
        raise OSError(95, "not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    held = HeldDirectory(tmp_path / "rank")
    held.close()
    assert not (tmp_path / "rank").exists()
