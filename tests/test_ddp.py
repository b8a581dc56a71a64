import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 110

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo"),
]


def run_script(directory: Path, *arguments: str) -> str:
    """Run ``ddp_script`` as a user's script is run; a process that waits for another for ever fails the test."""
    outside = ("MASTER_", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "PL_")
    done = subprocess.run(
        [sys.executable, "-m", "tests.ddp_script", str(directory), *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith(outside)}
        | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


def test_two_processes_train_bitwise_like_lightnings_ddp(tmp_path):
    names = ("plain", "accumulate", "collectives", "unused", "manual", "static-manual", "comm-hook", "local-sgd")
    output = run_script(tmp_path, "popen", *names, "forgotten")
    for name in names:
        for rank in (0, 1):
            assert f"rank {rank}: {name} ok" in output
    assert output.count("forgotten ok") == 2


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_started_processes_hand_the_weights_back(tmp_path, start_method):
    assert "rank 0: plain ok" in run_script(tmp_path, start_method, "plain")


def test_two_processes_agree_on_budget_and_rates(tmp_path):
    output = run_script(tmp_path, "popen", "agreed")
    for rank in (0, 1):
        assert f"rank {rank}: agreed ok" in output


def test_a_budget_that_one_process_cannot_keep_is_refused_in_both(tmp_path):
    output = run_script(tmp_path, "popen", "impossible")
    for rank in (0, 1):
        assert f"rank {rank}: impossible ok" in output


def test_optimizer_states_of_two_processes(tmp_path):
    output = run_script(tmp_path, "popen", "states")
    for rank in (0, 1):
        assert f"rank {rank}: states ok" in output
