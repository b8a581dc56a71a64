"""The expected course of a pass: its storages by size, in pack order, and which of them stay."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["KEEPS_ALL", "NOTHING_KNOWN", "PassProgram"]


class PassProgram(NamedTuple):
    """The expected course of a pass."""

    sizes: tuple[int, ...]
    """Bytes of its storages, in pack order."""
    stays: bytes
    """For each of them 1 if it stays, else 0."""
    drives: bytes = b""
    """For each of them 1 if it goes to a drive, else 0: to the first tier that has room. Empty: none does."""
    keeps_all: bool = False
    """Nothing can move, so that sizes need not be known."""


NOTHING_KNOWN = PassProgram((), b"")
KEEPS_ALL = PassProgram((), b"", keeps_all=True)
