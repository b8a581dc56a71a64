"""The user's settings: ``OffloadPolicy`` (what to move, how far) and ``HardwareProfile`` (where to, with what).

Both are frozen, keyword-only and checked when built. Sizes may be written as ``"20GiB"``; they are kept as
written, so that ``repr`` prints what the user wrote, and read through :func:`parse_size`.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_ssd.common.validation import Size, parse_size, refuse_misread
from lightning_ssd.errors import ConfigError

__all__ = ["HardwareProfile", "OffloadPolicy"]

_ACTIVATIONS = ("auto", "offload", "keep", "recompute", "recompute_offload")
_BLOCKS = "blocks"
_MIN_MEMORY_BUDGET = 1 << 20
_WEAR = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*DWPD\s*", re.IGNORECASE)


def _check_choice(owner: str, name: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(str(value).lower(), [one for one in allowed if isinstance(one, str)], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{owner}.{name}={value!r}{hint}; allowed: {', '.join(map(repr, allowed))}")


def _check_optional_size(owner: str, name: str, value: Size | None, *, zero_means: str) -> None:
    if value is not None and parse_size(value, name=f"{owner}.{name}") == 0:
        raise ConfigError(f"{owner}.{name}={value!r} {zero_means}; allowed: None or a size above 0")


def _as_tuple(name: str, value: object, allowed: str) -> tuple[object, ...]:
    """One name or path, or several of them, as a tuple."""
    if isinstance(value, str | os.PathLike):
        return (value,)
    if not isinstance(value, Iterable) or isinstance(value, bytes):
        raise ConfigError(f"{name}={value!r} is a {type(value).__name__}; allowed: {allowed}")
    return tuple(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadPolicy:
    """Say what is moved, and how much slower a step may get for it. Every default works without a thought."""

    activations: Literal["auto", "offload", "keep", "recompute", "recompute_offload"] = "auto"
    """Saved activations: "auto" moves and profiles the first step of each shape, and plans (keep, move or recompute),
    "offload" moves all that is at least ``min_tensor_bytes`` large, "keep" moves nothing and only counts, "recompute"
    recomputes each block in backward and keeps the blocks' inputs, "recompute_offload" does so and moves the inputs."""

    parameters: Literal["keep", "offload", "auto"] = "keep"
    """Weights: "keep" leaves them in memory. "offload" lets each that is at least ``min_tensor_bytes`` large wait on
    SSD between its uses: those that are not trained (``requires_grad=False``), and with ``optimizer_states="offload"``
    the trained ones, too. "auto" lets only as many of these wait as memory lacks, or ``memory_budget`` requires, when
    the model is registered and as steps show. On GPUs with one process only."""

    gradients: Literal["keep", "offload", "auto"] = "keep"
    """Gradients: "keep" leaves them in memory. "offload" lets each that is at least ``min_tensor_bytes`` large wait on
    SSD from its accumulation to its update, "auto" those of the weights that wait; only with
    ``optimizer_states="offload"``, with one process, or on a CPU with shards (FSDP2)."""

    optimizer_states: Literal["keep", "offload"] = "keep"
    """Optimizer states: "keep" leaves them where the optimizer puts them. "offload" keeps them on SSD between steps,
    except for a few and for what ``HardwareProfile.host_memory`` allows; a step brings them up subgroup by subgroup."""

    master_weights: bool = False
    """Whether bfloat16 and float16 parameters get float32 copies that the optimizer updates in their place, so that
    small updates are not rounded away. They wait with the optimizer states; only with
    ``optimizer_states="offload"``."""

    per_parameter_optimizers: Sequence[str] | str = ()
    """Names of optimizer classes (``"Lion"`` or ``"package.module.Lion"``) that are not of ``torch.optim`` and that you
    promise to update each parameter by itself: by that parameter, its gradient, its state and its group's options, and
    by nothing else. Their step may raise plain numbers among its attributes and options once per call. Only with
    ``optimizer_states="offload"``."""

    memory_budget: Size | None = None
    """Peak of device memory (on CPU: of the process) to stay under; ``None``: as low as ``max_slowdown`` allows. Only
    with ``activations="auto"``; weights and gradients leave for it with ``parameters="auto"``."""

    activation_budget: Size | None = None
    """Limit of resident saved activations alone, from the first step on. Where no plan keeps it, steps exceed it
    until the first one is planned, and training stops with a ``BudgetError``."""

    max_slowdown: float = 1.05
    """(Step + overhead) / step that "auto" may reach without a budget; at least 1. Overhead is what stalls, hooks and
    CPU of moving take."""

    min_tensor_bytes: Size = "1MiB"
    """Saved storages below this size are kept: they cost more to move than they free. 0 moves everything."""

    recompute_modules: Sequence[str] | str = ()
    """Blocks that may be recomputed: names of their classes, or "blocks" for the repeated blocks of the model, found by
    themselves. Empty: nothing with ``activations="auto"``; with "recompute" and "recompute_offload", which ask for it,
    the repeated blocks."""

    verify: Literal["off", "sampled", "full"] = "off"
    """Checksums of what is read back: "full" for every storage that comes back from a tier and weights in a file of
    yours, "sampled" for one in sixteen."""

    wear_budget: Size | None = None
    """Bytes per day that may be written, or "1.0DWPD" (drive writes per day, of the file systems' sizes). Only with
    ``activations="auto"``."""

    def __post_init__(self) -> None:
        owner = type(self).__name__
        _check_choice(owner, "activations", self.activations, _ACTIVATIONS)
        _check_choice(owner, "parameters", self.parameters, ("keep", "offload", "auto"))
        _check_choice(owner, "gradients", self.gradients, ("keep", "offload", "auto"))
        _check_choice(owner, "optimizer_states", self.optimizer_states, ("keep", "offload"))
        _check_choice(owner, "master_weights", self.master_weights, (False, True))
        _check_choice(owner, "verify", self.verify, ("off", "sampled", "full"))
        _check_optional_size(owner, "memory_budget", self.memory_budget, zero_means="leaves no memory at all")
        if self.memory_budget is not None and parse_size(self.memory_budget) < _MIN_MEMORY_BUDGET:
            raise ConfigError(
                f"{owner}.memory_budget={self.memory_budget!r} is less than any process takes; allowed: 1 MiB or more, "
                'where a number without a unit counts bytes, such as "20GiB"'
            )
        _check_optional_size(owner, "activation_budget", self.activation_budget, zero_means="leaves no memory at all")
        parse_size(self.min_tensor_bytes, name=f"{owner}.min_tensor_bytes")
        self._check_wear(owner)
        slowdown: object = self.max_slowdown
        if isinstance(slowdown, bool) or not isinstance(slowdown, int | float) or not 1 <= slowdown < math.inf:
            raise ConfigError(f"{owner}.max_slowdown={slowdown!r}; allowed: a number of at least 1, such as 1.05")
        self._complete_names(owner)
        self._refuse_ineffective(owner)

    def _check_wear(self, owner: str) -> None:
        nothing = "lets nothing be written"
        match = _WEAR.fullmatch(self.wear_budget) if isinstance(self.wear_budget, str) else None
        if match is None:
            try:
                _check_optional_size(owner, "wear_budget", self.wear_budget, zero_means=nothing)
            except ConfigError as error:
                raise ConfigError(f'{error}, or drive writes per day such as "1.0DWPD"') from None
        elif not 0 < float(match[1]) < math.inf:
            fault = "is not finite" if float(match[1]) else nothing
            raise ConfigError(f'{owner}.wear_budget={self.wear_budget!r} {fault}; allowed: for example "1.0DWPD"')

    def _refuse_ineffective(self, owner: str) -> None:
        """A setting that would be ignored must not be accepted: people would believe in it."""
        for name in ("memory_budget", "activation_budget", "wear_budget"):
            value = getattr(self, name)
            if value is not None and self.activations != "auto":
                raise ConfigError(
                    f"{owner}.{name}={value!r} with activations={self.activations!r} would be ignored; "
                    "allowed: activations='auto', whose plans keep budgets"
                )
        if self.master_weights and self.optimizer_states == "keep":
            raise ConfigError(
                f"{owner}.master_weights=True with optimizer_states='keep' would be ignored; allowed: "
                "optimizer_states='offload', since the copies wait with the states"
            )
        if self.per_parameter_optimizers and self.optimizer_states == "keep":
            raise ConfigError(
                f"{owner}.per_parameter_optimizers={self.per_parameter_optimizers!r} with optimizer_states='keep' "
                "would be ignored; set optimizer_states='offload' as well"
            )
        if self.gradients == "auto" and self.parameters == "keep":
            raise ConfigError(
                f"{owner}.gradients='auto' with parameters='keep' would be ignored: they wait where their weights do; "
                "allowed: parameters='auto' or 'offload', or gradients='offload'"
            )
        if self.gradients != "keep" and self.optimizer_states == "keep":
            raise ConfigError(
                f"{owner}.gradients={self.gradients!r} needs optimizer_states='offload'; without it the update brings "
                "all gradients back at once"
            )
        if self.recompute_modules and self.activations in ("offload", "keep"):
            raise ConfigError(
                f"{owner}.recompute_modules={self.recompute_modules!r} with activations={self.activations!r} would be "
                "ignored; allowed: activations='auto', 'recompute' or 'recompute_offload'"
            )

    def _complete_names(self, owner: str) -> None:
        for field, what, example in (
            ("recompute_modules", "modules", '"TransformerEncoderLayer", or "blocks"'),
            ("per_parameter_optimizers", "optimizers", '"Lion"'),
        ):
            allowed = f"names of classes of {what}"
            names = _as_tuple(f"{owner}.{field}", getattr(self, field), allowed)
            for name in names:
                parts = name.split(".") if isinstance(name, str) and field == "per_parameter_optimizers" else [name]
                if not all(isinstance(part, str) and part.isidentifier() for part in parts):
                    raise ConfigError(f"{owner}.{field} contains {name!r}; allowed: {allowed}, such as {example}")
            # A frozen dataclass may only be completed through object; a single name is accepted as a tuple of one.
            object.__setattr__(self, field, names)
        if _BLOCKS in self.recompute_modules and len(self.recompute_modules) > 1:
            raise ConfigError(
                f'{owner}.recompute_modules={self.recompute_modules!r} names classes besides "{_BLOCKS}", the repeated '
                "ones; allowed: one or the other"
            )

    @property
    def recomputable_classes(self) -> tuple[str, ...] | None:
        """Classes of the blocks that may be recomputed, none: the repeated ones; ``None``: nothing may be."""
        if not self.recompute_modules:
            return () if self.activations in ("recompute", "recompute_offload") else None
        return tuple(name for name in self.recompute_modules if name != _BLOCKS)

    @property
    def budget_nbytes(self) -> tuple[int | None, int | None]:
        """``memory_budget`` and ``activation_budget`` as integers."""
        memory, activations = self.memory_budget, self.activation_budget
        return (
            None if memory is None else parse_size(memory),
            None if activations is None else parse_size(activations),
        )

    def wear_bytes_per_day(self, drive_nbytes: int) -> int | None:
        """``wear_budget`` in bytes, for drives of so many bytes together."""
        if self.wear_budget is None:
            return None
        match = _WEAR.fullmatch(str(self.wear_budget))
        return round(float(match[1]) * drive_nbytes) if match else parse_size(self.wear_budget)

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
    """How bytes reach a file: "auto" takes kvikio for a GPU with GPUDirect Storage, else posix."""

    host_memory: Size | Literal["auto"] = "auto"
    """Cap of what activations and the states of all optimizers of a process take of the host's memory in place of the
    drives', together; 0: nothing. On a CPU these are states that stay where they are updated. "auto": on CUDA a quarter
    of what is available, shared by the machine's processes; on CPU 0, because it would save nothing."""

    drive_endurance: Size | None = None
    """Bytes that each drive is rated to be written over its life (its "TBW", for example "600TB"); ``None``: unknown,
    so that no drive life is told."""

    write_rate: Size | None = None
    """Bytes per second that each of ``paths`` takes for long (for example "3.5GB"), from ``lightning-ssd bench`` or a
    data sheet: what plans begin with, unless a short trial of the drive shows less. What the run measures overrules it.
    ``None``: unknown, the trial counts."""

    read_rate: Size | None = None
    """Read rate that the user expects of each directory."""

    allow_unsuitable_paths: bool = False
    """Accept tmpfs (which is memory, so nothing is saved) and network file systems (which may be slow)."""

    def __post_init__(self) -> None:
        owner = type(self).__name__
        _check_choice(owner, "backend", self.backend, ("auto", "kvikio", "posix"))
        if self.host_memory != "auto":
            try:
                parse_size(self.host_memory, name=f"{owner}.host_memory")
            except ConfigError as error:
                raise ConfigError(f'{error}, or "auto"') from None
        _check_optional_size(owner, "drive_endurance", self.drive_endurance, zero_means="is no rating")
        _check_optional_size(owner, "write_rate", self.write_rate, zero_means="moves nothing")
        _check_optional_size(owner, "read_rate", self.read_rate, zero_means="moves nothing")
        if not isinstance(self.allow_unsuitable_paths, bool):
            raise ConfigError(f"{owner}.allow_unsuitable_paths={self.allow_unsuitable_paths!r}; allowed: True, False")
        paths = _as_tuple(f"{owner}.paths", self.paths, "directory names, one per drive")
        for path in paths:
            if not isinstance(path, str | os.PathLike) or not os.fspath(path) or "\0" in str(path):
                raise ConfigError(f"{owner}.paths contains {path!r}; allowed: non-empty directory names, one per drive")
        refuse_misread(f"{owner}.paths", paths, 'names of directories on this machine, such as ["/mnt/a", "/mnt/b"]')
        # A frozen dataclass may only be completed through object; a single path is accepted as a tuple of one.
        object.__setattr__(self, "paths", paths)

    @property
    def host_memory_nbytes(self) -> int | None:
        """``host_memory`` as an integer; ``None`` for "auto"."""
        return None if self.host_memory == "auto" else parse_size(self.host_memory)

    @property
    def rates(self) -> tuple[int | None, int | None]:
        """``write_rate`` and ``read_rate`` as integers."""
        write, read = self.write_rate, self.read_rate
        return None if write is None else parse_size(write), None if read is None else parse_size(read)

    @property
    def drive_endurance_nbytes(self) -> int | None:
        """``drive_endurance`` as an integer."""
        return None if self.drive_endurance is None else parse_size(self.drive_endurance)
