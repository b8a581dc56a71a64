"""What has left a CUDA card leaves its memory to others: not by our own count, but by PyTorch's allocator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from tests.support.cuda_memory import allocated_bytes

DEVICE = torch.device("cuda", 0)
MIB = 1 << 20
pytestmark = pytest.mark.gpu


@pytest.fixture
def opened(spill_dir: Path) -> Callable[..., Offloader]:
    def make(host_memory: int, **policy: str) -> Offloader:
        hardware = HardwareProfile(paths=[spill_dir], host_memory=host_memory)
        return Offloader(policy=OffloadPolicy(**policy), hardware=hardware, device=DEVICE)  # type: ignore[arg-type]

    return make


@pytest.mark.parametrize("host_memory", [0, 1 << 30], ids=["drive", "host"])
def test_optimizer_states(host_memory: int, opened: Callable[..., Offloader]) -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(32))).to(DEVICE)
    before = allocated_bytes(DEVICE)
    with opened(host_memory, optimizer_states="offload", activations="keep") as offloader:
        optimizer = offloader.offload_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        for _ in range(2):
            model(torch.randn(8, 1024, device=DEVICE)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.flush()
            assert optimizer.stats.state_bytes == 256 * MIB
            assert allocated_bytes(DEVICE) - before <= 4 * optimizer.stats.subgroup_bytes + MIB


def test_activations(opened: Callable[..., Offloader]) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(8))).to(DEVICE)
    x = torch.randn(4096, 1024, device=DEVICE)
    with opened(0, activations="offload") as offloader:
        offloader.register_module(model)
        for _ in range(2):
            before = allocated_bytes(DEVICE)
            with offloader.saved_tensors():
                loss = model(x).square().mean()
            kept = allocated_bytes(DEVICE) - before
            offloader.flush()
            saved = offloader.stats.saved_peak_bytes
            assert saved >= 16 * 16 * MIB
            left = allocated_bytes(DEVICE) - before
            assert left <= 3 * 16 * MIB, (left, kept, saved)
            loss.backward()
            offloader.end_backward()
            del loss
            model.zero_grad()
