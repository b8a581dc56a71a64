"""Where random numbers come from: the state that a source is in, and putting a source into a state.

PyTorch's checkpoint looks after PyTorch's default generators. A model may have generators of its own, and may ask
Python or NumPy.
"""

from __future__ import annotations

import operator
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

__all__ = ["RandomStates", "Source", "default_sources", "shared_sources", "source_of"]


class Source(NamedTuple):
    """One source of random numbers."""

    read: Callable[[], Any]
    """Gives a state that later numbers do not change."""
    write: Callable[[Any], object]
    """Takes such a state."""
    is_same: Callable[[Any, Any], bool]
    """Whether two such states are equal."""


class RandomStates:
    """What random numbers will come next from some sources."""

    def __init__(self, sources: Iterable[Source] = ()) -> None:
        self._states = [(source, source.read()) for source in sources]

    def add(self, source: Source) -> None:
        """One more, as it is now."""
        self._states.append((source, source.read()))

    def forget_unused(self) -> None:
        """Leave alone from now on where nobody has drawn since."""
        self._states = list(filter(_is_used, self._states))

    def now(self) -> RandomStates:
        """The same sources as they are now."""
        return RandomStates(source for source, _ in self._states)

    def restore(self) -> None:
        """Nobody has drawn."""
        for source, state in self._states:
            source.write(state)


def _is_used(pair: tuple[Source, Any]) -> bool:
    source, state = pair
    return not source.is_same(state, source.read())


def source_of(value: object) -> Source | None:
    """The source that an object is; ``None``: it is none that we know."""
    if isinstance(value, torch.Generator):
        return _of_torch(value)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return Source(value.getstate, value.setstate, operator.eq)
    numpy_random = _numpy_random()
    if numpy_random is not None:
        if isinstance(value, numpy_random.Generator):
            value = value.bit_generator
        if isinstance(value, numpy_random.BitGenerator):
            bits: Any = value
            return Source(lambda: bits.state, lambda state: setattr(bits, "state", state), _is_same_state)
        if isinstance(value, numpy_random.RandomState):
            return Source(lambda: value.get_state(legacy=False), value.set_state, _is_same_state)
    return None


def shared_sources() -> list[Source]:
    """Those of Python and of NumPy that every module may ask."""
    sources = [Source(random.getstate, random.setstate, operator.eq)]
    numpy_random = _numpy_random()
    if numpy_random is not None:
        sources.append(Source(lambda: numpy_random.get_state(legacy=False), numpy_random.set_state, _is_same_state))
    return sources


def default_sources(devices: Iterable[torch.device]) -> list[Source]:
    """PyTorch's own, of the CPU and of these devices, which are those of tensors: they have a number."""
    generators = [torch.default_generator]
    for device in {device for device in devices if device.type not in ("cpu", "meta")}:
        known = getattr(torch.get_device_module(device), "default_generators", ())
        generators += known[device.index : device.index + 1]
    return [_of_torch(generator) for generator in generators]


def _of_torch(generator: torch.Generator) -> Source:
    return Source(generator.get_state, generator.set_state, torch.equal)


def _is_same_state(one: Any, other: Any) -> bool:
    """For those of NumPy: names, numbers and arrays in dictionaries."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same_state(item, other[key]) for key, item in one.items())
    return bool((one == other).all()) if hasattr(one, "all") else bool(one == other)


def _numpy_random() -> Any:
    """Asked for where it would be: who has not imported it has drawn nothing from it."""
    return sys.modules.get("numpy.random")
