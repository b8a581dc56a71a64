"""``Trainer(strategy="ssd_offload", devices=2)``: the bits of Lightning's DDP, in two processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.processes import run_script

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo"),
]
LIKE_DDP = ("plain", "accumulate", "collectives", "unused", "manual", "static-manual", "comm-hook")
OTHERS = ("agreed", "states", "weights", "impossible", "forgotten")


def run_ddp(directory: Path, forks: list[str], *arguments: str) -> str:
    """The script's output."""
    return run_script("tests.support.ddp_script", str(directory), *arguments, begin=forks).stdout


def test_two_processes(tmp_path: Path, forks: list[str]) -> None:
    names = (*LIKE_DDP, *OTHERS)
    output = run_ddp(tmp_path, forks, "popen", *names)
    missing = [(name, rank) for name in names for rank in (0, 1) if f"rank {rank}: {name} ok" not in output]
    assert missing == []


@pytest.mark.parametrize("start_method", [pytest.param("spawn", marks=pytest.mark.exhaustive), "fork"])
def test_started_processes_hand_the_weights_back(start_method: str, tmp_path: Path, forks: list[str]) -> None:
    assert "rank 0: plain ok" in run_ddp(tmp_path, forks, start_method, "plain")
