"""Where random numbers come from: read the state that a source is in, and put a source into a state.

PyTorch's checkpoint looks after PyTorch's default generators. A model may have generators of its own, and may ask
Python or NumPy.
"""

from __future__ import annotations

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


class RandomStates:
    """What random numbers will come next from some sources."""

    def __init__(self, sources: Iterable[Source] = ()) -> None:
        self._states = [(source, source.read()) for source in sources]

    def restore(self) -> None:
        """Put each source into its state."""
        for source, state in self._states:
            source.write(state)


def source_of(value: object) -> Source | None:
    """Return the source that an object is; ``None``: it is none that we know."""
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
    """Return those of Python and of NumPy that every module may ask."""
    sources = [Source(random.getstate, random.setstate)]
    numpy_random = _numpy_random()
    if numpy_random is not None:
        sources.append(Source(lambda: numpy_random.get_state(legacy=False), numpy_random.set_state))
    return sources


def default_sources(devices: Iterable[torch.device]) -> list[Source]:
    """Return PyTorch's own, of the CPU and of these devices, which are those of tensors: they have a number."""
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
