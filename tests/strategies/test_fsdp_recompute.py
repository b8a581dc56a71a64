"""Sharded models of which processes recompute blocks: the same ones, or each its own."""

from pathlib import Path

import pytest
import torch

from tests.support.processes import run_script

SCENARIOS = ("all_blocks", "own_blocks", "refused")

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_processes(tmp_path: Path, forks: list[str]) -> None:
    output = run_script("tests.support.fsdp_recompute_script", str(tmp_path), *SCENARIOS, begin=forks).stdout
    for scenario in SCENARIOS:
        for rank in (0, 1):
            assert f"rank {rank}: {scenario} ok" in output
