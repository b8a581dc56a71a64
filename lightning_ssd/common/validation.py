"""Read the values that users give, and refuse wrong ones with an error that names what to write."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from typing import Any, TypeVar

from lightning_ssd.errors import ConfigError

__all__ = ["Size", "expect", "parse_size", "refuse_misread"]

_T = TypeVar("_T")

Size = int | str
"""Bytes as an integer, or text such as ``"512KiB"``, ``"1.5 GiB"``, ``"20GB"``."""
_UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgtp", start=1)
    for suffix, base in (("ib", 1024), ("b", 1000))
}
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(value: Size, *, name: str = "size") -> int:
    """Read a size in bytes.

    Args:
        value: a non-negative integer, or a number followed by B, KiB, MiB, GiB, TiB, PiB (powers of 1,024) or
            KB, MB, GB, TB, PB (powers of 1,000); case does not matter.
        name: dotted name of the setting, for the error.

    Raises:
        ConfigError: if the value is of another form, negative or not finite.
    """
    valid = 'bytes as an integer, or text such as "512KiB", "1.5GiB", "20GB"'
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(f"{name}={value!r} is a {type(value).__name__}. Write {valid}")
    if isinstance(value, int):
        if value < 0:
            raise ConfigError(f"{name}={value!r} is negative. Write {valid}")
        return value
    match = _SIZE.fullmatch(value)
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"{name}={value!r} is not a size. Write {valid}")
    number, unit = match.groups()
    exact = float(number) * _UNITS[unit.lower()]
    if exact == math.inf:
        raise ConfigError(f"{name}={value!r} is not finite. Write {valid}")
    nbytes: int = round(exact)
    return nbytes


def expect(name: str, value: object, cls: type[_T], example: str) -> _T:
    """Return the value that the user gave.

    Raises:
        ConfigError: the value is of another type.
    """
    if not isinstance(value, cls):
        got = f"{name}={value!r} is a {type(value).__name__}"
        raise ConfigError(f"{got}. Pass a value of type {cls.__name__}, for example {example}")
    return value


def refuse_misread(name: str, paths: Iterable[Any], valid: str) -> None:
    """Refuse names that are probably no directories, because the package would create them. Existing ones pass.

    Raises:
        ConfigError: a name looks like several in one, like an address, or like a variable.
    """
    for path in paths:
        text: str = os.fspath(path)
        if re.search(r"^\$|[:,;] *[/~]", text) and not os.path.isdir(text):
            raise ConfigError(f"{name}: {text!r} would be one directory of that name. Write {valid}")
