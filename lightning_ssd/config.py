"""What a user sets: ``OffloadPolicy`` (what to move, how far) and ``HardwareProfile`` (where to, with what).

Both are frozen, keyword-only and checked when built. Sizes may be written as ``"20GiB"``; they are kept as
written, so that ``repr`` prints what the user wrote, and read through :func:`parse_size`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from lightning_ssd.errors import ConfigError

__all__ = ["HardwareProfile", "OffloadPolicy", "Size", "parse_size"]

Size = int | str
"""Bytes as an integer, or text such as ``"512KiB"``, ``"1.5 GiB"``, ``"20GB"``."""

_UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgtp", start=1)
    for suffix, base in (("ib", 1024), ("b", 1000))
}
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]*)\s*", re.IGNORECASE)
_WEAR = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*DWPD\s*", re.IGNORECASE)


def parse_size(value: Size, *, name: str = "size") -> int:
    """Read a size in bytes.

    Args:
        value: a non-negative integer, or a number followed by B, KiB, MiB, GiB, TiB, PiB (powers of 1,024) or
            KB, MB, GB, TB, PB (powers of 1,000); case does not matter.
        name: dotted name of the setting, for the error.

    Raises:
        ConfigError: if the value is of another form, negative or not finite.
    """
    allowed = 'bytes as an integer, or text such as "512KiB", "1.5GiB", "20GB"'
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(f"{name}={value!r} is a {type(value).__name__}; allowed: {allowed}")
    if isinstance(value, int):
        if value < 0:
            raise ConfigError(f"{name}={value!r} is negative; allowed: {allowed}")
        return value
    match = _SIZE.fullmatch(value)
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"{name}={value!r} is not a size; allowed: {allowed}")
    number, unit = match.groups()
    nbytes: int = round(float(number) * _UNITS[unit.lower()])
    return nbytes


def _check_choice(owner: str, name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{owner}.{name}={value!r}; allowed: {', '.join(map(repr, allowed))}")


def _check_optional_size(owner: str, name: str, value: Size | None) -> None:
    if value is not None and parse_size(value, name=f"{owner}.{name}") == 0:
        raise ConfigError(f"{owner}.{name}={value!r} leaves no memory at all; allowed: None or a size above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadPolicy:
    """What is moved, and how much slower a step may get for it. Every default works without a thought."""

    activations: Literal["auto", "offload", "keep"] = "auto"
    """Saved activations: "auto" plans from profiled steps (until the planner exists: as "offload"), "offload" moves
    all that is at least ``min_tensor_bytes`` large, "keep" moves nothing and only counts."""

    optimizer_states: Literal["keep", "offload"] = "keep"
    """Optimizer states: "keep" leaves them where the optimizer puts them. "offload" is not built yet and is refused."""

    memory_budget: Size | None = None
    """Device peak to stay under; ``None``: as low as ``max_slowdown`` allows. Needs the planner; refused until then."""

    activation_budget: Size | None = None
    """The same for resident saved activations alone. Needs the planner; refused until then."""

    max_slowdown: float = 1.02
    """Predicted step time / step time with everything kept that a plan may reach; at least 1. Without effect until the
    planner exists."""

    min_tensor_bytes: Size = "1MiB"
    """Saved storages below this size are kept: they cost more to move than they free. 0 moves everything."""

    verify: Literal["off", "sampled", "full"] = "off"
    """Checksums of what is read back: "full" for every storage, "sampled" for one in sixteen."""

    wear_budget: Size | None = None
    """Bytes per day, or "1.0DWPD" (drive writes per day). Needs the planner; refused until then."""

    def __post_init__(self) -> None:
        owner = type(self).__name__
        _check_choice(owner, "activations", self.activations, ("auto", "offload", "keep"))
        _check_choice(owner, "optimizer_states", self.optimizer_states, ("keep", "offload"))
        _check_choice(owner, "verify", self.verify, ("off", "sampled", "full"))
        _check_optional_size(owner, "memory_budget", self.memory_budget)
        _check_optional_size(owner, "activation_budget", self.activation_budget)
        parse_size(self.min_tensor_bytes, name=f"{owner}.min_tensor_bytes")
        if not (isinstance(self.wear_budget, str) and _WEAR.fullmatch(self.wear_budget)):
            _check_optional_size(owner, "wear_budget", self.wear_budget)
        slowdown: object = self.max_slowdown
        if isinstance(slowdown, bool) or not isinstance(slowdown, int | float) or not 1 <= slowdown < math.inf:
            raise ConfigError(f"{owner}.max_slowdown={slowdown!r}; allowed: a number of at least 1, such as 1.02")
        self._refuse_unbuilt(owner)

    def _refuse_unbuilt(self, owner: str) -> None:
        """A setting that would be ignored must not be accepted: people would believe in it."""
        if self.optimizer_states == "offload":
            raise ConfigError(f"{owner}.optimizer_states='offload' is not built yet; allowed: 'keep'")
        for name in ("memory_budget", "activation_budget", "wear_budget"):
            value = getattr(self, name)
            if value is not None:
                raise ConfigError(f"{owner}.{name}={value!r} needs the planner, which is not built yet; allowed: None")

    @property
    def min_tensor_nbytes(self) -> int:
        """``min_tensor_bytes`` as an integer."""
        return parse_size(self.min_tensor_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareProfile:
    """Where offloaded bytes go, and with what."""

    paths: Sequence[str | os.PathLike[str]] | str | os.PathLike[str] = ()
    """Directories, one per drive. Empty: ``$LIGHTNING_SSD_PATHS`` (separated by ``os.pathsep``), else the Trainer's
    default root directory, else a temporary directory."""

    backend: Literal["auto", "kvikio", "posix"] = "auto"
    """How bytes reach a file: "auto" takes kvikio where GPU and kvikio work, else posix."""

    host_memory: Size | Literal["auto"] = "auto"
    """Cap of the spare reload buffers (CPU) or of the pinned staging buffers (CUDA); "auto" derives it from the run, 0
    keeps no spare buffers."""

    allow_unsuitable_paths: bool = False
    """Accept tmpfs (which is memory, so nothing is saved) and network file systems (which may be slow)."""

    def __post_init__(self) -> None:
        owner = type(self).__name__
        _check_choice(owner, "backend", self.backend, ("auto", "kvikio", "posix"))
        if self.host_memory != "auto":
            parse_size(self.host_memory, name=f"{owner}.host_memory")
        if not isinstance(self.allow_unsuitable_paths, bool):
            raise ConfigError(f"{owner}.allow_unsuitable_paths={self.allow_unsuitable_paths!r}; allowed: True, False")
        paths = (self.paths,) if isinstance(self.paths, str | os.PathLike) else tuple(self.paths)
        for path in cast(tuple[object, ...], paths):
            if not isinstance(path, str | os.PathLike) or not os.fspath(path):
                raise ConfigError(f"{owner}.paths contains {path!r}; allowed: non-empty directory names, one per drive")
        # A frozen dataclass may only be completed through object; a single path is accepted as a tuple of one.
        object.__setattr__(self, "paths", paths)

    @property
    def host_memory_nbytes(self) -> int | None:
        """``host_memory`` as an integer; ``None`` for "auto"."""
        return None if self.host_memory == "auto" else parse_size(self.host_memory)
