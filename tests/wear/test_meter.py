"""Whose bytes count for which drive, and when a warning is due."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_ssd.wear import meter as meter_module
from lightning_ssd.wear.endurance import Drive
from lightning_ssd.wear.meter import WearMeter
from lightning_ssd.wear.smart import DriveHealth, HealthReport

DAY_S = 86_400
TB = 10**12


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [1000.0]
    monkeypatch.setattr(meter_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def sleep(seconds: float) -> None:
        now[0] += seconds

    return sleep


@pytest.fixture
def directories(tmp_path: Path) -> tuple[Path, Path]:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    return first, second


def health(name: str = "nvme0n1", *, written: int | None = None, used: int = 0, share: float = 1.0) -> DriveHealth:
    return DriveHealth(name=name, written_bytes=written, percentage_used=used, share=share)


def tells(monkeypatch: pytest.MonkeyPatch, **reports: HealthReport) -> None:
    """What the drive below each directory tells."""
    monkeypatch.setattr(meter_module, "read_health", lambda directory: reports[Path(directory).name])
    monkeypatch.setattr(meter_module, "capacity_bytes", lambda directory: TB)


SILENT = HealthReport((), "no rights")


def drives(meter: WearMeter) -> dict[str, Drive]:
    return {drive.name: drive for drive in meter._drives}


def life(meter: WearMeter, written_per_day: int, wait: Callable[[float], None]) -> float | None:
    meter.border(0)
    wait(DAY_S)
    return meter.life_days(written_per_day)


# -- drives -----------------------------------------------------------------------------------------------------------


def test_without_a_rating_the_drives_are_not_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wait: Callable[[float], None]
) -> None:
    def refuse(directory: Path) -> HealthReport:
        raise AssertionError("nobody wants to know")

    monkeypatch.setattr(meter_module, "read_health", refuse)
    meter = WearMeter([tmp_path], None)
    assert life(meter, 10**18, wait) is None
    for _ in range(20):
        wait(60)
        assert meter.border(10**18) is None


def test_two_directories_on_one_drive_are_one_drive(
    monkeypatch: pytest.MonkeyPatch, directories: tuple[Path, Path], wait: Callable[[float], None]
) -> None:
    report = HealthReport((health(used=25),), None)
    tells(monkeypatch, first=report, second=report)
    meter = WearMeter(directories, 400 * TB)
    assert list(meter._drives) == [Drive(400 * TB, used_bytes=100 * TB, capacity_bytes=TB, share=1.0, name="nvme0n1")]
    assert meter.capacity_bytes == TB, "one file system counts once"
    assert life(meter, 2 * TB, wait) == pytest.approx(150)


def test_two_drives_share_what_is_written_and_the_more_worn_one_counts(
    monkeypatch: pytest.MonkeyPatch, directories: tuple[Path, Path], wait: Callable[[float], None]
) -> None:
    first = HealthReport((health("nvme0n1", used=50),), None)
    second = HealthReport((health("nvme1n1", written=300 * TB),), None)
    tells(monkeypatch, first=first, second=second)
    meter = WearMeter(directories, 400 * TB)
    assert {name: (drive.share, drive.used_bytes) for name, drive in drives(meter).items()} == {
        "nvme0n1": (0.5, 200 * TB),
        "nvme1n1": (0.5, 300 * TB),
    }
    assert life(meter, 2 * TB, wait) == pytest.approx(100)


def test_drives_that_do_not_tell_count_as_new(
    monkeypatch: pytest.MonkeyPatch, directories: tuple[Path, Path], wait: Callable[[float], None]
) -> None:
    tells(monkeypatch, first=SILENT, second=SILENT)
    meter = WearMeter(directories, 400 * TB)
    (drive,) = meter._drives
    assert (drive.share, drive.used_bytes) == (1.0, 0), "both directories lie on one file system"
    assert drive.name == f"number {os.stat(directories[0]).st_dev}"
    assert life(meter, 2 * TB, wait) == pytest.approx(200)
    tells(monkeypatch, first=HealthReport((health(),), None), second=SILENT)
    monkeypatch.setattr(meter_module, "capacity_bytes", lambda directory: 0)
    meter = WearMeter(directories, TB)
    assert sorted(drive.share for drive in meter._drives) == [0.5, 0.5], "one tells and one does not"
    assert [drive.capacity_bytes for drive in meter._drives] == [None, None]
    assert meter.capacity_bytes == 0, "a file system that tells no size is no error"


def test_members_of_an_array_have_their_part_of_their_directory(
    monkeypatch: pytest.MonkeyPatch, directories: tuple[Path, Path]
) -> None:
    striped = HealthReport((health("nvme0n1", share=0.5), health("nvme1n1", share=0.5)), None)
    tells(monkeypatch, first=striped, second=HealthReport((health("nvme1n1"),), None))
    assert {name: drive.share for name, drive in drives(WearMeter(directories, TB)).items()} == {
        "nvme0n1": 0.25,
        "nvme1n1": 0.75,
    }


def test_a_real_directory_can_be_asked(tmp_path: Path, wait: Callable[[float], None]) -> None:
    space = os.statvfs(tmp_path)
    meter = WearMeter([tmp_path], 1000 * TB)
    assert meter.capacity_bytes == space.f_blocks * space.f_frsize
    assert meter._drives
    days = life(meter, TB, wait)
    assert days is not None
    assert 0 <= days <= 1000


# -- counting ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., WearMeter]:
    def make(rating_bytes: int = 100 * TB, *, num_processes: int = 1) -> WearMeter:
        tells(monkeypatch, **{tmp_path.name: HealthReport((health(),), None)})
        return WearMeter([tmp_path], rating_bytes, num_processes=num_processes)

    return make


def test_life_counts_from_the_first_border(meter: Callable[..., WearMeter], wait: Callable[[float], None]) -> None:
    assert life(meter(num_processes=4), TB, wait) == pytest.approx(25), "every process writes as much"
    one = meter()
    assert one.life_days(50 * TB) is None
    one.border(50 * TB)
    assert one.life_days(50 * TB) is None, "no time has passed"
    wait(DAY_S / 2)
    assert one.life_days(50 * TB) is None, "nothing was written"
    assert one.life_days(51 * TB) == pytest.approx(50)
    wait(DAY_S / 2)
    assert one.life_days(51 * TB) == pytest.approx(100)


def borders(one: WearMeter, wait: Callable[[float], None], *, num: int, every_s: float, nbytes: int) -> list[bool]:
    told = []
    for number in range(num):
        told.append(one.border(number * nbytes) is not None)
        wait(every_s)
    return told


FAST = 10**12  # per border: any drive is worn out within hours


def test_a_warning_comes_once_and_not_before_it_can_be_trusted(
    meter: Callable[..., WearMeter], wait: Callable[[float], None]
) -> None:
    assert borders(meter(), wait, num=40, every_s=5, nbytes=FAST) == [n == 12 for n in range(40)], "60 s"
    assert borders(meter(), wait, num=20, every_s=100, nbytes=FAST) == [n == 7 for n in range(20)], "8 borders"


def test_no_warning_where_the_drive_lasts(meter: Callable[..., WearMeter], wait: Callable[[float], None]) -> None:
    at_limit = 100 * TB // 180 // DAY_S  # bytes per second: 180 days
    assert not any(borders(meter(), wait, num=40, every_s=10, nbytes=at_limit * 10))
    assert any(borders(meter(), wait, num=40, every_s=10, nbytes=at_limit * 11))
    assert any(borders(meter(num_processes=2), wait, num=40, every_s=10, nbytes=at_limit * 10))
    assert not any(borders(meter(), wait, num=40, every_s=10, nbytes=0))


def test_a_run_that_gets_worse_is_warned_of_later(
    meter: Callable[..., WearMeter], wait: Callable[[float], None]
) -> None:
    one = meter()
    assert not any(borders(one, wait, num=20, every_s=10, nbytes=0))
    warning = one.border(50 * TB)
    assert warning is not None
    assert warning.startswith("drive nvme0n1 reaches its rated 100.0 TB after ")
    assert "OffloadPolicy.wear_budget" in warning
    assert one.border(60 * TB) is None
    assert one.life_days(60 * TB) is not None, "the number goes on"
