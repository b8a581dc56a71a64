from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from typer.testing import CliRunner, Result

from lightning_ssd import HardwareProfile
from lightning_ssd.cli import bench as bench_module
from lightning_ssd.cli.main import app
from lightning_ssd.common.tensors import Region
from lightning_ssd.errors import ConfigError, StorageError
from lightning_ssd.planning.machine_profile import MachineProfile
from lightning_ssd.storage.backend import DEFAULT_CHUNK_BYTES
from lightning_ssd.storage.filesystem import inspect_directory
from lightning_ssd.storage.posix import PosixBackend
from lightning_ssd.storage.spill_file import Arena
from recipes.schema import SCHEMA, ConfigMistake, Schema

SIZE = 2 * DEFAULT_CHUNK_BYTES


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)], env={"COLUMNS": "300"})


@pytest.fixture
def pair(spill_dir: Path) -> tuple[Path, Path]:
    directories = spill_dir / "first", spill_dir / "second"
    for directory in directories:
        directory.mkdir()
    return directories


def test_rates_of_each_and_of_all_are_told_and_nothing_stays(pair: tuple[Path, Path]) -> None:
    done = run(*pair, "--size", "32MiB")
    assert done.exit_code == 0, done.output
    assert "Writes 0.09 GiB to each of 2 directories, 0.19 GiB in all" in done.output
    assert re.search(rf"{pair[0]} +[\d.]+ GB/s +[\d.]+ GB/s", done.output)
    assert re.search(r"all together +[\d.]+ GB/s +[\d.]+ GB/s", done.output)
    assert "Every byte came back as it was written" in done.output
    assert not list(pair[0].iterdir())


