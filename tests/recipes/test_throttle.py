"""A drive that is slowed down on purpose has the rate that was asked for, and is itself again afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.common.tensors import Region
from lightning_ssd.errors import ConfigError
from lightning_ssd.storage.drive_probe import measure_rates
from lightning_ssd.storage.posix import PosixBackend
from lightning_ssd.storage.spill_file import Arena
from recipes.benchmarks.harness import throttle as throttling
from recipes.benchmarks.harness.cgroups import GroupUnavailableError, Hierarchy, control_group, locate
from recipes.benchmarks.harness.throttle import (
    BucketBackend,
    Throttle,
    TokenBucket,
    block_device,
    parse_rate,
    throttled,
)

RATE = 40e6
V1_MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
38 31 0:35 / /sys/fs/cgroup/blkio rw,relatime - cgroup cgroup rw,blkio
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
V2_MOUNTS = "41 31 0:38 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n"
NESTED_MOUNTS = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
GROUPS = "7:blkio,other:/\n4:memory:/docker/abc/job\n1:name=systemd:/init\n0::/user.slice/me\n"


@contextmanager
def real_throttle(directory: Path) -> Iterator[Throttle]:
    try:
        with throttled(directory, RATE, kind="group") as throttle:
            yield throttle
    except GroupUnavailableError as error:
        pytest.skip(f"the drive below the temporary directory cannot be throttled by a control group: {error}")


def rates(directory: Path, throttle: Throttle | None = None) -> tuple[float, float]:
    """Both directions, as the library moves bytes: two workers, direct I/O."""
    posix = PosixBackend([directory])
    wrap = throttle.wrap_backend if throttle is not None else None
    try:
        found = measure_rates(posix if wrap is None else wrap(posix), directory, nbytes=40 << 20, chunk_bytes=4 << 20)
    finally:
        posix.close()
    return found.write_per_s, found.read_per_s


def assert_held(directory: Path, throttle: Throttle) -> None:
    """No attempt is faster than asked. A busy machine makes each of them slower: the fastest of up to five counts."""
    fastest = [0.0, 0.0]
    for _ in range(5):
        found = rates(directory, throttle)
        assert max(found) <= 1.25 * RATE
        fastest = [max(pair) for pair in zip(fastest, found, strict=True)]
        if min(fastest) >= 0.75 * RATE:
            return
    pytest.fail(f"{fastest} bytes per second at best, of {RATE}")


def all_groups() -> set[str]:
    """Of this process: those of others, who test at the same time or have died, come and go."""
    return {str(path) for path in Path("/sys/fs/cgroup").rglob(f"lightning_ssd-{os.getpid()}-*")}


def test_the_kernel_holds_the_rate_and_lets_go(spill_dir: Path) -> None:
    before = Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text(), all_groups()
    with real_throttle(spill_dir) as throttle:
        assert throttle.is_real
        assert throttle.wrap_backend is None
        assert "control group" in throttle.how
        assert all_groups() - before[2] or before[0] != Path("/proc/self/mountinfo").read_text()
        assert_held(spill_dir, throttle)
    free = rates(spill_dir)
    assert min(free) > 2 * RATE, "the drive stayed slow"
    after = Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text(), all_groups()
    assert after == before


def test_children_are_slow_too_and_come_home(spill_dir: Path) -> None:
    """One that ran before, one that starts within and outlives the block."""
    wait = [sys.executable, "-c", "input()"]
    early = subprocess.Popen(wait, stdin=subprocess.PIPE)
    children = [early]
    groups = [Path(f"/proc/{early.pid}/cgroup").read_text()]
    try:
        with real_throttle(spill_dir):
            late = subprocess.Popen(wait, stdin=subprocess.PIPE)
            children.append(late)
            own = Path("/proc/self/cgroup").read_text()
            assert "lightning_ssd-" in own
            assert [Path(f"/proc/{child.pid}/cgroup").read_text() for child in children] == [own, own]
        groups.append(Path("/proc/self/cgroup").read_text())
        assert [Path(f"/proc/{child.pid}/cgroup").read_text() for child in children] == [groups[0], groups[0]]
        assert groups[0] == groups[1]
    finally:
        for child in children:
            child.communicate(b"\n")


def test_an_error_inside_leaves_nothing_behind(spill_dir: Path) -> None:
    before = Path("/proc/self/cgroup").read_text(), all_groups()
    with pytest.raises(RuntimeError, match="inside"), real_throttle(spill_dir):
        raise RuntimeError("inside")
    assert (Path("/proc/self/cgroup").read_text(), all_groups()) == before


def test_a_group_that_does_not_hold_the_rate_is_not_believed(spill_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is set on a thousand times the rate, as good as none."""
    with real_throttle(spill_dir):
        pass
    asked = throttling.control_group

    def lax(controller: str, **limits: dict[str, str]) -> object:
        return asked(controller, **{key: {n: f"{t}000" for n, t in files.items()} for key, files in limits.items()})

    monkeypatch.setattr(throttling, "control_group", lax)
    with throttled(spill_dir, RATE) as throttle:
        assert not throttle.is_real
        assert "through instead of 40" in throttle.how
        assert throttle.wrap_backend is not None
        assert "lightning_ssd-" not in Path("/proc/self/cgroup").read_text()


