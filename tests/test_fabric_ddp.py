"""``Fabric(strategy="ssd_offload", devices=2)``: the same bits as Fabric's DDP."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo"),
]


def run_script(directory: Path, *arguments: str) -> str:
    """Run ``fabric_script`` as a user's script is run; a process that waits for another for ever fails the test."""
    outside = ("MASTER_", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "LT_")
    done = subprocess.run(
        [sys.executable, "-m", "tests.fabric_script", str(directory), *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith(outside)}
        | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    # The script ends without closing anything.
    assert "Error" not in done.stderr, done.stderr
    assert list(directory.glob("spill/*")) == []
    return done.stdout


def test_two_processes_train_bitwise_like_fabrics_ddp(tmp_path):
    output = run_script(tmp_path)
    for name in ("gpt", "conv", "uneven", "collectives", "checkpoint", "refused"):
        for rank in (0, 1):
            assert f"rank {rank}: {name} ok" in output


def test_forked_processes_train_alike_and_leave_nothing(tmp_path):
    assert "fork ok" in run_script(tmp_path, "fork")
