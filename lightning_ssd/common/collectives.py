"""What the processes of a run agree on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["AllReduceMin"]

AllReduceMin = Callable[[Sequence[float]], list[float]]
"""The smallest of each number over all processes. Every process calls it at the same point, and waits for the others.
"""
