"""The entry point by which Trainers ask for callbacks of ours: cheap for programs that do not use us.

Lightning loads it whenever a Trainer is built. So it imports nothing of ours before ``$LIGHTNING_SSD`` asks for it.
"""

from __future__ import annotations

import os
from typing import Any

__all__ = ["callbacks"]


def callbacks() -> list[Any]:
    """Return the callbacks that Lightning adds to a Trainer, of either package. Fabric asks for none."""
    if not os.environ.get("LIGHTNING_SSD"):
        return []
    from lightning_ssd.callback import callbacks_from_environment

    return list(callbacks_from_environment())
