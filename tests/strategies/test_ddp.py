from collections.abc import Callable

import pytest
import torch

from tests.support.processes import run_script

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo"),
]


@pytest.fixture
def run_ddp(tmp_path, forks) -> Callable[..., str]:
    """The script's output."""
    return lambda *arguments: run_script("tests.support.ddp_script", str(tmp_path), *arguments, begin=forks).stdout


def test_two_processes_train_bitwise_like_lightnings_ddp(run_ddp):
    names = ("plain", "accumulate", "collectives", "unused", "manual", "static-manual", "comm-hook", "local-sgd")
    output = run_ddp("popen", *names, "forgotten")
    for name in names:
        for rank in (0, 1):
            assert f"rank {rank}: {name} ok" in output
    assert output.count("forgotten ok") == 2


@pytest.mark.parametrize("start_method", [pytest.param("spawn", marks=pytest.mark.exhaustive), "fork"])
def test_started_processes_hand_the_weights_back(run_ddp, start_method):
    assert "rank 0: plain ok" in run_ddp(start_method, "plain")


def test_two_processes_agree_on_budget_and_rates(run_ddp):
    output = run_ddp("popen", "agreed")
    for rank in (0, 1):
        assert f"rank {rank}: agreed ok" in output


def test_a_budget_that_one_process_cannot_keep_is_refused_in_both(run_ddp):
    output = run_ddp("popen", "impossible")
    for rank in (0, 1):
        assert f"rank {rank}: impossible ok" in output


def test_optimizer_states_of_two_processes(run_ddp):
    output = run_ddp("popen", "states")
    for rank in (0, 1):
        assert f"rank {rank}: states ok" in output
