"""Numbers and names in sentences: sizes in one unit, nouns in the right number, names that stay names. Pure."""

from __future__ import annotations

import math

__all__ = ["escape_control", "format_size", "format_sizes", "pluralize"]

_BINARY = (("GiB", 1 << 30, 2), ("MiB", 1 << 20, 1))
_QUARTER = 1 << 28
_DECIMAL = (("TB", 10**12, 2), ("GB", 10**9, 2), ("MB", 10**6, 1))


def format_sizes(*sizes: float, decimal: bool = False) -> list[str]:
    """Sizes of one sentence, in one unit, so that they can be compared at a glance.

    The largest one chooses the unit, which has the same digits for all. One that they would tell as nothing is told as
    less than their last one: ``<0.01 GiB``.

    Args:
        sizes: in bytes.
        decimal: MB, GB or TB, as vendors of drives count; else MiB or GiB.
    """
    units = _DECIMAL if decimal else _BINARY
    unit, nbytes, digits = next((u for u in units if max(sizes) >= u[1] / 10), units[-1])
    return [f"{_number(size / nbytes, digits)} {unit}" for size in sizes]


def _number(value: float, digits: int) -> str:
    least = 1 / 10**digits
    return f"<{least:g}" if 0 < value < least / 2 else f"{value:,.{digits}f}"


def format_size(nbytes: int) -> str:
    """``1572864 bytes (1.5 MiB)``: to the byte for who compares, and in a form that can be given back as a setting.

    What is in parentheses is never less than the bytes, so that a budget that is copied from it is large enough.
    """
    unit, unit_bytes = ("MiB", 1 << 20) if nbytes >= 1 << 20 else ("KiB", 1 << 10)
    if nbytes and nbytes % _QUARTER == 0:  # else two digits of GiB would be too coarse
        unit, unit_bytes = "GiB", 1 << 30
    return f"{nbytes} bytes ({math.ceil(100 * nbytes / unit_bytes) / 100:.2f}".rstrip("0").rstrip(".") + f" {unit})"


def pluralize(number: int, one: str, many: str) -> str:
    """``1 pass``, ``2 passes``.

    Args:
        number: how many.
        one: what follows if there is one.
        many: what follows otherwise.
    """
    return f"{number} {one if number == 1 else many}"


def escape_control(name: object) -> str:
    """A name that a user or another program chose, on one line and without codes that a terminal would obey."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in str(name))
