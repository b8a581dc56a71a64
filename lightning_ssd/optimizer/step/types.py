"""What all parts of an offloaded optimizer speak of."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

__all__ = ["INCOMPLETE", "WITHIN_STEP", "State"]

State = dict[Hashable, Any]
"""What an optimizer remembers of one parameter."""

INCOMPLETE = (
    "Such states cannot be offloaded, and this step is incomplete: go back to the last checkpoint, with "
    "OffloadPolicy.optimizer_states='keep'"
)
"""What to do after a refusal within a step."""

WITHIN_STEP = (
    "in the middle of a step of this optimizer, as by a signal handler: the states are those of no step. Nothing was "
    "changed; call it after step(), by a flag that the handler sets"
)
"""To whoever asks for what a step has not ended with yet."""
