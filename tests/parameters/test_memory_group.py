"""Weights wait as far as memory lacks in a control group, whose kernel kills plain training."""

import json
import subprocess
import sys

import pytest

from recipes.benchmarks.harness.cgroups import GroupUnavailableError
from recipes.benchmarks.memory_limit import memory_group

pytestmark = pytest.mark.slow
_PEAKS = ("memory.max_usage_in_bytes", "memory.peak")


def trained_in_a_group(mode, directory, limit, *more):
    with memory_group(limit) as group:
        enter = ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group.procs)]
        worker = [sys.executable, "-m", "tests.support.auto_worker", mode, str(directory), *more]
        child = subprocess.run([*enter, *worker], capture_output=True, text=True, check=False)
        peak = next(int((group.directory / name).read_text()) for name in _PEAKS if (group.directory / name).exists())
    if child.returncode not in (0, -9):
        raise AssertionError(child.stderr)
    return child.returncode, json.loads(child.stdout) if child.stdout else {}, peak


@pytest.fixture(autouse=True)
def _groups():
    try:
        with memory_group(None):
            pass
    except GroupUnavailableError as error:
        pytest.skip(f"no memory control group here: {error}")


def test_a_gpt_that_does_not_fit_is_trained_with_a_part_of_its_blocks_in_memory(spill_dir):
    _, expected, peak = trained_in_a_group("keep", spill_dir, None)
    limit = peak - expected["blocks_bytes"] // 4
    assert trained_in_a_group("keep", spill_dir, limit)[0] == -9
    code, ours, our_peak = trained_in_a_group("auto", spill_dir, limit)
    assert code == 0
    assert ours["digest"] == expected["digest"]
    assert our_peak <= limit
    two_blocks = expected["blocks_bytes"] // 8
    assert ours["waiting_bytes"] > two_blocks
    assert ours["kept_bytes"] > two_blocks


@pytest.mark.exhaustive
def test_a_gpt_that_fits_makes_room_when_something_else_takes_memory(spill_dir):
    """For which plain training is killed."""
    ballast = 256
    _, expected, peak = trained_in_a_group("keep", spill_dir, None, str(ballast))
    limit = peak - (ballast << 20) // 4
    assert trained_in_a_group("keep", spill_dir, limit, str(ballast))[0] == -9
    code, ours, our_peak = trained_in_a_group("auto", spill_dir, limit, str(ballast))
    assert code == 0
    assert ours["digest"] == expected["digest"]
    assert our_peak <= limit
    assert ours["waited_bytes"] < ours["waiting_bytes"]
