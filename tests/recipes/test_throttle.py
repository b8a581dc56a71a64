"""A drive that is slowed down on purpose has the rate that was asked for; and groups that limit memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_ssd.storage.posix import PosixBackend
from lightning_ssd.tiers.bandwidth_meter import measure_rates
from recipes.benchmarks.harness.cgroups import GroupUnavailableError
from recipes.benchmarks.harness.throttle import BucketBackend
from recipes.benchmarks.memory_limit import memory_group

RATE = 40e6


def slow(inner):
    return BucketBackend(inner, RATE)


def test_the_rate_is_held_over_both_workers(spill_dir):
    """No attempt is faster than asked. A busy machine makes each of them slower: the fastest of up to five counts."""
    posix = PosixBackend([spill_dir])
    fastest = [0.0, 0.0]
    try:
        for _ in range(5):
            rates = measure_rates(slow(posix), [spill_dir], nbytes=40 << 20)
            assert max(rates.write_per_s, rates.read_per_s) <= 1.25 * RATE
            fastest = [max(fastest[0], rates.write_per_s), max(fastest[1], rates.read_per_s)]
            if min(fastest) >= 0.75 * RATE:
                break
    finally:
        posix.close()
    assert min(fastest) >= 0.75 * RATE


def all_groups():
    """Of this process: those of others, who test at the same time or have died, come and go."""
    return {str(path) for path in Path("/sys/fs/cgroup").rglob(f"lightning_ssd-{os.getpid()}-*")}


def test_an_error_inside_leaves_no_group_behind():
    def begun():
        with memory_group(1 << 30) as group:
            assert group.directory.is_dir()
            raise RuntimeError("inside")

    before = Path("/proc/self/mountinfo").read_text(), all_groups()
    try:
        with pytest.raises(RuntimeError, match="inside"):
            begun()
    except GroupUnavailableError as error:
        pytest.skip(f"no memory control group here: {error}")
    assert (Path("/proc/self/mountinfo").read_text(), all_groups()) == before


def test_the_group_of_a_killed_run_is_removed_by_the_next_one():
    try:
        with memory_group(None) as group:
            parent = group.directory.parent
    except GroupUnavailableError as error:
        pytest.skip(f"no memory control group here: {error}")
    if not parent.is_dir():
        pytest.skip("the controller is mounted for the moment only, so that nothing can stay")
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    left = [parent / f"lightning_ssd-{pid}-0123abcd" for pid in (int(dead.stdout), os.getpid())]
    try:
        for directory in left:
            directory.mkdir()
        with memory_group(None):
            assert [directory.exists() for directory in left] == [False, True]
    finally:
        for directory in left:
            if directory.exists():
                directory.rmdir()
