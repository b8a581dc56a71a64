import errno
import os
import subprocess
from pathlib import Path

import pytest

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.errors import ConfigError, UnsuitablePathError
from lightning_ssd.storage import filesystem
from lightning_ssd.storage.drive_probe import read_back_s
from lightning_ssd.storage.filesystem import DirectAlignment, check_directory, direct_alignment, inspect_directory
from lightning_ssd.storage.posix import PosixBackend
from lightning_ssd.storage.spill_file import Arena
from lightning_ssd.tiers.bandwidth_meter import measure_rates
from tests.support.faults import FaultyBackend, eio, on_calls

SHM = Path("/dev/shm")


class TestFacts:
    def test_agree_with_the_system(self, tmp_path):
        facts = inspect_directory(tmp_path)
        told = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True, check=True).stdout
        assert facts.file_system[:3] in {told[:3], "btr", "ove", "fus"}
        assert 0 < facts.free_bytes <= facts.total_bytes
        assert facts.total_bytes == os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize

    def test_of_a_file_system_mounted_in_between(self, small_disk):
        directory = small_disk(16)
        below = directory / "a" / "b"
        below.mkdir(parents=True)
        facts = inspect_directory(below)
        assert facts.file_system == "ext4"
        assert facts.device.startswith("/dev/loop")
        assert facts.total_bytes < 16 << 20
        assert not facts.is_memory
        assert not facts.is_network

    @pytest.mark.skipif(not SHM.is_dir(), reason="needs /dev/shm")
    def test_of_memory(self):
        facts = inspect_directory(SHM)
        assert (facts.file_system, facts.is_memory, facts.is_rotational) == ("tmpfs", True, None)

    def test_without_proc(self, tmp_path, monkeypatch):
        def refuse(self, *args, **kwargs):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(self))

        monkeypatch.setattr(Path, "read_text", refuse)
        facts = inspect_directory(tmp_path)
        assert (facts.file_system, facts.device, facts.is_memory) == ("unknown", "unknown", False)
        assert check_directory(tmp_path) == facts


