"""What is run from a checkout: training, comparisons and benchmarks. Not part of the installed package."""

import os

# Before any module here imports transformers: architectures are built from configurations, no hub is ever asked.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Before PyTorch makes its first tensor: large tensors on a CPU begin with a page, so that glibc reuses their memory.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
