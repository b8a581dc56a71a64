"""Read and restore the states of random number generators.

PyTorch's checkpoint handles PyTorch's default generators. A model may also have generators of its own, or draw from
those of Python and NumPy.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

__all__ = ["RandomStates", "Source", "default_sources", "shared_sources", "source_of"]


class Source(NamedTuple):
    """One generator of random numbers."""

    read: Callable[[], Any]
    """Returns a copy of the present state."""
    write: Callable[[Any], object]
    """Sets the state to such a copy."""


class RandomStates:
    """States of several sources at one time."""

    def __init__(self, sources: Iterable[Source] = ()) -> None:
        self._states = [(source, source.read()) for source in sources]

    def restore(self) -> None:
        """Set each source to its state here."""
        for source, state in self._states:
            source.write(state)


def source_of(value: object) -> Source | None:
    """Return the source for a generator object; ``None``: ``value`` is of no known kind of generator."""
    if isinstance(value, torch.Generator):
        return _of_torch(value)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return Source(value.getstate, value.setstate)
    numpy_random = _numpy_random()
    if numpy_random is not None:
        if isinstance(value, numpy_random.Generator):
            value = value.bit_generator
        if isinstance(value, numpy_random.BitGenerator):
            bits: Any = value
            return Source(lambda: bits.state, lambda state: setattr(bits, "state", state))
        if isinstance(value, numpy_random.RandomState):
            return Source(lambda: value.get_state(legacy=False), value.set_state)
    return None


def shared_sources() -> list[Source]:
    """Return the global generators of Python and NumPy."""
    sources = [Source(random.getstate, random.setstate)]
    numpy_random = _numpy_random()
    if numpy_random is not None:
        sources.append(Source(lambda: numpy_random.get_state(legacy=False), numpy_random.set_state))
    return sources


def default_sources(devices: Iterable[torch.device]) -> list[Source]:
    """Return PyTorch's default generators of the CPU and of ``devices``, which have indices, as tensors' devices do."""
    generators = [torch.default_generator]
    for device in {device for device in devices if device.type not in ("cpu", "meta")}:
        known = getattr(torch.get_device_module(device), "default_generators", ())
        generators += known[device.index : device.index + 1]
    return [_of_torch(generator) for generator in generators]


def _of_torch(generator: torch.Generator) -> Source:
    return Source(generator.get_state, generator.set_state)


def _numpy_random() -> Any:
    """Asked for where it would be: who has not imported it has drawn nothing from it."""
    return sys.modules.get("numpy.random")
