"""One colour for each thing that is drawn, the same in every picture. Told apart without red and green as well.

Source: M. Okabe and K. Ito, Color Universal Design (2008).
"""

from __future__ import annotations

from lightning_ssd.reports.charts import Role

__all__ = ["BAR_NAMES", "COLORS", "PHASE_COLORS"]

COLORS: dict[Role, str] = {
    "weights": "#888888",
    "gradients": "#f0e442",
    "states": "#cc79a7",
    "activations": "#0072b2",
    "other": "#e69f00",
    "keep": "#d55e00",
    "write": "#e69f00",
    "read": "#009e73",
    "wait": "#d55e00",
    "away": "#b8d4e8",
    "measure": "#0072b2",
}
PHASE_COLORS = {"forward": "#0072b2", "backward": "#e69f00", "update": "#009e73"}
"""Colours of the bands behind; drawn faintly. A phase without one is blank."""
BAR_NAMES: dict[Role, str] = {
    "activations": "in memory",
    "away": "away",
    "write": "write",
    "read": "read",
    "wait": "training waits",
}
"""Names of intervals, in legends."""
