"""A step that saves and moves, of no network in particular."""

import torch

from lightning_ssd import OffloadPolicy

OFFLOAD_ALL = OffloadPolicy(activations="offload", min_tensor_bytes=0)


def step(offloader, *, size=300):
    x = torch.randn(size, size, requires_grad=True)
    with offloader.saved_tensors():
        loss = x.exp().sin().cos().tanh().sum()
    offloader.flush()
    loss.backward()
    offloader.end_backward()
