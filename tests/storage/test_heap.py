"""Memory for reloads comes from malloc only where that is another one than the C library's, and forks do no harm."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_ssd.storage import heap
from lightning_ssd.storage.heap import HeapBlock, reload_block_kind
from lightning_ssd.storage.mapped import MappedBlock
from tests.helpers import Setup, open_offloader


@pytest.mark.parametrize(
    ("platform", "release", "is_safe"),
    [
        ("linux", "6.2.16-generic", False),
        ("linux", "6.3", True),
        ("linux", "6.18.44-fc", True),
        ("linux", "10.0.1", True),
        ("linux", "5.15.167.4-microsoft-standard-WSL2", False),
        ("linux", "unknown", False),
        ("darwin", "24.1.0", False),
    ],
)
def test_forks_are_safe_from_linux_6_3_on(platform: str, release: str, is_safe: bool) -> None:
    assert heap._forks_safely(platform, release) == is_safe


@pytest.mark.parametrize(
    ("preload", "is_safe", "kind"),
    [
        ("", True, MappedBlock),
        ("/usr/lib/libfaketime.so.1", True, MappedBlock),
        ("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4", True, HeapBlock),
        ("libother.so:/opt/libjemalloc.so.2", True, HeapBlock),
        ("/opt/libjemalloc.so.2", False, MappedBlock),
    ],
)
def test_where_memory_for_reloads_comes_from(
    preload: str, is_safe: bool, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD", preload)
    monkeypatch.setattr(heap, "_forks_safely", lambda platform, release: is_safe)
    assert reload_block_kind() is kind


def test_no_memory_left() -> None:
    with pytest.raises(MemoryError, match="malloc has no 4,611,686,018,427,387,904 bytes for a reload"):
        HeapBlock(1 << 62)


def test_modes_and_defaults_of_torch_do_not_reach_it() -> None:
    with torch.device("meta"), torch.inference_mode():
        block = HeapBlock(1 << 20)
    assert block.address % 4096 == 0
    block.export()[0] = b"1"


def test_gradients_are_those_without_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_ssd.assembly.reload_block_kind", lambda: HeapBlock)
    start = torch.randn(300, 400, generator=torch.Generator().manual_seed(1))
    made = []
    with open_offloader(tmp_path, Setup(activations="offload")) as offloader:
        weights = start.clone().requires_grad_()
        for _ in range(3):
            with offloader.saved_tensors():
                loss = (weights.exp() * weights.sin()).tanh().sum()
            loss.backward()
            offloader.end_backward()
        made.append(weights.grad)
        assert offloader.stats.bytes_read > 0
    weights = start.clone().requires_grad_()
    for _ in range(3):
        (weights.exp() * weights.sin()).tanh().sum().backward()
    assert torch.equal(made[0], weights.grad)
