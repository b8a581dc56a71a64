"""Directories of the user's are made with care, and told of."""

import os
import tempfile

import pytest

from lightning_ssd.storage.directories import created_directories


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
