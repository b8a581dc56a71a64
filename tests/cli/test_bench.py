import os
import re
from functools import partial

import pytest

from lightning_ssd import HardwareProfile
from lightning_ssd.cli import bench as bench_module
from lightning_ssd.errors import ConfigError
from lightning_ssd.planning.machine_profile import MachineProfile
from lightning_ssd.storage.backend import DEFAULT_CHUNK_BYTES
from lightning_ssd.storage.filesystem import inspect_directory
from lightning_ssd.storage.posix import PosixBackend
from tests.support.commands import command, said

SIZE, NUM_CHUNKS = 2 * DEFAULT_CHUNK_BYTES, 4


run = partial(command, "bench")


@pytest.fixture
def pair(spill_dir):
    directories = spill_dir / "first", spill_dir / "second"
    for directory in directories:
        directory.mkdir()
    return directories


def test_rates_of_each_and_of_all_are_told_and_nothing_stays(pair):
    done = run(*pair, "--size", SIZE)
    assert done.exit_code == 0, done.output
    assert "Writes 0.25 GiB to 2 directories, more to faster ones" in done.output
    assert re.search(rf"{pair[0]} +[\d.]+ GB/s +[\d.]+ GB/s", done.output)
    assert re.search(r"all together +[\d.]+ GB/s +[\d.]+ GB/s", done.output)
    assert "came back from each as it was written" in done.output
    assert not list(pair[0].iterdir())


@pytest.mark.parametrize(("num_directories", "num_writes", "told"), [(1, 2, "64.0 MiB"), (2, 4, "0.25 GiB")])
def test_no_more_is_written_than_was_said(num_directories, num_writes, told, pair, monkeypatch):
    written = {}
    write = PosixBackend.write

    def counted(backend, arena, region, offset):
        written[arena.directory] = written.get(arena.directory, 0) + region.nbytes
        write(backend, arena, region, offset)

    monkeypatch.setattr(PosixBackend, "write", counted)
    monkeypatch.setattr(bench_module, "read_back_s", lambda *_, **__: 1.0)
    done = run(*pair[:num_directories], "--size", SIZE)
    assert done.exit_code == 0, done.output
    assert sum(written.values()) == num_directories * num_writes * SIZE
    assert min(written.values()) > 2 * SIZE or num_directories == 1, "each is written alone, and with the others"
    assert f"Writes {told} to " in done.output


@pytest.mark.parametrize(("backend", "told"), [("posix", "64.0 MiB"), ("cufile", "0.12 GiB"), ("kvikio", "0.12 GiB")])
def test_the_trial_of_a_named_library_is_told_of(backend, told, spill_dir):
    """Whether it works here or not."""
    assert f"Writes {told} to the directory" in run(spill_dir, "--size", SIZE, "--backend", backend).output


@pytest.mark.parametrize("loses", [True, False], ids=["a lost write", "a flipped bit"])
def test_bytes_that_come_back_wrong_are_an_error(loses, spill_dir, monkeypatch):
    write, calls = PosixBackend.write, []

    def failing(backend, arena, region, offset):
        calls.append(offset)
        is_measured = len(calls) <= 2 * NUM_CHUNKS
        if is_measured or not loses:
            write(backend, arena, region, offset)
        if not is_measured and not loses:
            with open(f"/proc/self/fd/{arena.fd}", "r+b", buffering=0) as file:
                (byte,) = os.pread(file.fileno(), 1, offset + 12_345)
                os.pwrite(file.fileno(), bytes([byte ^ 1]), offset + 12_345)

    monkeypatch.setattr(PosixBackend, "write", failing)
    done = run(spill_dir, "--size", SIZE)
    assert done.exit_code == 1
    assert "expected the bytes that were written" in said(done)
    assert not list(spill_dir.iterdir())


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["{dir}", "--size", "1MiB"], "--size of at least 16MiB"),
        (["{dir}", "--size", "1000TiB"], "room of"),
        (["{dir}", "--size", "lots"], "is not a size"),
        (["{dir}", "{dir}"], "a directory that is named twice"),
        (["{dir}/missing"], "an existing directory on the drive"),
        (["/dev/shm"], "which is memory"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_written(arguments, match, spill_dir):
    if "/dev/shm" in arguments and not (os.path.isdir("/dev/shm") and inspect_directory("/dev/shm").is_memory):
        pytest.skip("no memory is mounted at /dev/shm")
    done = run(*(argument.format(dir=spill_dir) for argument in arguments))
    assert done.exit_code == 1
    assert match in said(done)
    assert "Writes" not in done.output
    assert not list(spill_dir.iterdir())


def test_the_rates_are_settings_to_paste(pair):
    line = run(*pair, "--size", SIZE).output.splitlines()[-1]
    profile = eval(line, {"HardwareProfile": HardwareProfile})
    assert profile.paths == tuple(map(str, pair))
    assert all(rate > 1e6 for rate in profile.rates)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("num_devices", 0), ("num_drives", 1.5), ("num_drives", True), ("drive_read_gb_per_s", 0)),
        *(("link_gb_per_s", float("inf")), ("compute_efficiency", 1.5), ("compute_efficiency", None)),
        *(("device_peak_tflops", "fast"), ("drive_write_gb_per_s", -1.0)),
    ],
)
def test_facts_out_of_bounds_are_refused(name, value):
    with pytest.raises(ConfigError, match=rf"MachineProfile\.{name}=.*; write "):
        MachineProfile(**{name: value})


def test_a_process_gets_its_part_of_the_drives_and_no_more_than_its_link():
    profile = MachineProfile(num_drives=8, drive_write_gb_per_s=4, drive_read_gb_per_s=7, link_gb_per_s=25)
    tiers = profile.tiers(2)
    assert (tiers.ssd.write_bytes_per_s, tiers.ssd.read_bytes_per_s) == (16e9, 25e9)
    assert MachineProfile(num_drives=2).tiers(1) is None
