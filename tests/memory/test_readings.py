import errno
import io
import mmap
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_ssd.memory.readings import (
    ResidentSet,
    available_bytes,
    cgroup_available_bytes,
    cgroup_limit_bytes,
    host_available_bytes,
    level_bytes,
    read_memory,
    reset_device_peak,
    reset_host_peak,
)

MIB = 1 << 20
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux_only
def test_host_readings_follow_an_allocation():
    before = read_memory()
    with mmap.mmap(-1, 256 * MIB) as block:  # not malloc's: what that holds free depends on the tests that ran before
        for _ in range(256):
            block.write(b"1" * MIB)
        during = read_memory("cpu")
    # Far less than was touched: another thread may give memory back just now.
    assert during.host_bytes - before.host_bytes > 128 * MIB
    assert during.host_peak_bytes >= during.host_bytes
    assert during.device_bytes is during.device_peak_bytes is None


@linux_only
def test_the_host_peak_begins_anew_only_on_request():
    # Mapped by ourselves and touched: what malloc keeps of a freed tensor depends on the tests that ran before.
    with mmap.mmap(-1, 128 * MIB) as block:
        block.write(b"1" * (128 * MIB))
    peak = read_memory().host_peak_bytes
    assert read_memory().host_peak_bytes >= peak
    if not reset_host_peak():
        pytest.skip("this kernel has no /proc/self/clear_refs")
    after = read_memory()
    # The peak may have been reached long ago; what is certain is that the new one has no room for the block.
    assert after.host_peak_bytes <= peak - 64 * MIB
    assert after.host_peak_bytes < after.host_bytes + 64 * MIB


def test_asking_for_cuda_does_not_start_it():
    readings = read_memory("cuda:0")
    if not torch.cuda.is_initialized():
        assert readings.device_peak_bytes is None
        assert not reset_device_peak("cuda:0")
    assert not reset_device_peak("cpu")


@pytest.mark.gpu
def test_device_peak_and_its_reset():
    block = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    held = read_memory("cuda").device_bytes
    del block
    readings = read_memory("cuda")
    assert readings.device_peak_bytes >= held >= 64 * MIB
    assert readings.device_bytes <= held - 64 * MIB
    assert reset_device_peak("cuda")
    assert read_memory("cuda").device_peak_bytes < readings.device_peak_bytes


@linux_only
def test_the_level_of_a_cpu_is_what_the_process_uses():
    cpu = torch.device("cpu")
    before = level_bytes(cpu)
    with mmap.mmap(-1, 64 * MIB) as block:
        for _ in range(64):  # in pieces: malloc may keep a large object's memory once it is freed
            block.write(b"1" * MIB)
        during = level_bytes(cpu)
        assert abs(during - read_memory().host_bytes) < 16 * MIB
    assert 48 * MIB < during - before < 80 * MIB
    assert level_bytes(cpu) < during - 48 * MIB
    before = len(os.listdir("/proc/self/fd"))
    level_bytes(cpu)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_level_that_nobody_tells_is_zero(monkeypatch):
    def missing(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(io, "FileIO", missing)
    assert level_bytes(torch.device("cpu")) == 0


@linux_only
def test_the_resident_set_is_that_of_this_process_in_a_fork_too():
    cpu = torch.device("cpu")
    resident = ResidentSet()
    before = resident.read()
    assert abs(before - level_bytes(cpu)) < 4 * MIB
    with mmap.mmap(-1, 64 * MIB) as block:
        block.write(bytes(64 * MIB))
        assert abs(resident.read() - level_bytes(cpu)) < 4 * MIB
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with mmap.mmap(-1, 64 * MIB) as block:
                block.write(bytes(64 * MIB))
                status = int(abs(resident.read() - level_bytes(cpu)) >= 4 * MIB)
            resident.close()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert resident.read() > 0
    num_open = len(os.listdir("/proc/self/fd"))
    resident.close()
    resident.close()
    assert len(os.listdir("/proc/self/fd")) == num_open - 1
    assert abs(resident.read() - level_bytes(cpu)) < 4 * MIB, "opened each time"


@linux_only
def test_a_resident_set_without_a_file_descriptor(monkeypatch):
    def refuse(*args):
        raise OSError(errno.EMFILE, "none left")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        resident = ResidentSet()
    assert resident.read() > 0
    resident.close()


def test_the_level_of_a_device_is_read_without_starting_cuda(monkeypatch):
    if not torch.cuda.is_initialized():
        assert level_bytes(torch.device("cuda", 0)) == 0
        assert not torch.cuda.is_initialized()
    seen = {"allocated_bytes": {"all": {"current": 7, "peak": 9}}}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: seen)
    assert level_bytes(torch.device("cuda", 0)) == 7


@linux_only
def test_available_on_a_cpu_is_what_the_host_has(monkeypatch):
    assert host_available_bytes() > 0
    # What others take between two readings is not ours.
    monkeypatch.setattr("lightning_ssd.memory.readings.host_available_bytes", lambda: 12345)
    assert available_bytes(torch.device("cpu")) == 12345