class TestCheckDirectory:
    def test_makes_what_is_missing(self, tmp_path):
        facts = check_directory(tmp_path / "a" / "b", allow_unsuitable=True)
        assert (tmp_path / "a" / "b").is_dir()
        assert facts.total_bytes == inspect_directory(tmp_path).total_bytes

    def test_refuses_a_read_only_file_system(self, small_disk):
        directory = small_disk(16)
        subprocess.run(["mount", "-o", "remount,ro", directory], check=True)
        with pytest.raises(
            UnsuitablePathError, match="lies on a file system that is mounted read-only; name"
        ) as caught:
            check_directory(directory)
        assert caught.value.errno == errno.EROFS

    @pytest.mark.skipif(not SHM.is_dir(), reason="needs /dev/shm")
    def test_refuses_memory_unless_told(self):
        with pytest.raises(UnsuitablePathError, match="tmpfs, which is memory: nothing would be saved") as caught:
            check_directory(SHM)
        assert "allow_unsuitable_paths=True" in str(caught.value)
        assert check_directory(SHM, allow_unsuitable=True).is_memory

    def test_refuses_the_network_unless_told(self, tmp_path, monkeypatch):
        for kind in ("nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "lustre", "ceph"):
            monkeypatch.setattr(filesystem, "_mount_of", lambda path, kind=kind: (kind, "server:/export"))
            with pytest.raises(UnsuitablePathError, match=f"lies on {kind}, a network file system"):
                check_directory(tmp_path)
            assert check_directory(tmp_path, allow_unsuitable=True).is_network


class TestDirectAlignment:
    @pytest.fixture
    def fd(self, tmp_path):
        arena = Arena(tmp_path, block_bytes=4096, direct=False)
        yield arena.fd
        arena.close()

    @pytest.mark.parametrize("statx", [None, lambda *_: -1])
    def test_a_page_where_nobody_knows(self, statx, fd, monkeypatch):
        monkeypatch.setattr(filesystem, "_statx", statx)
        assert direct_alignment(fd) == DirectAlignment(4096, 4096)


def test_a_partition_asks_its_parent_whether_it_rotates(tmp_path, monkeypatch):
    disk, nodes = tmp_path / "devices" / "nvme0n1", tmp_path / "nodes"
    (disk / "nvme0n1p2").mkdir(parents=True)
    (disk / "queue").mkdir()
    nodes.mkdir()
    (nodes / "259:2").symlink_to(disk / "nvme0n1p2")
    monkeypatch.setattr(filesystem, "_BLOCK_DEVICES", nodes)
    assert filesystem._is_rotational(os.makedev(259, 2)) is None
    for text in ("0", "1"):
        (disk / "queue" / "rotational").write_text(f"{text}\n")
        assert filesystem._is_rotational(os.makedev(259, 2)) is (text == "1")
    assert filesystem._is_rotational(os.makedev(259, 3)) is None


class TestMeasuring:
    def test_read_back_notices_one_bit(self, tmp_path):
        backend = FaultyBackend(PosixBackend([tmp_path]), corrupt_read=lambda index: index == 2)  # two for each
        assert [read_back_s(backend, tmp_path, nbytes=1 << 20) is None for _ in range(3)] == [False, True, False]
        backend.close()

    def test_failures_pass_through(self, tmp_path):
        backend = FaultyBackend(PosixBackend([tmp_path]), fail_write=on_calls({0}, eio))
        with pytest.raises(OSError, match="injected"):
            measure_rates(backend, [tmp_path], nbytes=1 << 20)
        backend.close()
        assert os.listdir(tmp_path) == []


def opened_in(*paths):
    hardware = HardwareProfile(paths=paths)
    with Offloader(policy=OffloadPolicy(activations="offload"), hardware=hardware):
        pass


class TestPathsThatCannotServe:
    """Each gets one of our errors, with the path, what failed, and what to write; the user's own line is never bare."""

    @pytest.mark.parametrize("path", ["/proc", "/proc/self/fdinfo", "/sys", "/sys/kernel", "/dev/pts"])
    def test_file_systems_of_the_kernel(self, path):
        if not Path(path).is_dir() or not os.access(path, os.W_OK | os.X_OK) or is_memory(path):
            pytest.skip(f"{path} is another directory here")
        kind = inspect_directory(path).file_system
        with pytest.raises(UnsuitablePathError, match=rf"^cannot create a spill file in {path} ") as caught:
            opened_in(path)
        assert f"{path} lies on {kind}); name a directory on a local SSD (HardwareProfile.paths" in str(caught.value)
        assert caught.value.errno in (errno.ENOENT, errno.EPERM, errno.EACCES, errno.EROFS)

    @pytest.mark.parametrize(
        ("path", "reason"),
        [
            ("{}/file", "exists and is no directory"),
            ("{}/file/below", r"cannot be made \(Not a directory\)"),
            ("{}/dangling", "is a symbolic link that leads nowhere"),
            ("{}/loop", "is a symbolic link that leads nowhere"),
            ("{}/" + 300 * "n", r"cannot be made \(File name too long\)"),
            ("{}" + 25 * ("/" + 200 * "d"), r"cannot be made \(File name too long\)"),
            ("/dev/full", "exists and is no directory"),
            ("/dev/null/below", r"cannot be made \(Not a directory\)"),
            ("/proc/self/below", r"cannot be made \(No such file or directory\)"),
        ],
    )
    def test_what_is_no_directory(self, path, reason, tmp_path):
        (tmp_path / "file").touch()
        (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
        (tmp_path / "loop").symlink_to(tmp_path / "loop")
        with pytest.raises(UnsuitablePathError, match=rf"^/.* {reason}; name a directory on a local SSD"):
            opened_in(path.format(tmp_path))
        assert {entry.name for entry in tmp_path.iterdir()} == {"file", "dangling", "loop"}

    def test_names_that_no_directory_has(self):
        for path in ("", "a\0b"):
            with pytest.raises(ConfigError, match=r"HardwareProfile\.paths contains '"):
                HardwareProfile(paths=[path])

    def test_an_unknown_home_and_a_working_directory_that_has_gone(self, tmp_path):
        with pytest.raises(ConfigError, match=r"\['~nobody-has-this-name/spill'\] lead nowhere.*begin with /"):
            opened_in("~nobody-has-this-name/spill")
        gone = tmp_path / "gone"
        gone.mkdir()
        before = os.getcwd()
        os.chdir(gone)
        try:
            gone.rmdir()
            with pytest.raises(ConfigError, match=r"\['spill'\] lead nowhere: .*Write paths that begin with /"):
                opened_in("spill")
        finally:
            os.chdir(before)

    def test_relative_ones_and_those_of_the_home(self, spill_dir, monkeypatch):
        monkeypatch.chdir(spill_dir)
        monkeypatch.setenv("HOME", str(spill_dir))
        opened_in("relative", "~/home")
        assert {entry.name for entry in spill_dir.iterdir()} == {"relative", "home"}


def is_memory(path):
    return inspect_directory(path).is_memory
