"""Health of the drives under a directory: what smartctl prints, the walk through sysfs, and every reason why not."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from lightning_ssd.errors import StorageError
from lightning_ssd.wear import smart
from lightning_ssd.wear.smart import DriveHealth, capacity_bytes, parse_health, read_health

LOG = {"critical_warning": 0, "percentage_used": 0, "data_units_read": 9511859, "data_units_written": 7773431}
RECORDED = {
    "smartctl": {"version": [7, 1], "svn_revision": "5022", "exit_status": 0},
    "device": {"name": "/dev/nvme0n1", "info_name": "/dev/nvme0n1", "type": "nvme", "protocol": "NVMe"},
    "nvme_smart_health_information_log": LOG,
    "temperature": {"current": 36},
}
"""The part that matters of what was recorded of a drive."""


def printed(*, units, percentage):
    changed = {**LOG, "data_units_written": units, "percentage_used": percentage}
    return json.dumps({**RECORDED, "nvme_smart_health_information_log": changed}).encode()


def refused(message, *, status=2):
    """As smartctl says that it cannot."""
    messages = [{"string": message, "severity": "error"}]
    return json.dumps({"smartctl": {"version": [7, 5], "messages": messages, "exit_status": status}}).encode()


class TestParsing:
    def test_units_are_512_000_bytes(self):
        assert parse_health(json.dumps(RECORDED).encode()) == (7773431 * 512_000, 0)

    def test_counters_have_16_bytes_and_a_percentage_passes_100(self):
        assert parse_health(printed(units=2**100, percentage=255)) == (2**100 * 512_000, 255)
        assert parse_health(printed(units=0, percentage=3)) == (None, 3), "a drive that does not count says 0"

    def test_smartctl_says_why_not(self):
        with pytest.raises(StorageError, match=r"^Smartctl open device: /dev/nvme0n1 failed: Permission denied$"):
            parse_health(refused("Smartctl open device: /dev/nvme0n1 failed: Permission denied"))
        with pytest.raises(StorageError, match="found no NVMe health log"):
            parse_health(b'{"smartctl": {"exit_status": 0}}')

    def test_anything_else_is_not_known(self):
        log = b'{"nvme_smart_health_information_log": %s}'
        logs = [log % held for held in (b"{}", b"3", b'{"data_units_written": 1, "percentage_used": null}')]
        others = (b"", b"UNRECOGNIZED OPTION: json", b"\xff", b"[]", b"{}", b'{"smartctl": {"messages": [{}]}}')
        for output in (*others, *logs):
            with pytest.raises(StorageError, match=r"no version since 7\.0 prints"):
                parse_health(output)


SMARTCTL = """#!/bin/sh
[ "$1 $2" = "--json --attributes" ] && [ $# = 3 ] || exit 1
echo "$3" >> "$(dirname "$0")/asked"
cat "$(dirname "$0")/${3##*/}.json"
exit 4
"""
"""Prints what was recorded. The status is that of a drive with something to tell besides."""


class FakeSystem:
    """A sysfs below ``root`` that has the links which the real one has, and a smartctl that knows its drives."""

    def __init__(self, root, directory):
        self.root = root / "sys"
        self.directory = directory
        self.tools = root / "tools"
        self.tools.mkdir()
        self.install(SMARTCTL)

    def install(self, script):
        (self.tools / "smartctl").write_text(script)
        (self.tools / "smartctl").chmod(0o755)

    def add_disk(self, name, *partitions, units=1, percentage=0, output=None):
        disk = self.root / "devices" / "block" / name
        (disk / "slaves").mkdir(parents=True)
        for number, partition in enumerate(partitions, start=1):
            (disk / partition).mkdir()
            (disk / partition / "partition").write_text(f"{number}\n")
        (self.tools / f"{name}.json").write_bytes(output or printed(units=units, percentage=percentage))
        return disk

    def add_stack(self, name, *slaves, level=None):
        """A device mapper or md device over others."""
        stack = self.add_disk(name)
        for slave in slaves:
            (stack / "slaves" / slave.name).symlink_to(slave)
        if level is not None:
            (stack / "md").mkdir()
            (stack / "md" / "level").write_text(f"{level}\n")
        return stack

    def mount(self, node):
        number = os.stat(self.directory).st_dev
        links = self.root / "dev" / "block"
        links.mkdir(parents=True)
        (links / f"{os.major(number)}:{os.minor(number)}").symlink_to(node)

    @property
    def asked(self):
        asked = self.tools / "asked"
        return asked.read_text().split() if asked.exists() else []

    def read(self):
        return read_health(self.directory, sysfs=self.root)


@pytest.fixture
def system(tmp_path, monkeypatch):
    if os.major(os.stat(tmp_path).st_dev) == 0:
        pytest.skip("the temporary directory lies on no block device")
    made = FakeSystem(tmp_path, tmp_path)
    monkeypatch.setenv("PATH", f"{made.tools}{os.pathsep}{os.environ['PATH']}")
    return made


class TestWalk:
    def test_a_partition_of_a_drive(self, system):
        disk = system.add_disk("nvme0n1", "nvme0n1p2", units=2, percentage=3)
        system.mount(disk / "nvme0n1p2")
        report = system.read()
        assert report.reason is None
        assert report.drives == (DriveHealth(name="nvme0n1", written_bytes=1_024_000, percentage_used=3),)
        assert system.asked == ["/dev/nvme0n1"]

    def test_an_encrypted_volume_over_a_striped_array(self, system):
        disks = [system.add_disk(f"nvme{i}n1", f"nvme{i}n1p1", units=i + 1) for i in range(4)]
        array = system.add_stack("md0", *(disk / f"{disk.name}p1" for disk in disks), level="raid0")
        system.mount(system.add_stack("dm-0", array))
        report = system.read()
        assert report.reason is None
        assert [(d.name, d.written_bytes, d.share) for d in report.drives] == [
            (f"nvme{i}n1", (i + 1) * 512_000, 0.25) for i in range(4)
        ]

    @pytest.mark.parametrize("level", ["raid1", "raid5", None], ids=str)
    def test_where_nobody_tells_each_drive_may_get_all(self, system, level):
        disks = [system.add_disk(f"nvme{i}n1") for i in range(2)]
        system.mount(system.add_stack("md0", *disks, level=level))
        assert [drive.share for drive in system.read().drives] == [1.0, 1.0]

    def test_two_partitions_of_one_drive_are_one_drive(self, system):
        one = system.add_disk("nvme0n1", "nvme0n1p1", "nvme0n1p2")
        two = system.add_disk("nvme1n1", "nvme1n1p1", "nvme1n1p2")
        parts = [disk / f"{disk.name}p{i}" for disk in (one, two) for i in (1, 2)]
        system.mount(system.add_stack("md0", *parts, level="raid0"))
        assert [(drive.name, drive.share) for drive in system.read().drives] == [("nvme0n1", 0.5), ("nvme1n1", 0.5)]
        assert len(system.asked) == 2

    def test_one_drive_of_two_that_does_not_tell(self, system):
        denied = "Smartctl open device: /dev/nvme1n1 failed: Permission denied"
        disks = [system.add_disk("nvme0n1"), system.add_disk("nvme1n1", output=refused(denied)), system.add_disk("sda")]
        system.mount(system.add_stack("md0", *disks, level="raid5"))
        report = system.read()
        assert [drive.name for drive in report.drives] == ["nvme0n1"]
        assert report.reason == (f"nvme1n1: {denied}; sda: no NVMe drive")


class TestReasons:
    def test_another_kind_of_drive_is_not_asked(self, system):
        system.mount(system.add_disk("vda"))
        assert system.read() == smart.HealthReport((), "vda: no NVMe drive")
        assert system.asked == []

    def test_no_smartctl(self, system, monkeypatch):
        system.mount(system.add_disk("nvme0n1"))
        monkeypatch.setenv("PATH", str(system.root))
        reason = "nvme0n1: smartctl, of smartmontools, is not installed"
        assert system.read() == smart.HealthReport((), reason)

    def test_a_smartctl_that_cannot_be_run(self, system):
        system.install("#!/nowhere\n")
        # Kernels and sandboxes differ in what they say of a missing interpreter.
        with pytest.raises(OSError, match="smartctl") as refused_by_system:
            subprocess.run([str(system.tools / "smartctl")], check=False)
        system.mount(system.add_disk("nvme0n1"))
        report = system.read()
        assert report.drives == ()
        assert f"nvme0n1: {refused_by_system.value}" == report.reason

    def test_a_drive_that_hangs(self, system, monkeypatch):
        monkeypatch.setattr(smart, "_TIMEOUT_S", 0.2)
        system.install("#!/bin/sh\nexec sleep 600\n")
        system.mount(system.add_disk("nvme0n1"))
        report = system.read()
        assert report.drives == ()
        assert "timed out after 0.2 seconds" in str(report.reason)

    @pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs /dev/shm")
    def test_memory_lies_on_no_drive(self):
        assert read_health("/dev/shm") == smart.HealthReport((), "/dev/shm lies on no block device of its own")

    def test_whatever_is_here_is_told_without_an_exception(self, tmp_path):
        """By the real smartctl, where there is one."""
        report = read_health(tmp_path)
        assert report.drives or report.reason
        for drive in report.drives:
            assert drive.name.startswith("nvme")
            assert 0 <= drive.percentage_used <= 255

    def test_a_missing_directory_is_the_callers_mistake(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            read_health(tmp_path / "missing")


@pytest.mark.skipif(smart.shutil.which("smartctl") is None, reason="needs smartctl")
def test_the_real_smartctl_knows_the_options_and_says_why_not():
    command = ["smartctl", "--json", "--attributes", "/dev/nvme-nowhere"]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=60)
    with pytest.raises(StorageError, match="nvme-nowhere"):
        parse_health(done.stdout)


def test_capacity_is_that_of_the_file_system(small_disk):
    directory = small_disk(16)
    (directory / "full").write_bytes(bytes(1 << 20))
    assert 12 << 20 < capacity_bytes(directory) <= 16 << 20
