"""Weights wait as far as memory lacks in a control group, whose kernel kills plain training."""

import json
import subprocess
import sys

import pytest

from recipes.benchmarks.harness.cgroups import GroupUnavailableError
from recipes.benchmarks.memory_limit import memory_group

pytestmark = pytest.mark.slow
_PEAKS = ("memory.max_usage_in_bytes", "memory.peak")
BLOCKS_MIB = 16 * 27
"""Of frozen blocks of a small GPT."""
FITTING = {"activations": "auto", "rows": 16, "steps": 3}


def trained_in_a_group(mode, directory, limit, **more):
    settings = {"kind": "gpt", "parameters": mode} | more
    with memory_group(limit) as group:
        enter = ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group.procs)]
        worker = [sys.executable, "-m", "tests.support.budget_worker", json.dumps(settings), str(directory)]
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
    _, expected, peak = trained_in_a_group("keep", spill_dir, None, **FITTING)
    limit = peak - (BLOCKS_MIB << 20) // 4
    assert trained_in_a_group("keep", spill_dir, limit, **FITTING)[0] == -9
    code, ours, our_peak = trained_in_a_group("auto", spill_dir, limit, **FITTING, activation_budget="64MiB")
    assert code == 0
    assert ours["digest"] == expected["digest"]
    assert our_peak <= limit
    two_blocks = BLOCKS_MIB // 8
    assert ours["waiting_mib"][-1] > two_blocks
    assert ours["kept_mib"] > two_blocks


@pytest.mark.exhaustive
def test_a_gpt_that_fits_is_trained_beside_something_else_that_takes_memory(spill_dir):
    """For which plain training is killed. What waits is decided at the first forward."""
    makes_room = {"activations": "keep", "rows": 96, "ballast_mib": 256}
    _, expected, peak = trained_in_a_group("keep", spill_dir, None, **makes_room)
    limit = peak - (makes_room["ballast_mib"] << 20) // 4
    assert trained_in_a_group("keep", spill_dir, limit, **makes_room)[0] == -9
    code, ours, our_peak = trained_in_a_group("auto", spill_dir, limit, **makes_room)
    assert code == 0
    assert ours["digest"] == expected["digest"]
    assert our_peak <= limit
    assert ours["waiting_mib"][0] > 0
