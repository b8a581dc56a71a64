"""The facts of weights that could wait, for the decision on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_ssd.parameters.pager import Place
from lightning_ssd.parameters.units import SharedWeights

__all__ = ["MovableWeights"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MovableWeights:
    """Weights in one storage that could wait. Holds none of their memory."""

    name: str
    """The first one."""
    place: Place
    """The unit that they are brought in with."""
    is_frozen: bool
    trained_bytes: int
    """Bytes of those that are trained."""
    nbytes: int
    """Bytes of the storage, also while its memory is away."""
    waits: bool
    """Whether they do now."""
    is_held: bool
    """Whether a :class:`~lightning_ssd.memory.gauge.Gauge` counts them as held."""
    comes_ahead: bool
    """Whether they come to memory before their use begins, rather than when it does."""
    shown_bytes: int = 0
    """Bytes of pages of a file that are in memory, and leave when the weights wait."""

    @classmethod
    def of(cls, weights: SharedWeights, place: Place, **facts: Any) -> MovableWeights:
        """Those of one storage, with the facts that :class:`SharedWeights` does not have."""
        return cls(
            name=weights.names[0],
            place=place,
            is_frozen=weights.is_frozen,
            trained_bytes=weights.trained_bytes,
            **facts,
        )
