"""Directories of the user's are made with care; ours in them comes and goes under others that use it."""

import os
import tempfile

import pytest

from lightning_ssd.storage.directories import created_directories
from lightning_ssd.storage.spill_file import Arena
from tests.support.threads import at_once


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
        with created_directories([path]):
            pass
        assert ("has been made on the drive of /" in caplog.text) == (is_first and not is_usual)


def test_where_there_is_neither_a_home_nor_a_working_directory_one_is_made_all_the_same(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it returns for a user without a home
    with created_directories([tmp_path / "spill"]):
        assert (tmp_path / "spill").is_dir()


def test_many_that_open_and_close_never_lose_ours(tmp_path):
    """A file in it can be made whenever another one goes, and with the last one it goes."""

    def come_and_go():
        for _ in range(200):
            arena = Arena(tmp_path, block_bytes=4096, direct=False)
            arena.allocate(4096)
            arena.close()

    at_once(*[come_and_go] * 4)
    assert not list(tmp_path.iterdir())
