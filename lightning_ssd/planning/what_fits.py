"""Which model fits on which device, and what a step then costs: arithmetic on sizes and rates alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Fit", "TrainingSize", "fit"]

_NUM_STATES = 2
"""Of AdamW, per trained parameter, in the type of the weight, as ``torch.optim.AdamW`` makes them."""
_SUBGROUPS = 4
"""Of states in memory at a time; each is about a unit's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSize:
    """What is trained."""

    num_parameters: float
    num_blocks: int
    trained_share: float = 1.0
    """Of the parameters; small for LoRA, whose adapters are counted in."""
    weight_bytes: int = 2
    """Per parameter: 2 in bfloat16, 4 in float32; a gradient takes as much."""
    num_backwards: int = 1
    """Per update."""

    @property
    def num_trained(self) -> float:
        """Parameters with a gradient and states."""
        return self.trained_share * self.num_parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Bytes in each place, without activations, and per step."""

    plain_bytes: float
    """On the device, if all of it stays there."""
    device_bytes: float
    """On the device, if all that can waits elsewhere."""
    waiting_bytes: float
    """In host memory or on drives."""
    read_bytes: float
    """Per step, of which nothing is in host memory."""
    written_bytes: float

    def io_s(self, *, read_bytes_per_s: float, write_bytes_per_s: float) -> float:
        """Of a step that only moves, reads and writes one after the other."""
        return self.read_bytes / read_bytes_per_s + self.written_bytes / write_bytes_per_s


def fit(size: TrainingSize, *, gradients: Literal["keep", "offload"]) -> Fit:
    """Where the bytes of a training lie, and how many move.

    Args:
        size: what is trained.
        gradients: as in the policy: whether they wait, too.
    """
    weights = size.weight_bytes * size.num_parameters
    trained = size.weight_bytes * size.num_trained
    states = _NUM_STATES * trained
    k = size.num_backwards
    gradients_wait = gradients == "offload"
    block, gradient_block, state_block = (nbytes / size.num_blocks for nbytes in (weights, trained, states))
    # Two blocks in forward and backward; in an update up to four trained weights and four subgroups of states.
    computing, updating = 2 * block, _SUBGROUPS * (gradient_block + state_block)
    held_gradients = 2 * gradient_block if gradients_wait else trained
    moved_gradients = k * trained if gradients_wait else 0
    return Fit(
        plain_bytes=weights + trained + states,
        device_bytes=max(computing, updating) + held_gradients,
        waiting_bytes=weights + states + (trained if gradients_wait else 0),
        read_bytes=2 * k * weights + trained + moved_gradients + states,
        written_bytes=moved_gradients + trained + states,
    )
