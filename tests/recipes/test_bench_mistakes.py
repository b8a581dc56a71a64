"""Each benchmark refuses a mistake before it makes or writes anything."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
import torch

from recipes.benchmarks import deepspeed, io_beside_compute, memory_limit, optimizer, parameters, rivals, step


@pytest.mark.parametrize(
    ("benchmark", "arguments", "message"),
    [
        (deepspeed, ["--modes", "torch,deepsped"], "deepsped; allowed: torch, ours, ours_cached, deepspeed"),
        (deepspeed, ["--steps", "0", "--modes", "torch"], "at least one step"),
        (deepspeed, ["--modes", "deepspeed"], "pip install deepspeed"),
        (io_beside_compute, ["--dir", ".", "--rate", "0"], "have to be above 0"),
        (memory_limit, ["--limit", "much"], "--limit"),
        (memory_limit, ["--steps", "0"], "--steps"),
        (optimizer, ["--modes", "torch,sdd"], "sdd; allowed: torch, ssd, cache=50%"),
        (optimizer, ["--modes", "cache=101%"], "cache=101%; allowed"),
        (optimizer, ["--path-rate", "fast"], "throttle"),
        (optimizer, ["--warmup", "0"], "--steps and --warmup begin at 1"),
        (optimizer, ["--profile", "gpu"], "needs a CUDA device"),
        (parameters, ["--turns", "0"], "--turns and --warmup begin at 1"),
        (rivals, ["--modes", "plain,deepspeed_lean"], "not installed: deepspeed; pip install deepspeed"),
        (rivals, [], "leave it out: --modes plain,swap,fsdp2,ours"),
        (rivals, ["--modes", "plain,our"], "--modes has our; allowed: plain"),
        (rivals, ["--modes", "plain", "--limit", "much"], "is not a size"),
        (step, ["--modes", "keep,ssdd"], "--modes has ssdd; allowed: keep, ssd"),
        (step, ["--profile", "gpu", "--shape", "tall"], "--shape tall belongs to --profile cpu"),
        (step, ["--profile", "gpu"], "--profile gpu needs a CUDA device"),
    ],
)
def test_a_mistake_is_refused(
    benchmark: ModuleType,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as caught:
        benchmark.main(arguments)
    assert message in " ".join(f"{caught.value.code} {capsys.readouterr().err}".split())
