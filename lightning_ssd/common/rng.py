"""Read and restore the states of the random number generators that a process has."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["random_states"]


def random_states(devices: Iterable[torch.device] | None = None) -> Callable[[], None]:
    """Read the states of the global generators of Python and NumPy; return a function that restores them.

    Args:
        devices: with indices, as those of tensors. For these and the CPU, PyTorch's default generators are read, too.
    """
    numpy: Any = sys.modules.get("numpy.random")  # a program that has not imported it has drawn nothing from it
    generators = [] if devices is None else [torch.default_generator]
    for device in {device for device in devices or () if device.type not in ("cpu", "meta")}:
        known = getattr(torch.get_device_module(device), "default_generators", ())
        generators += known[device.index : device.index + 1]
    states: list[tuple[Callable[[Any], object], Any]] = [(random.setstate, random.getstate())]
    states += [] if numpy is None else [(numpy.set_state, numpy.get_state(legacy=False))]
    states += [(generator.set_state, generator.get_state()) for generator in generators]

    def restore() -> None:
        for write, state in states:
            write(state)

    return restore
