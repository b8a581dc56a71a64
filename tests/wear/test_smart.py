"""Health of the drives under a directory: the page, the walk through sysfs, the call, and every reason why not."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_ssd.errors import StorageError
from lightning_ssd.wear import smart
from lightning_ssd.wear.smart import DriveHealth, capacity_bytes, parse_health_page, read_health

DEVICES = Path("/nowhere")


def health_page(*, units: int, percentage: int) -> bytes:
    """Written from the specification, field by field."""
    page = struct.pack("<BHBBBB", 0, 300, 100, 10, percentage, 0).ljust(32, b"\0")
    for counter in (111, units, 333, 444):  # units read, units written, host reads, host writes
        page += counter.to_bytes(16, "little")
    return page.ljust(512, b"\xaa")


class TestPage:
    def test_units_are_512_000_bytes(self) -> None:
        assert parse_health_page(health_page(units=1_000_000, percentage=7)) == (512 * 10**9, 7)

    def test_counters_have_16_bytes_and_a_percentage_passes_100(self) -> None:
        assert parse_health_page(health_page(units=2**100, percentage=255)) == (2**100 * 512_000, 255)

    def test_a_drive_that_does_not_count_says_0(self) -> None:
        assert parse_health_page(health_page(units=0, percentage=3)) == (None, 3)

    @pytest.mark.parametrize("nbytes", [0, 511, 513])
    def test_other_lengths_are_refused(self, nbytes: int) -> None:
        with pytest.raises(StorageError, match=f"health log page of {nbytes} bytes; allowed: 512"):
            parse_health_page(bytes(nbytes))


class FakeSystem:
    """A sysfs below ``root`` that has the links which the real one has."""

    def __init__(self, root: Path, directory: Path) -> None:
        self.root = root
        self.directory = directory
        self.pages: dict[str, bytes | OSError] = {}
        self.asked: list[Path] = []

    def add_controller(self, name: str, *, model: str = "MODEL 1TB   ", units: int = 1, percentage: int = 0) -> Path:
        controller = self.root / "devices" / "pci0000:00" / "nvme" / name
        controller.mkdir(parents=True)
        (controller / "model").write_text(f"{model}\n")
        self.pages[name] = health_page(units=units, percentage=percentage)
        return controller

    def add_disk(self, name: str, controller: Path | None, *partitions: str) -> Path:
        disk = (controller or self.root / "devices" / "virtual" / "block") / name
        (disk / "slaves").mkdir(parents=True)
        if controller is not None:
            (disk / "device").symlink_to(controller)
        for number, partition in enumerate(partitions, start=1):
            (disk / partition).mkdir()
            (disk / partition / "partition").write_text(f"{number}\n")
        return disk

    def add_stack(self, name: str, *slaves: Path, level: str | None = None) -> Path:
        """A device mapper or md device over others."""
        stack = self.add_disk(name, None)
        for slave in slaves:
            (stack / "slaves" / slave.name).symlink_to(slave)
        if level is not None:
            (stack / "md").mkdir()
            (stack / "md" / "level").write_text(f"{level}\n")
        return stack

    def mount(self, node: Path) -> None:
        number = os.stat(self.directory).st_dev
        links = self.root / "dev" / "block"
        links.mkdir(parents=True)
        (links / f"{os.major(number)}:{os.minor(number)}").symlink_to(node)

    def read_page(self, device: Path) -> bytes:
        self.asked.append(device)
        page = self.pages[device.name]
        if isinstance(page, OSError):
            raise page
        return page

    def read(self) -> smart.HealthReport:
        return read_health(self.directory, sysfs=self.root, devices=DEVICES, read_page=self.read_page)


@pytest.fixture
def system(tmp_path: Path) -> FakeSystem:
    if os.major(os.stat(tmp_path).st_dev) == 0:
        pytest.skip("the temporary directory lies on no block device")
    return FakeSystem(tmp_path / "sys", tmp_path)


class TestWalk:
    def test_a_partition_of_a_drive(self, system: FakeSystem) -> None:
        disk = system.add_disk("nvme0n1", system.add_controller("nvme0", units=2, percentage=3), "nvme0n1p2")
        system.mount(disk / "nvme0n1p2")
        report = system.read()
        assert report.reason is None
        assert report.drives == (
            DriveHealth(name="nvme0n1", written_bytes=1_024_000, percentage_used=3, model="MODEL 1TB"),
        )
        assert system.asked == [DEVICES / "nvme0"]

    def test_a_whole_drive(self, system: FakeSystem) -> None:
        system.mount(system.add_disk("nvme0n1", system.add_controller("nvme0")))
        assert [drive.name for drive in system.read().drives] == ["nvme0n1"]

    def test_with_multipath_the_name_does_not_tell_the_controller(self, system: FakeSystem) -> None:
        """The disk hangs on its subsystem, and that on its controllers."""
        subsystem = system.root / "devices" / "virtual" / "nvme-subsystem" / "nvme-subsys0"
        subsystem.mkdir(parents=True)
        for name in ("nvme10", "nvme2"):
            (subsystem / name).symlink_to(system.add_controller(name))
        (subsystem / "subsysnqn").write_text("nqn\n")
        disk = subsystem / "nvme0n1"
        disk.mkdir()
        (disk / "device").symlink_to(subsystem)
        system.mount(disk)
        report = system.read()
        assert [drive.name for drive in report.drives] == ["nvme0n1"]
        assert system.asked == [DEVICES / "nvme2"]

    def test_an_encrypted_volume_over_a_striped_array(self, system: FakeSystem) -> None:
        disks = [
            system.add_disk(f"nvme{i}n1", system.add_controller(f"nvme{i}", units=i + 1), f"nvme{i}n1p1")
            for i in range(4)
        ]
        array = system.add_stack("md0", *(disk / f"{disk.name}p1" for disk in disks), level="raid0")
        system.mount(system.add_stack("dm-0", array))
        report = system.read()
        assert report.reason is None
        assert [(d.name, d.written_bytes, d.share) for d in report.drives] == [
            (f"nvme{i}n1", (i + 1) * 512_000, 0.25) for i in range(4)
        ]

    @pytest.mark.parametrize("level", ["raid1", "raid5", None], ids=str)
    def test_where_nobody_tells_each_drive_may_get_all(self, system: FakeSystem, level: str | None) -> None:
        disks = [system.add_disk(f"nvme{i}n1", system.add_controller(f"nvme{i}")) for i in range(2)]
        system.mount(system.add_stack("md0", *disks, level=level))
        assert [drive.share for drive in system.read().drives] == [1.0, 1.0]

    def test_two_partitions_of_one_drive_are_one_drive(self, system: FakeSystem) -> None:
        one = system.add_disk("nvme0n1", system.add_controller("nvme0"), "nvme0n1p1", "nvme0n1p2")
        two = system.add_disk("nvme1n1", system.add_controller("nvme1"), "nvme1n1p1", "nvme1n1p2")
        parts = [disk / f"{disk.name}p{i}" for disk in (one, two) for i in (1, 2)]
        system.mount(system.add_stack("md0", *parts, level="raid0"))
        assert [(drive.name, drive.share) for drive in system.read().drives] == [("nvme0n1", 0.5), ("nvme1n1", 0.5)]
        assert len(system.asked) == 2

    def test_one_drive_of_two_that_does_not_tell(self, system: FakeSystem) -> None:
        system.add_controller("nvme1")
        system.pages["nvme1"] = PermissionError(errno.EACCES, "Permission denied")
        disks = [
            system.add_disk("nvme0n1", system.add_controller("nvme0")),
            system.add_disk("nvme1n1", system.root / "devices" / "pci0000:00" / "nvme" / "nvme1"),
            system.add_disk("sda", None),
        ]
        system.mount(system.add_stack("md0", *disks, level="raid5"))
        report = system.read()
        assert [drive.name for drive in report.drives] == ["nvme0n1"]
        assert report.reason == (
            "reading the health log of nvme1n1 through /nowhere/nvme1 needs administrator rights (CAP_SYS_ADMIN); "
            "sda is not an NVMe drive"
        )


class TestReasons:
    def test_another_kind_of_drive(self, system: FakeSystem) -> None:
        disk = system.add_disk("vda", None)
        (system.root / "devices" / "virtio1").mkdir()
        (disk / "device").symlink_to(system.root / "devices" / "virtio1")
        system.mount(disk)
        assert system.read() == smart.HealthReport((), "vda is not an NVMe drive")
        assert system.asked == []

    @pytest.mark.parametrize(
        ("error", "reason"),
        [
            (PermissionError(errno.EPERM, "Operation not permitted"), "needs administrator rights"),
            (FileNotFoundError(errno.ENOENT, "No such file"), "/nowhere/nvme0, which tells .* in a container"),
            (OSError(errno.ENOTTY, "Inappropriate ioctl"), "nvme0n1 did not tell its health .* Inappropriate ioctl"),
            (StorageError("the drive refused with NVMe status 0x2"), "refused with NVMe status 0x2"),
        ],
    )
    def test_a_drive_that_cannot_be_asked(self, system: FakeSystem, error: OSError, reason: str) -> None:
        system.mount(system.add_disk("nvme0n1", system.add_controller("nvme0")))
        system.pages["nvme0"] = error
        report = system.read()
        assert report.drives == ()
        with pytest.raises(StorageError, match=reason):
            raise StorageError(report.reason)

    def test_no_sysfs(self, system: FakeSystem) -> None:
        report = system.read()
        assert report.drives == ()
        assert "does not exist, so that the drive below" in str(report.reason)

    @pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs /dev/shm")
    def test_memory_lies_on_no_drive(self) -> None:
        assert read_health("/dev/shm") == smart.HealthReport((), "/dev/shm lies on no block device of its own")

    def test_whatever_is_here_is_told_without_an_exception(self, tmp_path: Path) -> None:
        report = read_health(tmp_path)
        assert report.drives or report.reason
        for drive in report.drives:
            assert drive.name.startswith("nvme")
            assert 0 <= drive.percentage_used <= 255

    def test_a_missing_directory_is_the_callers_mistake(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            read_health(tmp_path / "missing")


class TestAsking:
    """The call to the kernel, with the kernel played."""

    @pytest.fixture
    def device(self, tmp_path: Path) -> Path:
        (tmp_path / "nvme0").touch()
        return tmp_path / "nvme0"

    def play(self, monkeypatch: pytest.MonkeyPatch, answer: Callable[[int, Any], int]) -> None:
        def ioctl(fd: int, request: int, command: Any) -> int:
            assert os.fstat(fd).st_size == 0
            return answer(request, command)

        monkeypatch.setattr(fcntl, "ioctl", ioctl)

    def test_what_is_asked_and_where_the_answer_goes(self, device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        wanted = health_page(units=42, percentage=9)

        def answer(request: int, command: Any) -> int:
            assert request == 3 << 30 | 72 << 16 | ord("N") << 8 | 0x41, "_IOWR('N', 0x41, 72 bytes)"
            raw = bytes(command)
            assert raw[0] == 0x02
            assert struct.unpack_from("<I", raw, 4) == (0xFFFFFFFF,)
            address, _, nbytes, which = struct.unpack_from("<QIII", raw, 24)
            assert (nbytes, which) == (512, 127 << 16 | 2)
            ctypes.memmove(address, wanted, nbytes)
            return 0

        self.play(monkeypatch, answer)
        assert smart._read_page(device) == wanted

    def test_the_struct_is_that_of_the_kernel(self) -> None:
        assert ctypes.sizeof(smart._AdminCommand) == 72
        offsets = {name: getattr(smart._AdminCommand, name).offset for name, *_ in smart._AdminCommand._fields_}
        assert offsets | {"nsid": 4, "metadata": 16, "addr": 24, "data_len": 36, "cdw10": 40, "result": 68} == offsets

    def test_a_status_of_the_drive_is_an_error(self, device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.play(monkeypatch, lambda request, command: 0x4002)
        with pytest.raises(StorageError, match="refused with NVMe status 0x4002"):
            smart._read_page(device)

    def test_no_descriptor_is_left_open(self, device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(request: int, command: Any) -> int:
            raise PermissionError(errno.EACCES, "Permission denied")

        self.play(monkeypatch, refuse)
        before = os.listdir("/proc/self/fd")
        with pytest.raises(PermissionError):
            smart._read_page(device)
        assert os.listdir("/proc/self/fd") == before

    def test_the_real_kernel_refuses_what_is_no_controller(self, device: Path) -> None:
        with pytest.raises(OSError, match="Inappropriate ioctl") as caught:
            smart._read_page(device)
        assert caught.value.errno == errno.ENOTTY


def test_capacity_is_that_of_the_file_system(small_disk: Callable[[int], Path]) -> None:
    directory = small_disk(16)
    (directory / "full").write_bytes(bytes(1 << 20))
    assert 12 << 20 < capacity_bytes(directory) <= 16 << 20
