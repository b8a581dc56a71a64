"""What all parts of an offloaded optimizer speak of."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from lightning_ssd.errors import ConfigError

__all__ = ["WITHIN_STEP", "CoupledError", "State"]

State = dict[Hashable, Any]
"""What an optimizer remembers of one parameter."""

WITHIN_STEP = (
    "in the middle of a step of this optimizer, as by a signal handler: the states are those of no step. Nothing was "
    "changed; call it after step(), by a flag that the handler sets"
)
"""To whoever asks for what a step has not ended with yet."""


class CoupledError(ConfigError):
    """A call of an optimizer for some of its parameters did what a plain step would not, or would otherwise.

    Args:
        finding: what it did, as the beginning of a sentence.
    """

    def __init__(self, finding: str) -> None:
        self.finding = finding
        super().__init__(
            f"{finding}. Such states cannot be offloaded, and this step is incomplete: go back to the last checkpoint, "
            "with OffloadPolicy.optimizer_states='keep'"
        )
