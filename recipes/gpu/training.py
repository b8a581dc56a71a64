"""What the recipes for a card compare of two trainings."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Training"]


@dataclass
class Training:
    """What came of one training."""

    losses: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    """Of the device."""

    def is_same(self, other: Training) -> bool:
        """Losses and weights, bit for bit."""
        pairs = zip([*self.losses, *self.weights], [*other.losses, *other.weights], strict=True)
        return all(torch.equal(one, another) for one, another in pairs)
