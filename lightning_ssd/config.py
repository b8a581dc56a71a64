"""The user's settings: ``OffloadPolicy`` (what is offloaded, and how much) and ``HardwareProfile`` (where to).

Both are frozen, keyword-only and checked when built. Sizes may be written as ``"20GiB"``. They are stored as written,
because ``repr`` prints what the user wrote, and read with :func:`parse_size`.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, TypeVar

from lightning_ssd.common.validation import Size, parse_size, refuse_misread
from lightning_ssd.errors import ConfigError

__all__ = ["HardwareProfile", "OffloadPolicy", "from_section"]

_T = TypeVar("_T")
_ACTIVATIONS = ("auto", "offload", "keep", "recompute", "recompute_offload")
_BLOCKS = "blocks"
_MIN_MEMORY_BUDGET = 1 << 20
_WEAR = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*DWPD\s*", re.IGNORECASE)


def from_section(kind: type[_T], found: object, section: str) -> _T:
    """Make settings from a section of a file.

    Args:
        kind: their class, a dataclass.
        found: the section's content.
        section: its name, for messages.

    Raises:
        ConfigError: it is no mapping, or has a setting that the class does not have.
    """
    if not isinstance(found, Mapping):
        raise ConfigError(f"{section}: expects settings of {kind.__name__}, one per line; got {found!r}")
    names = [one.name for one in fields(kind)]  # type: ignore[arg-type]  # a dataclass
    for name in found:
        if name not in names:
            raise ConfigError(f"{section}.{name}={found[name]!r} is no setting. Write one of {', '.join(names)}")
    return kind(**found)


def _check_choice(owner: str, name: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(str(value).lower(), [one for one in allowed if isinstance(one, str)], n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        choices = ", ".join(map(repr, allowed))
        raise ConfigError(f"{owner}.{name}={value!r} is not possible. {hint}Write one of {choices}")


def _check_optional_size(owner: str, name: str, value: Size | None, *, zero_means: str) -> None:
    if value is not None and parse_size(value, name=f"{owner}.{name}") == 0:
        raise ConfigError(f"{owner}.{name}={value!r} {zero_means}. Write None or a size above 0")


def _optional_size(value: Size | None) -> int | None:
    return None if value is None else parse_size(value)


def _as_tuple(name: str, value: object, valid: str) -> tuple[object, ...]:
    """Return one name or path, or several of them, as a tuple."""
    if isinstance(value, str | os.PathLike):
        return (value,)
    if not isinstance(value, Iterable) or isinstance(value, bytes):
        raise ConfigError(f"{name}={value!r} is a {type(value).__name__}. Write {valid}")
    return tuple(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadPolicy:
    """Say what is offloaded, and how much slower a step may get for it. The defaults need no change."""

    activations: Literal["auto", "offload", "keep", "recompute", "recompute_offload"] = "auto"
    """Saved activations. "auto" offloads and profiles the first step of each shape, then plans which ones to keep,
    offload or recompute. "offload" offloads every one of at least ``min_tensor_bytes``. "keep" offloads nothing and
    only counts. "recompute" recomputes each block in backward and keeps the blocks' inputs. "recompute_offload" also
    offloads these inputs."""

    parameters: Literal["keep", "offload", "auto"] = "keep"
    """Weights. "keep" leaves them in memory. "offload" stores every weight of at least ``min_tensor_bytes`` on SSD
    between its uses: frozen ones (``requires_grad=False``), and with ``optimizer_states="offload"`` also trained ones.
    "auto" offloads only as many of these as do not fit into memory or ``memory_budget``: it decides once, when
    the model is registered. On GPUs with one process only."""

    gradients: Literal["keep", "offload", "auto"] = "keep"
    """Gradients. "keep" leaves them in memory. "offload" stores every gradient of at least ``min_tensor_bytes`` on SSD
    from its accumulation to its update. "auto" does so for the gradients of offloaded weights. Only with
    ``optimizer_states="offload"``, and with one process, or on a CPU with shards (FSDP2)."""

    optimizer_states: Literal["keep", "offload"] = "keep"
    """Optimizer states. "keep" leaves them where the optimizer puts them. "offload" stores them on SSD between steps,
    except for a few, and for those that fit into ``HardwareProfile.host_memory``. A step loads them subgroup by
    subgroup."""

    master_weights: bool = False
    """Whether bfloat16 and float16 parameters get float32 copies that the optimizer updates in their place, because
    half precision rounds small updates away. The copies are offloaded with the optimizer states. Only with
    ``optimizer_states="offload"``."""

    per_parameter_optimizers: Sequence[str] | str = ()
    """Names of optimizer classes (``"Lion"`` or ``"package.module.Lion"``) outside ``torch.optim`` that you promise to
    update each parameter by itself: from that parameter, its gradient, its state and its group's options alone. A call
    of their step may also change numbers among its attributes and options, if every call changes them in the same way.
    Only with ``optimizer_states="offload"``."""

    memory_budget: Size | None = None
    """Limit of the peak of all memory: on a GPU of what PyTorch allocates there, on a CPU of the process. It is
    approximate, and does not count what an optimizer's update takes. If no plan can keep it, training stops with a
    ``BudgetError`` that names the smallest that works, in the first step without the optimizer's states. Only with
    ``activations="auto"``. With ``parameters="auto"``, weights and gradients are offloaded for it, too. ``None``: no
    limit."""

    activation_budget: Size | None = None
    """Limit of the saved activations in memory, from the first step on. If no plan can keep it, steps exceed it until
    the first plan is made, and training stops with a ``BudgetError``."""

    max_slowdown: float = 1.05
    """Largest ratio (step + overhead) / step that "auto" may reach without a budget; at least 1. Overhead is the time
    of stalls, hooks, and CPU work for moves."""

    min_tensor_bytes: Size = "1MiB"
    """Saved storages below this size are kept: a move costs more than it frees. 0 moves everything."""

    recompute_modules: Sequence[str] | str = ()
    """Blocks that may be recomputed: names of their classes, or "blocks" for the repeated blocks of the model, which
    are found by themselves. Empty: none with ``activations="auto"``, and the repeated blocks with "recompute" and
    "recompute_offload"."""

    verify: Literal["off", "sampled", "full"] = "off"
    """Checksums of bytes that are read back. "full" checks every storage from a tier, "sampled" one in sixteen. None
    checks weights and gradients in files."""

    wear_budget: Size | None = None
    """Limit of bytes written per day by activations, states, weights and gradients together, or "1.0DWPD" (drive writes
    per day, by the sizes of the file systems). Only with ``activations="auto"``, which writes what others leave of it.
    Where these alone exceed it, training ends with a ``BudgetError``."""

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
                f"{owner}.memory_budget={self.memory_budget!r} is less than any process takes: a number without a unit "
                'counts bytes. Write 1 MiB or more, with a unit, such as "20GiB"'
            )
        _check_optional_size(owner, "activation_budget", self.activation_budget, zero_means="leaves no memory at all")
        parse_size(self.min_tensor_bytes, name=f"{owner}.min_tensor_bytes")
        self._check_wear(owner)
        slowdown: object = self.max_slowdown
        if isinstance(slowdown, bool) or not isinstance(slowdown, int | float) or not 1 <= slowdown < math.inf:
            raise ConfigError(
                f"{owner}.max_slowdown={slowdown!r} is no ratio. Write a finite number of at least 1, such as 1.05"
            )
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
            raise ConfigError(
                f"{owner}.wear_budget={self.wear_budget!r} {fault}. Write a finite number above 0, for example "
                '"1.0DWPD"'
            )

    def _refuse_ineffective(self, owner: str) -> None:
        """Refuse settings that other settings make ineffective, because the user would rely on them."""
        for name in ("memory_budget", "activation_budget", "wear_budget"):
            value = getattr(self, name)
            if value is not None and self.activations != "auto":
                raise ConfigError(
                    f"{owner}.{name}={value!r} with activations={self.activations!r} would be ignored, because only "
                    "plans keep budgets. Write activations='auto'"
                )
        if self.master_weights and self.optimizer_states == "keep":
            raise ConfigError(
                f"{owner}.master_weights=True with optimizer_states='keep' would be ignored, because the copies are "
                "offloaded with the states. Write optimizer_states='offload'"
            )
        if self.per_parameter_optimizers and self.optimizer_states == "keep":
            raise ConfigError(
                f"{owner}.per_parameter_optimizers={self.per_parameter_optimizers!r} with optimizer_states='keep' "
                "would be ignored; set optimizer_states='offload' as well"
            )
        if self.gradients == "auto" and self.parameters == "keep":
            raise ConfigError(
                f"{owner}.gradients='auto' with parameters='keep' would be ignored, because it offloads the gradients "
                "of offloaded weights. Write parameters='auto' or 'offload', or gradients='offload'"
            )
        if self.gradients != "keep" and self.optimizer_states == "keep":
            raise ConfigError(
                f"{owner}.gradients={self.gradients!r} needs optimizer_states='offload'; without it the update brings "
                "all gradients back at once"
            )
        if self.recompute_modules and self.activations in ("offload", "keep"):
            raise ConfigError(
                f"{owner}.recompute_modules={self.recompute_modules!r} with activations={self.activations!r} would be "
                "ignored, because it recomputes nothing. Write activations='auto', 'recompute' or 'recompute_offload'"
            )

    def _complete_names(self, owner: str) -> None:
        for field, what, example in (
            ("recompute_modules", "modules", '"TransformerEncoderLayer", or "blocks"'),
            ("per_parameter_optimizers", "optimizers", '"Lion"'),
        ):
            valid = f"names of classes of {what}"
            names = _as_tuple(f"{owner}.{field}", getattr(self, field), valid)
            for name in names:
                parts = name.split(".") if isinstance(name, str) and field == "per_parameter_optimizers" else [name]
                if not all(isinstance(part, str) and part.isidentifier() for part in parts):
                    raise ConfigError(
                        f"{owner}.{field} contains {name!r}, which is no class name. Write {valid}, such as {example}"
                    )
            # A frozen dataclass may only be completed through object; a single name is accepted as a tuple of one.
            object.__setattr__(self, field, names)
        if _BLOCKS in self.recompute_modules and len(self.recompute_modules) > 1:
            raise ConfigError(
                f'{owner}.recompute_modules={self.recompute_modules!r} names classes besides "{_BLOCKS}", which means '
                f'the repeated blocks. Write either the classes or "{_BLOCKS}"'
            )

    @property
    def recomputable_classes(self) -> tuple[str, ...] | None:
        """Classes of the blocks that may be recomputed; empty: the repeated blocks; ``None``: no blocks."""
        if not self.recompute_modules:
            return () if self.activations in ("recompute", "recompute_offload") else None
        return tuple(name for name in self.recompute_modules if name != _BLOCKS)

    @property
    def budget_nbytes(self) -> tuple[int | None, int | None]:
        """``memory_budget`` and ``activation_budget`` as integers."""
        return _optional_size(self.memory_budget), _optional_size(self.activation_budget)

    def wear_bytes_per_day(self, drive_nbytes: int) -> int | None:
        """Return ``wear_budget`` in bytes per day, for drives of ``drive_nbytes`` bytes together."""
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
    """Say where offloaded bytes go, and how fast the drives are."""

    paths: Sequence[str | os.PathLike[str]] | str | os.PathLike[str] = ()
    """Directories, one per drive. Empty: ``$LIGHTNING_SSD_PATHS`` (separated by ``os.pathsep``), else the Trainer's
    default root directory, in Fabric the current directory, else the temporary directory."""

    backend: Literal["auto", "cufile", "kvikio", "posix"] = "auto"
    """How bytes reach a file: "auto" uses cuFile (GPUDirect Storage) for a GPU where it works and is no slower than
    posix, else posix. With `verify` other than "off", "auto" is posix."""

    host_memory: Size | Literal["auto"] = "auto"
    """Limit of host memory that is used in place of drives, for the activations and all optimizer states of a process
    together; 0: none. On a CPU so many bytes of optimizer states stay in memory and do not move. "auto": on CUDA a
    quarter of the available memory, shared by the machine's processes; on a CPU 0, because it would save nothing."""

    drive_endurance: Size | None = None
    """Bytes that each drive may still be written: its rating (its "TBW", for example "600TB"), less what it was written
    before (``smartctl -a`` tells). ``None``: unknown, so that no drive life is reported."""

    write_rate: Size | None = None
    """Sustained write rate of each of ``paths`` in bytes per second (for example "3.5GB"), of unequal drives the
    average, from ``lightning-ssd bench`` or a data sheet. Plans begin with it, unless a short trial of the drive shows
    less. Rates that the run measures replace it. ``None``: unknown, plans begin with the trial's rate."""

    read_rate: Size | None = None
    """Read rate of each of ``paths`` in bytes per second, used like ``write_rate``."""

    allow_unsuitable_paths: bool = False
    """Accept tmpfs (which is memory, so that nothing is saved) and network file systems (which may be slow)."""

    def __post_init__(self) -> None:
        owner = type(self).__name__
        _check_choice(owner, "backend", self.backend, ("auto", "cufile", "kvikio", "posix"))
        if self.host_memory != "auto":
            try:
                parse_size(self.host_memory, name=f"{owner}.host_memory")
            except ConfigError as error:
                raise ConfigError(f'{error}, or "auto"') from None
        _check_optional_size(owner, "drive_endurance", self.drive_endurance, zero_means="lets nothing be written")
        _check_optional_size(owner, "write_rate", self.write_rate, zero_means="moves nothing")
        _check_optional_size(owner, "read_rate", self.read_rate, zero_means="moves nothing")
        if not isinstance(self.allow_unsuitable_paths, bool):
            raise ConfigError(
                f"{owner}.allow_unsuitable_paths={self.allow_unsuitable_paths!r} is not possible. Write True or False"
            )
        paths = _as_tuple(f"{owner}.paths", self.paths, "directory names, one per drive")
        for path in paths:
            if not isinstance(path, str | os.PathLike) or not os.fspath(path) or "\0" in str(path):
                raise ConfigError(
                    f"{owner}.paths contains {path!r}, which is no directory name. Write one non-empty name per drive"
                )
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
        return _optional_size(self.write_rate), _optional_size(self.read_rate)

    @property
    def drive_endurance_nbytes(self) -> int | None:
        """``drive_endurance`` as an integer."""
        return _optional_size(self.drive_endurance)
