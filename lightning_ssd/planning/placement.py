"""Where a saved storage goes."""

from __future__ import annotations

import enum

__all__ = ["Placement"]


class Placement(enum.StrEnum):
    """The decision for one storage."""

    KEEP = "keep"
    HOST = "host"
    SSD = "ssd"
    RECOMPUTE = "recompute"
