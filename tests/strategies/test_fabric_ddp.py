"""``Fabric(strategy="ssd_offload", devices=2)``: the same bits as Fabric's DDP."""

from pathlib import Path

import pytest
import torch

from tests.support.processes import run_script

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo"),
]


def run_fabric(forks: list[str], directory: Path, *arguments: str) -> str:
    done = run_script("tests.support.fabric_script", str(directory), *arguments, begin=forks)
    # The script ends without closing anything.
    assert "Error" not in done.stderr, done.stderr
    assert list(directory.glob("spill/*")) == []
    return done.stdout


def test_two_processes_train_bitwise_like_fabrics_ddp(tmp_path, forks):
    output = run_fabric(forks, tmp_path)
    for name in ("gpt", "conv", "uneven", "collectives", "checkpoint", "refused"):
        for rank in (0, 1):
            assert f"rank {rank}: {name} ok" in output


def test_forked_processes_train_alike_and_leave_nothing(tmp_path, forks):
    assert "fork ok" in run_fabric(forks, tmp_path, "fork")


@pytest.mark.exhaustive
def test_two_processes_of_lightning_fabric(tmp_path, forks):
    done = run_script("tests.support.second_package", "tests.support.fabric_script", str(tmp_path))
    for rank in (0, 1):
        assert f"rank {rank}: checkpoint ok" in done.stdout
