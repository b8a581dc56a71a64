"""Several processes: the bits of Lightning's own strategies, whatever is offloaded. The scripts have the scenarios."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.processes import assert_scenarios

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo"),
]
DEFAULT = {
    "ddp_script": (
        *("plain", "accumulate", "collectives", "unused", "manual", "comm-hook"),
        *("agreed", "states", "weights", "impossible"),
    ),
    "second_package ddp_script": ("plain", "states"),
    "fabric_script": ("gpt", "conv", "uneven", "collectives", "checkpoint", "refused"),
    "callback_script": ("ddp", "ddp-auto", "fsdp2"),
    "fsdp_script": ("training", "optimizers", "activations", "after_fit"),
    "fsdp_away_script": ("frozen", "trained"),
}
EXHAUSTIVE = [
    ("ddp_script", ("static-manual", "worn", "forgotten")),
    ("callback_script", ("ddp-accumulate", "ddp-manual", "tensor-parallel")),
    ("second_package ddp_script", ("accumulate", "manual")),
    ("second_package fabric_script", ("checkpoint",)),
    ("second_package callback_script", ("ddp", "fsdp2")),
    ("fsdp_script", ("tensor_parallel", "planned", "uneven", "checkpoints")),
    ("fsdp_script", ("all_blocks", "own_blocks", "refused")),
    ("fsdp_away_script", ("variants", "shapes")),
    ("fsdp_away_script", ("counted", "edits", "evaluated", "checkpoints")),
]


@pytest.mark.parametrize(
    ("script", "names"),
    [*DEFAULT.items(), *(pytest.param(*run, marks=pytest.mark.exhaustive) for run in EXHAUSTIVE)],
    ids=str,
)
def test_two_processes(script: str, names: tuple[str, ...], tmp_path: Path, forks: list[str]) -> None:
    assert_scenarios(tmp_path, forks, script, *names)
    if "fabric" in script:  # which ends without closing anything
        assert list(tmp_path.glob("spill/*")) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(("scenario", "num"), [("hybrid", 4), ("three", 3)])
def test_more_processes(scenario, num, tmp_path, forks):
    assert_scenarios(tmp_path, forks, "fsdp_away_script", scenario, num=num)


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("ddp_script", "fork plain"),
        ("fabric_script", "fork"),
        pytest.param("ddp_script", "spawn plain", marks=pytest.mark.exhaustive),
        pytest.param("second_package ddp_script", "fork plain", marks=pytest.mark.exhaustive),
    ],
)
def test_started_processes_hand_back_what_they_made(script: str, name: str, tmp_path: Path, forks: list[str]) -> None:
    assert_scenarios(tmp_path, forks, script, name, num=1)
    assert list(tmp_path.glob("spill/*")) == []
