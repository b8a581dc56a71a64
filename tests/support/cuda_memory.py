"""Memory of a CUDA card, as PyTorch's allocator counts it."""

import torch

__all__ = ["allocated_bytes"]


def allocated_bytes(device):
    """What it has given out, without what cuBLAS has for itself since its first call."""
    torch.cuda.synchronize(device)
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated(device)