def test_the_wrapper_holds_the_rate_over_both_workers(spill_dir: Path) -> None:
    with throttled(spill_dir, RATE, kind="bucket") as throttle:
        assert not throttle.is_real
        assert "token bucket around the backend at 40 MB/s, since it was asked for" in throttle.how
        assert_held(spill_dir, throttle)


def test_the_wrapper_serves_where_there_is_no_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with throttled(tmp_path, RATE) as throttle:
        assert not throttle.is_real
    with pytest.raises(GroupUnavailableError, match="need root"), throttled(tmp_path, RATE, kind="group"):
        pass


def test_the_wrapper_changes_no_byte(spill_dir: Path) -> None:
    posix = PosixBackend([spill_dir])
    backend = BucketBackend(posix, 1e9)
    nbytes = 3 * backend.block_bytes
    written = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    read = torch.zeros_like(written)
    arena: Arena = backend.open_arena(spill_dir)
    try:
        extent = arena.allocate(nbytes)
        backend.write(arena, Region(written.data_ptr(), nbytes), extent.offset)
        backend.read(arena, Region(read.data_ptr(), nbytes), extent.offset)
    finally:
        arena.close()
        backend.close()
    assert torch.equal(read, written)
    assert backend.name.endswith("(throttled)")


def test_a_bucket_does_not_save_up_what_nobody_used() -> None:
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    bucket = TokenBucket(10.0, clock=lambda: now[0], sleep=sleep)
    bucket.take(20)
    now[0] += 100.0
    bucket.take(5)
    bucket.take(5)
    assert slept == pytest.approx([2.0, 0.5, 0.5])


