import mmap
import os
from types import SimpleNamespace

import pytest
import torch

from lightning_ssd.memory.readings import (
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


def test_the_level_of_a_cpu_is_what_the_process_uses():
    cpu = torch.device("cpu")
    before = level_bytes(cpu)
    with mmap.mmap(-1, 64 * MIB) as block:
        for _ in range(64):  # in pieces: malloc may keep a large object's memory once it is freed
            block.write(b"1" * MIB)
        during = level_bytes(cpu)
        assert abs(during - read_memory().host_bytes) < 16 * MIB
    assert read_memory("cpu").device_bytes is read_memory("cpu").device_peak_bytes is None
    assert 48 * MIB < during - before < 80 * MIB
    assert level_bytes(cpu) < during - 48 * MIB
    before = len(os.listdir("/proc/self/fd"))
    level_bytes(cpu)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_level_of_a_device_is_read_without_starting_cuda(monkeypatch):
    if not torch.cuda.is_initialized():
        assert level_bytes(torch.device("cuda", 0)) == 0
        assert read_memory("cuda:0").device_peak_bytes is None
        assert not reset_device_peak("cuda:0")
        assert not torch.cuda.is_initialized()
    assert not reset_device_peak("cpu")
    seen = {"allocated_bytes": {"all": {"current": 7, "peak": 9}}}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: seen)
    assert level_bytes(torch.device("cuda", 0)) == 7


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


def line(root, mount, kind, options):
    return f"36 31 0:33 {root} {{}}/{mount} rw,relatime shared:9 - {kind} {kind} {options}\n"


UNLIMITED = {"cgroup": "4:memory:/\n", "mountinfo": line("/", "memory", "cgroup", "rw,memory")}
TREES = {
    "v2 takes the lowest limit up to the mount": (
        {
            "cgroup": "0::/job/step\n",
            "mountinfo": line("/", "fs", "cgroup2", "rw"),
            "fs/cgroup.controllers": "memory",
            "fs/job/cgroup.controllers": "memory",
            "fs/job/memory.max": f"{100 * MIB}\n",
            "fs/job/memory.current": f"{70 * MIB}\n",
            "fs/job/memory.stat": f"anon 1\ninactive_file {20 * MIB}\nactive_file {30 * MIB}\n",
            "fs/job/step/cgroup.controllers": "memory",
            "fs/job/step/memory.max": "max\n",
            "fs/job/step/memory.current": f"{70 * MIB}\n",
        },
        (100 * MIB, {0: 50 * MIB, 10 * MIB: 60 * MIB, 100 * MIB: 80 * MIB}),
    ),
    "v1 with only a subtree mounted": (
        {
            "cgroup": "5:cpu:/\n4:memory:/docker/abc\n",
            "mountinfo": line("/docker/abc", "memory", "cgroup", "rw,memory") + line("/", "cpu", "cgroup", "rw,cpu"),
            "memory/memory.limit_in_bytes": f"{64 * MIB}\n",
            "memory/memory.usage_in_bytes": f"{80 * MIB}\n",
            "memory/memory.stat": "total_inactive_file 0\n",
        },
        (64 * MIB, {0: 0}),
    ),
    "a namespace hides where we are": (
        {
            "cgroup": "0::/\n",
            "mountinfo": line("/../..", "fs", "cgroup2", "rw"),
            "fs/cgroup.controllers": "memory",
            "fs/memory.max": f"{MIB}\n",
        },
        (MIB, {}),
    ),
    "no limit": (UNLIMITED | {"memory/memory.limit_in_bytes": "max\n"}, (None, {0: None})),
    "the largest limit": (UNLIMITED | {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, (None, {0: None})),
    "without cgroups": ({}, (None, {0: None})),
}


@pytest.mark.parametrize("name", TREES)
def test_cgroups(name, tmp_path):
    files, (limit, available) = TREES[name]
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text.format(*[tmp_path] * text.count("{}")))
    assert cgroup_limit_bytes(tmp_path) == limit
    for cached, nbytes in available.items():
        assert cgroup_available_bytes(tmp_path, cached_bytes=cached) == nbytes