@pytest.mark.parametrize(("num_directories", "num_writes"), [(1, 2), (2, 3)])
def test_no_more_is_written_than_was_said(
    num_directories: int, num_writes: int, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = pair[:num_directories]
    written: dict[Path, int] = {}
    write = PosixBackend.write

    def counted(backend: PosixBackend, arena: Arena, region: Region, offset: int) -> None:
        written[arena.directory] = written.get(arena.directory, 0) + region.nbytes
        write(backend, arena, region, offset)

    monkeypatch.setattr(PosixBackend, "write", counted)
    backend = PosixBackend(directories)
    found = bench_module.measure(backend, directories, SIZE, device=torch.device("cpu"))
    backend.close()
    assert written == dict.fromkeys(directories, num_writes * SIZE)
    assert bench_module._num_writes(num_directories) == num_writes
    if num_directories == 1:
        assert found.together == found.alone[0], "what --write keeps is what was shown"
    assert found.nbytes == SIZE
    assert all(rate > 0 for rates in (*found.alone, found.together) for rate in (rates.write_per_s, rates.read_per_s))


def flip_one_byte(fd: int, offset: int) -> None:
    byte = os.pread(fd, 1, offset)
    os.pwrite(fd, bytes([byte[0] ^ 1]), offset)


@pytest.mark.parametrize("loses", [True, False], ids=["a lost write", "a flipped bit"])
def test_bytes_that_come_back_wrong_are_an_error(loses: bool, spill_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, calls = PosixBackend.write, []

    def failing(backend: PosixBackend, arena: Arena, region: Region, offset: int) -> None:
        calls.append(offset)
        is_last_pass = len(calls) > SIZE // DEFAULT_CHUNK_BYTES
        if loses and is_last_pass:
            return
        write(backend, arena, region, offset)
        if is_last_pass:
            with open(f"/proc/self/fd/{arena.fd}", "r+b", buffering=0) as file:
                flip_one_byte(file.fileno(), offset + 12_345)

    monkeypatch.setattr(PosixBackend, "write", failing)
    done = run(spill_dir, "--size", "32MiB")
    assert done.exit_code == 1
    assert "expected    the bytes that were written" in done.stderr
    assert not list(spill_dir.iterdir())


def test_a_drive_that_fails_is_an_error(spill_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise StorageError(5, "cannot read (test)")

    monkeypatch.setattr(PosixBackend, "read", failing)
    done = run(spill_dir, "--size", "32MiB")
    assert done.exit_code == 1
    assert "cannot read (test)" in done.stderr
    assert not list(spill_dir.iterdir())


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["{dir}", "--size", "1MiB"], "--size of at least 16MiB"),
        (["{dir}", "--size", "1000TiB"], "room of"),
        (["{dir}", "--size", "lots"], "is not a size"),
        (["{dir}", "{dir}"], "a directory that is named twice"),
        (["{dir}/missing"], "an existing directory on the drive"),
        (["{dir}", "--write", "{dir}/missing/new.yaml"], "--write in a directory"),
        (["/dev/shm"], "which is memory"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_written(
    arguments: list[str], match: str, spill_dir: Path
) -> None:
    if "/dev/shm" in arguments and not (os.path.isdir("/dev/shm") and inspect_directory("/dev/shm").is_memory):
        pytest.skip("no memory is mounted at /dev/shm")
    done = run(*(argument.format(dir=spill_dir) for argument in arguments))
    assert done.exit_code == 1
    assert match in done.stderr
    assert "Writes" not in done.output
    assert not list(spill_dir.iterdir())


def test_a_profile_that_is_there_stays(spill_dir: Path) -> None:
    file = spill_dir / "mine.yaml"
    file.write_text("mine")
    done = run(spill_dir, "--size", "32MiB", "--write", file)
    assert done.exit_code == 1
    assert "mine.yaml exists" in done.stderr
    assert file.read_text() == "mine"


def test_help_has_an_example() -> None:
    assert "Example: lightning-ssd bench /mnt/nvme0" in run("--help").output


# -- the profile -------------------------------------------------------------------------------------------------------


@pytest.fixture
def conf(tmp_path: Path) -> Schema:
    """A copy of conf, to add an option to."""
    shutil.copytree(SCHEMA.config_dir, tmp_path / "conf")
    return Schema(config_dir=tmp_path / "conf", config_name="train")


def test_a_profile_is_an_option_of_hardware(conf: Schema, spill_dir: Path) -> None:
    directory = spill_dir / 'a "name", with: oddities'
    directory.mkdir()
    done = run(directory, "--size", "32MiB", "--write", conf.config_dir / "hardware" / "mine.yaml")
    assert done.exit_code == 0, done.output
    assert "for `lightning-ssd plan`, machine.device_peak_tflops" in done.output
    config, choices = conf.compose(["hardware=mine", f"output_dir={spill_dir}", "hardware.host_memory=1GiB"])
    assert choices["hardware"] == "mine"
    conf.check_config(config)
    hardware = instantiate(config.hardware, _convert_="all")
    write_rate, read_rate = hardware.rates
    told = {"write_rate": write_rate, "read_rate": read_rate}
    assert hardware == HardwareProfile(paths=[str(directory)], host_memory="1GiB", **told)
    machine = instantiate(config.machine, _convert_="all")
    assert write_rate == pytest.approx(machine.drive_write_gb_per_s * 1e9, rel=1e-2)
    assert read_rate == pytest.approx(machine.drive_read_gb_per_s * 1e9, rel=1e-2)
    assert isinstance(machine, MachineProfile)
    assert machine.num_drives == 1
    assert machine.drive_write_gb_per_s is not None
    assert machine.drive_write_gb_per_s > 0
    assert config.trainer.devices == 1


def test_a_mistyped_fact_of_a_machine_is_refused(conf: Schema, spill_dir: Path) -> None:
    run(spill_dir, "--size", "32MiB", "--write", conf.config_dir / "hardware" / "mine.yaml")
    with pytest.raises(ConfigMistake, match=r"Did you mean machine\.num_drives"):
        conf.check_overrides(["hardware=mine", "+machine.num_drive=2"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("num_devices", 0), ("num_drives", 1.5), ("num_drives", True), ("drive_read_gb_per_s", 0)),
        *(
            ("link_gb_per_s", float("inf")),
            ("compute_efficiency", 1.5),
            ("compute_efficiency", None),
            ("device_peak_tflops", "fast"),
            ("drive_capacity_tb", -1.0),
        ),
    ],
)
def test_facts_out_of_bounds_are_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"MachineProfile\.{name}=.*; write "):
        MachineProfile(**{name: value})  # type: ignore[arg-type]


def test_a_process_gets_its_part_of_the_drives_and_no_more_than_its_link() -> None:
    profile = MachineProfile(num_drives=8, drive_write_gb_per_s=4, drive_read_gb_per_s=7, link_gb_per_s=25)
    tiers = profile.tiers(2)
    assert tiers is not None
    assert tiers.ssd is not None
    assert (tiers.ssd.write_bytes_per_s, tiers.ssd.read_bytes_per_s) == (16e9, 25e9)
    assert MachineProfile(num_drives=2).tiers(1) is None
