"""How many samples and tokens a batch has, where that can be told from its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

__all__ = ["BatchSize", "batch_size_of"]

_TOKENS = "input_ids"


class BatchSize(NamedTuple):
    """Size of one batch; ``None``: unknown."""

    num_samples: int | None
    num_tokens: int | None


def batch_size_of(batch: Any) -> BatchSize:
    """Count, without a guess.

    Samples are the first dimension, if all tensors of the batch agree on it. Tokens are the elements of ``input_ids``,
    or of a batch that is itself one tensor of integers with two dimensions.
    """
    sizes = {leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim}
    ids = batch.get(_TOKENS) if isinstance(batch, Mapping) else batch
    num_tokens = None
    if isinstance(ids, torch.Tensor) and ids.ndim == 2 and ids.dtype in (torch.int64, torch.int32):
        num_tokens = ids.numel()
    return BatchSize(sizes.pop() if len(sizes) == 1 else None, num_tokens)
