"""What all parts of an offloaded optimizer speak of."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

__all__ = ["INCOMPLETE", "State"]

State = dict[Hashable, Any]
"""What an optimizer remembers of one parameter."""

INCOMPLETE = (
    "Such states cannot be offloaded, and this step is incomplete: go back to the last checkpoint, with "
    "OffloadPolicy.optimizer_states='keep'"
)
"""What to do after a refusal within a step."""
