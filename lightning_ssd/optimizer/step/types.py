"""Types and errors that all parts of an offloaded optimizer share."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from lightning_ssd.errors import ConfigError

__all__ = ["WITHIN_STEP", "CoupledError", "State"]

State = dict[Hashable, Any]
"""State of one parameter, by name."""

WITHIN_STEP = (
    "in the middle of a step of this optimizer, as by a signal handler: the states are those of no step. Nothing was "
    "changed; call it after step(), by a flag that the handler sets"
)
"""End of errors for a signal handler that reads or changes states during a step."""


class CoupledError(ConfigError):
    """A call of an optimizer for some of its parameters had other effects than a plain step."""

    def __init__(self, finding: str) -> None:
        self.finding = finding
        super().__init__(
            f"{finding}. Such states cannot be offloaded, and this step is incomplete: go back to the last checkpoint, "
            "with OffloadPolicy.optimizer_states='keep'"
        )
