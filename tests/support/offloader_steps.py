"""A step that saves and moves, of no network in particular."""

from __future__ import annotations

import torch

from lightning_ssd import Offloader, OffloadPolicy

OFFLOAD_ALL = OffloadPolicy(activations="offload", min_tensor_bytes=0)


def step(offloader: Offloader, *, size: int = 300) -> None:
    x = torch.randn(size, size, requires_grad=True)
    with offloader.saved_tensors():
        loss = x.exp().sin().cos().tanh().sum()
    offloader.flush()
    loss.backward()
    offloader.end_backward()
