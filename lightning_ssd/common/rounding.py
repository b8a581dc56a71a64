"""Sizes in whole units."""

from __future__ import annotations

__all__ = ["round_up"]


def round_up(number: int, unit: int) -> int:
    """Return the smallest multiple of ``unit`` that is not less than ``number``."""
    return -(-number // unit) * unit