def test_the_drive_is_that_of_the_directory(spill_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        device = block_device(spill_dir)
    except GroupUnavailableError as error:
        pytest.skip(f"no block device below the temporary directory: {error}")
    node = Path("/sys/dev/block") / device
    assert not (node / "partition").exists()
    assert (node / "queue").is_dir()


@pytest.mark.parametrize(
    ("kind", "source", "options", "found"),
    [
        ("overlay", "overlay", "rw,lowerdir=/l,upperdir={upper},workdir=/w", True),
        ("overlay", "overlay", "rw,lowerdir=/l,upperdir=/not/visible,workdir=/w", False),
        ("tmpfs", "tmpfs", "rw", False),
        ("btrfs", "/dev/null", "rw", False),
    ],
)
def test_what_has_no_device_number_of_its_own(
    kind: str, source: str, options: str, found: bool, spill_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory on an anonymous device is looked up through its mount."""
    try:
        expected = block_device(spill_dir)
    except GroupUnavailableError as error:
        pytest.skip(f"no block device below the temporary directory: {error}")
    shown = Path("/proc")
    monkeypatch.setattr(throttling, "_mount", lambda directory: (kind, source, options.format(upper=spill_dir)))
    if found:
        assert block_device(shown) == expected
    else:
        with pytest.raises(GroupUnavailableError, match=f"no block device can be seen below {kind}"):
            block_device(shown)


def test_a_partition_belongs_to_its_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drive = tmp_path / "devices" / "nvme0n1"
    (drive / "nvme0n1p2").mkdir(parents=True)
    (drive / "dev").write_text("259:0\n")
    (drive / "nvme0n1p2" / "partition").write_text("2\n")
    nodes = tmp_path / "block"
    nodes.mkdir()
    number = os.stat(tmp_path).st_dev
    (nodes / f"{os.major(number)}:{os.minor(number)}").symlink_to(drive / "nvme0n1p2")
    monkeypatch.setattr(throttling, "_BLOCK_DEVICES", nodes)
    assert block_device(tmp_path) == "259:0"


@pytest.mark.parametrize(
    ("controller", "mounts", "expected"),
    [
        ("blkio", V1_MOUNTS, Hierarchy(1, Path("/sys/fs/cgroup/blkio"), Path("/sys/fs/cgroup/blkio"))),
        ("memory", NESTED_MOUNTS, Hierarchy(1, Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup/memory/job"))),
        ("blkio", V2_MOUNTS, Hierarchy(2, Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/user.slice/me"))),
        ("blkio", NESTED_MOUNTS, None),
    ],
    ids=["v1", "subtree of v1", "v2", "none"],
)
def test_hierarchies_are_found(controller: str, mounts: str, expected: Hierarchy | None) -> None:
    assert locate(controller, mountinfo=mounts, cgroup=GROUPS) == expected


def test_a_limit_that_the_kernel_refuses_is_named() -> None:
    if os.geteuid() != 0:
        pytest.skip("control groups need root")
    before = all_groups()
    with (
        pytest.raises(GroupUnavailableError, match=r"memory|group"),
        control_group("memory", v1={"memory.limit_in_bytes": "much"}, v2={"memory.max": "much"}),
    ):
        pass
    assert all_groups() == before


def test_the_group_of_a_killed_run_is_removed_by_the_next_one(spill_dir: Path) -> None:
    with real_throttle(spill_dir):
        found = locate(
            "blkio", mountinfo=Path("/proc/self/mountinfo").read_text(), cgroup=Path("/proc/self/cgroup").read_text()
        )
    assert found is not None
    parent = found.own.parent
    if not parent.is_dir():
        pytest.skip("the controller is mounted for the moment only, so that nothing can stay")
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    left = [parent / f"lightning_ssd-{pid}-0123abcd" for pid in (int(dead.stdout), os.getpid())]
    try:
        for directory in left:
            directory.mkdir()
        with real_throttle(spill_dir):
            assert [directory.exists() for directory in left] == [False, True]
    finally:
        for directory in left:
            if directory.exists():
                directory.rmdir()


@pytest.mark.parametrize(("text", "rate"), [("50MB/s", 50e6), ("1.5GiB/s", 1.5 * (1 << 30)), (" 200 MB ", 200e6)])
def test_rates_are_read(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(("text", "error"), [("0", ValueError), ("fast", ConfigError), ("50MB/h", ConfigError)])
def test_what_is_no_rate_is_refused(text: str, error: type[Exception]) -> None:
    with pytest.raises(error, match="throttle"):
        parse_rate(text)


def test_a_slow_drive_slows_training_in_its_own_process(spill_dir: Path) -> None:
    """End to end: the offloader's own writes go through the throttle."""
    nbytes = 16 << 20
    policy = OffloadPolicy(activations="offload")
    with (
        throttled(spill_dir, RATE) as throttle,
        Offloader(
            policy=policy, hardware=HardwareProfile(paths=[spill_dir]), _wrap_backend=throttle.wrap_backend
        ) as offloader,
    ):
        x = torch.zeros(nbytes // 4, requires_grad=True)
        begin_s = time.perf_counter()
        with offloader.saved_tensors():
            y = (x * 1).sin()
        offloader.flush()
        took_s = time.perf_counter() - begin_s
        assert offloader.stats.bytes_written >= 0.99 * nbytes
        y.sum().backward()
    assert took_s >= 0.75 * nbytes / RATE
