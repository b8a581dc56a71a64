"""Freed memory leaves the process where memory is short of gradients that wait in the page cache, and else stays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.memory import host_room
from lightning_ssd.memory.malloc import MallocThreshold, has_whole_pages
from lightning_ssd.parameters import paged_parameters

GRADIENT_BYTES = 1 << 20


@pytest.mark.parametrize(
    ("available", "gradients", "budget", "expected"),
    [
        (3 * GRADIENT_BYTES, "offload", None, [0, 0]),
        (GRADIENT_BYTES, "offload", None, [1, 2]),
        (None, "offload", None, [1, 2]),
        (1 << 40, "offload", "1TiB", [1, 2]),
        (None, "keep", None, [0, 0]),
    ],
    ids=["ample", "short", "unknown", "limited", "no gradient waits"],
)
def test_freed_memory_leaves_where_memory_is_short(
    available: int | None,
    gradients: str,
    budget: str | None,
    expected: list[int],
    spill_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trims: list[int] = []
    monkeypatch.setattr(paged_parameters, "trim", lambda: trims.append(0))
    monkeypatch.setattr(host_room, "host_available_bytes", lambda _: available)
    monkeypatch.setattr(host_room, "_LOOK_S", 0.0)
    policy = OffloadPolicy(
        activations="keep" if budget is None else "auto",
        parameters="keep" if gradients == "offload" else "offload",
        optimizer_states="offload",
        gradients=gradients,  # type: ignore[arg-type]
        memory_budget=budget,
        min_tensor_bytes=0,
    )
    model = torch.nn.Linear(512, 512, bias=False)
    found = []
    with Offloader(policy=policy, hardware=HardwareProfile(paths=spill_dir), device="cpu") as offloader:
        offloader.register_module(model)
        offloader.expect_no_optimizer()
        stays = gradients == "offload" and budget is None and has_whole_pages()
        assert bool(MallocThreshold._claims) == stays
        for _ in range(2):
            with offloader.saved_tensors():
                loss = model(torch.ones(2, 512)).sum()
            loss.backward()
            offloader.end_backward()
            found.append(len(trims))
    assert found == expected
    assert not MallocThreshold._claims