@pytest.mark.parametrize(("fraction", "expected"), [(1.0, 130), (0.5, 130), (0.1, 80), (0.04, 30)])
def test_what_a_process_may_not_take_is_not_available(fraction, expected, monkeypatch):
    """Or passes would keep what only the device has room for, and prefetch into it."""
    stats = {"reserved_bytes.all.current": 50, "allocated_bytes.all.current": 20}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: fraction)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1000))
    assert available_bytes(torch.device("cuda", 0)) == expected, "what the allocator holds unused is available"
    stats.clear()
    assert available_bytes(torch.device("cuda", 0)) == min(100, 1000 * fraction), "nobody has allocated yet"


@pytest.mark.gpu
def test_level_and_room_of_a_device_follow_an_allocation():
    device = torch.device("cuda", torch.cuda.current_device())
    torch.empty(1, device=device)
    level, room = level_bytes(device), available_bytes(device)
    block = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
    assert level_bytes(device) - level == 64 * MIB == read_memory(device).device_bytes - level
    assert room - available_bytes(device) > 48 * MIB
    del block
    assert level_bytes(device) == level


@pytest.mark.gpu
def test_room_of_a_process_that_may_take_a_part():
    device = torch.device("cuda", torch.cuda.current_device())
    torch.empty(1, device=device)
    total = torch.cuda.get_device_properties(device).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction(0.1, device)
        assert available_bytes(device) <= 0.1 * total
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


# cgroups: trees of files laid out as the kernel shows them.


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def mountinfo_line(root: str, mount: Path, kind: str, options: str) -> str:
    return f"36 31 0:33 {root} {mount} rw,relatime shared:9 - {kind} {kind} {options}\n"


def test_cgroup_v2_takes_the_lowest_limit_up_to_the_mount(tmp_path):
    mount = tmp_path / "fs"
    write_tree(
        tmp_path,
        {
            "cgroup": "0::/job/step\n",
            "mountinfo": mountinfo_line("/", mount, "cgroup2", "rw"),
            "fs/cgroup.controllers": "memory",
            "fs/job/cgroup.controllers": "memory",
            "fs/job/memory.max": f"{100 * MIB}\n",
            "fs/job/memory.current": f"{70 * MIB}\n",
            "fs/job/memory.stat": f"anon 1\ninactive_file {20 * MIB}\nactive_file {30 * MIB}\n",
            "fs/job/step/cgroup.controllers": "memory",
            "fs/job/step/memory.max": "max\n",
            "fs/job/step/memory.current": f"{70 * MIB}\n",
        },
    )
    assert cgroup_limit_bytes(tmp_path) == 100 * MIB
    assert cgroup_available_bytes(tmp_path) == 50 * MIB
    assert cgroup_available_bytes(tmp_path, cached_bytes=10 * MIB) == 60 * MIB
    assert cgroup_available_bytes(tmp_path, cached_bytes=100 * MIB) == 80 * MIB


def test_cgroup_v1_with_only_a_subtree_mounted(tmp_path):
    mount = tmp_path / "memory"
    write_tree(
        tmp_path,
        {
            "cgroup": "5:cpu:/\n4:memory:/docker/abc\n",
            "mountinfo": mountinfo_line("/docker/abc", mount, "cgroup", "rw,memory")
            + mountinfo_line("/", tmp_path / "cpu", "cgroup", "rw,cpu"),
            "memory/memory.limit_in_bytes": f"{64 * MIB}\n",
            "memory/memory.usage_in_bytes": f"{80 * MIB}\n",
            "memory/memory.stat": "total_inactive_file 0\n",
        },
    )
    assert cgroup_limit_bytes(tmp_path) == 64 * MIB
    assert cgroup_available_bytes(tmp_path) == 0


def test_a_cgroup_namespace_hides_where_we_are(tmp_path):
    mount = tmp_path / "fs"
    write_tree(
        tmp_path,
        {
            "cgroup": "0::/\n",
            "mountinfo": mountinfo_line("/../..", mount, "cgroup2", "rw"),
            "fs/cgroup.controllers": "memory",
            "fs/memory.max": f"{MIB}\n",
        },
    )
    assert cgroup_limit_bytes(tmp_path) == MIB


@pytest.mark.parametrize("limit", ["max", "9223372036854771712"])
def test_no_cgroup_limit(tmp_path, limit):
    assert cgroup_limit_bytes(tmp_path) is None, "without cgroups"
    mount = tmp_path / "memory"
    write_tree(
        tmp_path,
        {
            "cgroup": "4:memory:/\n",
            "mountinfo": mountinfo_line("/", mount, "cgroup", "rw,memory"),
            "memory/memory.limit_in_bytes": f"{limit}\n",
        },
    )
    assert cgroup_limit_bytes(tmp_path) is None
    assert cgroup_available_bytes(tmp_path) is None
