import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_ssd.errors import ConfigError
from lightning_ssd.memory import (
    MallocThreshold,
    available_bytes,
    cgroup_available_bytes,
    cgroup_limit_bytes,
    host_available_bytes,
    host_total_bytes,
    level_bytes,
    read_memory,
    reset_device_peak,
    reset_host_peak,
    trim,
)

MIB = 1 << 20
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
glibc_only = pytest.mark.skipif(MallocThreshold().reason is not None, reason=f"no mallopt: {MallocThreshold().reason}")


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


def test_a_level_that_nobody_tells_is_zero(monkeypatch):
    def missing(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_bytes", missing)
    assert level_bytes(torch.device("cpu")) == 0


def test_the_level_of_a_device_is_read_without_starting_cuda(monkeypatch):
    if not torch.cuda.is_initialized():
        assert level_bytes(torch.device("cuda", 0)) == 0
        assert not torch.cuda.is_initialized()
    seen = {"allocated_bytes": {"all": {"current": 7, "peak": 9}}}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: seen)
    assert level_bytes(torch.device("cuda", 0)) == 7


@linux_only
def test_available_on_a_cpu_is_what_the_host_has():
    assert abs(available_bytes(torch.device("cpu")) - host_available_bytes()) < 256 * MIB


def test_what_the_allocator_holds_unused_is_available(monkeypatch):
    stats = {"reserved_bytes.all.current": 50, "allocated_bytes.all.current": 20}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    assert available_bytes(torch.device("cuda", 0)) == 130
    stats.clear()
    assert available_bytes(torch.device("cuda", 0)) == 100, "nobody has allocated yet"


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


@linux_only
def test_available_fits_into_total():
    assert 0 < host_available_bytes() <= host_total_bytes()
    assert host_total_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


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
            "fs/job/memory.stat": f"anon 1\ninactive_file {20 * MIB}\n",
            "fs/job/step/cgroup.controllers": "memory",
            "fs/job/step/memory.max": "max\n",
            "fs/job/step/memory.current": f"{70 * MIB}\n",
        },
    )
    assert cgroup_limit_bytes(tmp_path) == 100 * MIB
    assert cgroup_available_bytes(tmp_path) == 50 * MIB


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


def test_a_system_without_cgroups(tmp_path):
    assert cgroup_limit_bytes(tmp_path) is None


# malloc: each in a process of its own, because glibc's threshold depends on what was freed before.

PATTERN = """
import torch
from lightning_ssd.memory import MallocThreshold, read_memory
MIB = 1 << 20

def held_after_free(nbytes=2 * MIB, total=128 * MIB):
    '''MiB that stay resident after all but the last of many buffers were freed, as activations are in backward.'''
    before = read_memory().host_bytes
    buffers = [torch.ones(nbytes, dtype=torch.uint8) for _ in range(total // nbytes)]
    assert read_memory().host_bytes - before > 0.9 * total
    last = buffers[-1]
    buffers.clear()
    return (read_memory().host_bytes - before) // MIB, last

del [torch.ones(16 * MIB, dtype=torch.uint8) for _ in range(2)][:]    # glibc's threshold follows to 16 MiB
"""


def run_pattern(body: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PATTERN + body],
        env={key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
        | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        | env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@glibc_only
def test_freed_buffers_leave_the_process_only_with_the_fixed_threshold():
    assert int(run_pattern("print(held_after_free()[0])")) > 100, "one live buffer on top keeps all of them resident"
    fixed = run_pattern(
        """
threshold = MallocThreshold()
assert threshold.fix() and threshold.reason is None
print(held_after_free()[0], held_after_free(8 * MIB)[0])
"""
    )
    two, eight = map(int, fixed.split())
    assert two <= 4
    assert eight <= 10


@glibc_only
def test_holes_that_the_heap_has_already_are_not_used():
    output = run_pattern(
        """
_, last = held_after_free()             # leaves 126 MiB of hole below a live buffer
with MallocThreshold():
    inside, last_inside = held_after_free()
after, last_after = held_after_free()
print(inside, after)
"""
    )
    inside, after = map(int, output.split())
    assert inside <= 4
    assert after > 100, "restored: the heap serves such buffers again"


@glibc_only
def test_after_restore_the_threshold_is_32_mib():
    output = run_pattern(
        """
with MallocThreshold():
    inside, last = held_after_free()
large, last_large = held_after_free(33 * MIB, 132 * MIB)
small, last = held_after_free()
print(inside, small, large)
"""
    )
    inside, small, large = map(int, output.split())
    assert inside <= 4
    assert small > 100, "2 MiB lies under the restored threshold"
    assert large <= 34, "33 MiB lies over it: mapped, so freed at once"


@glibc_only
@pytest.mark.parametrize(
    "env",
    [
        {"MALLOC_MMAP_THRESHOLD_": "1048576"},
        {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072:glibc.malloc.mmap_threshold=1048576"},
    ],
)
def test_restore_returns_to_the_users_own_setting(env):
    output = run_pattern("MallocThreshold().__enter__().restore()\nprint(held_after_free()[0])", **env)
    assert int(output) <= 4


@glibc_only
def test_the_lowest_claim_holds_until_the_last_restore():
    output = run_pattern(
        """
low, high = MallocThreshold(64 * 1024), MallocThreshold(8 * MIB)
low.fix(), low.fix(), high.fix()
both, last = held_after_free()
high.restore(), high.restore()
one, last = held_after_free()
low.restore()
print(both, one, held_after_free()[0])
"""
    )
    both, one, none = map(int, output.split())
    assert both <= 4
    assert one <= 4
    assert none > 100


def test_a_foreign_malloc_is_left_alone(monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libjemalloc.so.2")
    threshold = MallocThreshold()
    assert not threshold.fix()
    assert "jemalloc" in threshold.reason or "glibc" in threshold.reason
    threshold.restore()
    assert not trim()


def test_a_threshold_that_glibc_would_refuse():
    with pytest.raises(ConfigError, match=r"MallocThreshold\.nbytes=1; allowed: an integer from 4096"):
        MallocThreshold(1)
