import json
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_ssd.cli import doctor as doctor_module
from lightning_ssd.errors import BackendUnavailableError
from tests.support.commands import command, said

DEV_SHM = Path("/dev/shm")


run = partial(command, "doctor")


def findings(*arguments):
    return json.loads(run(*arguments, "--json").stdout)


def everything_below(directory):
    return sorted(directory.rglob("*"))


def test_a_directory_on_a_drive_is_ready_and_stays_as_it_was(spill_dir):
    done = run(spill_dir)
    assert done.exit_code == 0, done.output
    assert "Ready" in done.output
    assert str(spill_dir) in done.output
    assert not everything_below(spill_dir)


def test_json_has_all_that_is_asked_for(spill_dir):
    facts = findings(spill_dir)
    assert set(facts) == {*("versions", "accelerator", "memory", "directories", "backend", "notes", "problems")}
    assert set(facts["versions"]) == {
        *("python", "torch", "lightning", "hydra-core", "wandb", "lightning_ssd"),
        *("cuda-bindings", "kvikio-cu12", "kvikio-cu13"),
    }
    assert {"host_bytes", "cgroup_limit_bytes", "memlock_bytes", "malloc"} <= set(facts["memory"])
    (directory,) = facts["directories"]
    assert directory["path"] == str(spill_dir)
    assert directory["kind"] in ("local", "overlay")
    assert 0 < directory["free_bytes"] <= directory["total_bytes"]
    assert facts["backend"]["asked"] == "auto"
    assert facts["backend"]["chosen"] in ("posix O_DIRECT", "posix page cache", "cuFile GDS")
    assert facts["backend"]["is_gds_active"] is (facts["backend"]["chosen"] == "cuFile GDS")
    assert facts["problems"] == []


def test_without_directories_those_of_training_are_taken(spill_dir, monkeypatch):
    (spill_dir / "one").mkdir()
    monkeypatch.chdir(spill_dir)
    assert [d["path"] for d in findings()["directories"]] == [str(spill_dir)]
    monkeypatch.setenv("LIGHTNING_SSD_PATHS", str(spill_dir / "one"))
    assert [d["path"] for d in findings()["directories"]] == [str(spill_dir / "one")]


def test_a_missing_directory_is_judged_by_where_it_would_be_made(spill_dir):
    facts = findings(spill_dir / "not" / "yet")
    assert facts["directories"][0]["looked_at"] == str(spill_dir)
    assert facts["problems"] == []
    assert not everything_below(spill_dir)


def test_a_missing_directory_may_be_a_drive_that_is_not_mounted(spill_dir):
    missing, found = findings(spill_dir / "not" / "yet"), findings(spill_dir)
    device = found["directories"][0]["device"]
    note = (
        f"{spill_dir / 'not' / 'yet'} does not exist: is the drive mounted? "
        f"Training would write to the file system of {spill_dir} ({device})"
    )
    assert note in missing["notes"]
    assert not [note for note in found["notes"] if "mounted" in note]


def test_two_directories_of_one_file_system_are_told_of(spill_dir):
    done = run(spill_dir / "a", spill_dir / "b")
    assert done.exit_code == 0
    assert f"{spill_dir / 'a'} and {spill_dir / 'b'} lie on one file system" in done.output


@pytest.mark.skipif(not os.path.ismount(DEV_SHM), reason="no tmpfs at /dev/shm")
def test_memory_is_refused():
    done = run(DEV_SHM)
    assert done.exit_code == 1
    assert "error: /dev/shm lies on tmpfs, which is memory" in said(done)
    assert "name a directory on a local SSD" in said(done)


def test_a_network_file_system_is_refused(spill_dir, monkeypatch):
    monkeypatch.setattr("lightning_ssd.storage.filesystem._mount_of", lambda path: ("nfs4", "server:/export"))
    facts = findings(spill_dir)
    assert facts["directories"][0]["kind"] == "network"
    assert "nfs4, a network file system" in facts["problems"][0]


def test_a_file_is_no_directory(spill_dir):
    file = spill_dir / "file"
    file.write_bytes(b"mine")
    done = run(file)
    assert done.exit_code == 1
    assert "exists and is no directory" in said(done)
    assert file.read_bytes() == b"mine"


def test_a_directory_that_is_not_writable_is_refused(spill_dir, monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write anywhere
    done = run(spill_dir / "below")
    assert done.exit_code == 1
    assert "is not writable for this user" in said(done)


def test_a_mount_that_is_read_only_is_named(spill_dir, monkeypatch):
    """Another owner or mode would not help there."""
    facts = os.statvfs(spill_dir)
    read_only = os.statvfs_result((*facts[:8], facts.f_flag | os.ST_RDONLY, *facts[9:]))
    monkeypatch.setattr("os.statvfs", lambda *_: read_only)
    done = run(spill_dir)
    assert done.exit_code == 1
    words = said(done)
    assert "lies on a file system that is mounted read-only" in words
    assert "owner" not in words


@pytest.mark.parametrize(("name", "loads"), [("cufile", "cufile._open_driver"), ("kvikio", "kvikio._import_kvikio")])
def test_a_library_that_is_not_here_is_refused_only_if_asked_for(name, loads, spill_dir, monkeypatch):
    def missing():
        raise BackendUnavailableError("it does not load (test)")

    monkeypatch.setattr(f"lightning_ssd.storage.{loads}", missing)
    assert findings(spill_dir)["problems"] == []
    done = run(spill_dir, "--backend", name)
    assert done.exit_code == 1
    is_refused = name == "cufile" and not torch.cuda.is_available()
    assert ("what moves here is host memory" if is_refused else "it does not load (test)") in said(done)
    assert findings(spill_dir, "--backend", name)["backend"]["is_gds_active"] is False


@pytest.mark.parametrize("register", [None, print])
def test_memory_of_the_host_has_no_gds(register, spill_dir, monkeypatch):
    opened = SimpleNamespace(name="kvikio GDS", register=register, close=lambda: None)
    monkeypatch.setattr(doctor_module, "open_backend", lambda *_, **__: (opened, "a test"))
    assert findings(spill_dir)["backend"]["is_gds_active"] is (register is not None)


def test_a_mistyped_backend_has_the_exit_code_of_usage(spill_dir):
    done = run(spill_dir, "--backend", "possix")
    assert done.exit_code == 2
    assert "possix" in said(done)
