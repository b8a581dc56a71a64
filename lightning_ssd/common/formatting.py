"""Format sizes, counts and names for messages. Pure."""

from __future__ import annotations

__all__ = ["as_setting", "escape_control", "format_sizes", "pluralize"]

_BINARY = (("GiB", 1 << 30, 2), ("MiB", 1 << 20, 1))
_DECIMAL = (("TB", 10**12, 2), ("GB", 10**9, 2), ("MB", 10**6, 1))


def format_sizes(*sizes: float, decimal: bool = False) -> list[str]:
    """Format the sizes of one sentence in one unit, so that they can be compared at a glance.

    The largest size determines the unit, and all have the same number of digits. A size that would be rounded to zero
    is shown as less than the last digit: ``<0.01 GiB``.

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


def as_setting(nbytes: int) -> str:
    """Return a size as text for a setting, such as ``"470MiB"``: never less than the bytes, at most 0.1 % more."""
    for unit, unit_bytes in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes and (nbytes % unit_bytes == 0 or nbytes >= unit_bytes << 10):
            return f'"{-(-nbytes // unit_bytes)}{unit}"'
    return str(nbytes)


def pluralize(number: int, one: str, many: str) -> str:
    """Return a number with its noun: ``1 pass``, ``2 passes``.

    Args:
        number: the number.
        one: the noun after 1.
        many: the noun after all other numbers.
    """
    return f"{number} {one if number == 1 else many}"


def escape_control(name: object) -> str:
    """Return a name that a user or another program chose on one line, without control codes for a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in str(name))
