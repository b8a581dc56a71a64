"""What a call of an optimizer's ``step`` changes beside parameters, states and options: its own attributes, and which
random numbers come next.

A plain step is one call, ours are several. A count in an attribute is exact if every call begins with what was there
before the step and all end alike; random numbers come in another order, so that no more than one call may draw some.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.optim import Optimizer

from lightning_ssd.errors import ConfigError
from lightning_ssd.own_attributes import INCOMPLETE, Attributes

__all__ = ["Byproducts", "RandomStates", "untouched"]


class RandomStates:
    """What random numbers will come next: PyTorch's, Python's, NumPy's where it is in use, and an optimizer's own.

    Args:
        optimizer: whose attributes and options may have generators.
        devices: where its parameters are.
    """

    def __init__(self, optimizer: Optimizer, devices: Iterable[torch.device]) -> None:
        self._cpu = torch.get_rng_state()
        self._python = random.getstate()
        numpy = sys.modules.get("numpy.random")
        self._numpy = None if numpy is None else numpy.get_state(legacy=False)
        self._devices = {device: torch.cuda.get_rng_state(device) for device in set(devices) if device.type == "cuda"}
        self._generators = {generator: generator.get_state() for generator in _generators(optimizer)}

    def is_like(self, later: RandomStates) -> bool:
        """Whether nobody has drawn in between."""
        return (
            torch.equal(self._cpu, later._cpu)
            and self._python == later._python
            and pickle.dumps(self._numpy) == pickle.dumps(later._numpy)
            and all(torch.equal(state, later._devices[device]) for device, state in self._devices.items())
            and all(torch.equal(state, generator.get_state()) for generator, state in self._generators.items())
        )

    def restore(self) -> None:
        """Nobody has drawn."""
        torch.set_rng_state(self._cpu)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy.random"].set_state(self._numpy)
        for device, state in self._devices.items():
            torch.cuda.set_rng_state(state, device)
        for generator, state in self._generators.items():
            generator.set_state(state)


def _generators(optimizer: Optimizer) -> Iterator[torch.Generator]:
    for owner in (vars(optimizer), *optimizer.param_groups):
        for value in owner.values():
            items = value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else [value]
            yield from (item for item in items if isinstance(item, torch.Generator))


class Byproducts:
    """Those of the calls of one step.

    Args:
        optimizer: the user's.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._before: Attributes | None = None
        self._after: Attributes | None = None
        self._has_drawn = False

    @contextmanager
    def noted(self, devices: Iterable[torch.device], *, is_idle: bool) -> Iterator[None]:
        """Around one call. After the last one attributes are what a plain step would have left.

        Args:
            devices: of the tensors that are updated.
            is_idle: none of these has a gradient: the call may change nothing where others do.

        Raises:
            ConfigError: it is not what earlier calls did: the optimizer couples its parameters.
        """
        devices = tuple(devices)
        before = self._before = self._before or Attributes(self._optimizer)
        before.restore()
        numbers = RandomStates(self._optimizer, devices)
        yield
        self._check_numbers(not numbers.is_like(RandomStates(self._optimizer, devices)))
        after = Attributes(self._optimizer)
        if is_idle and self._after is not None and not before.changed(after):
            self._after.restore()
        else:
            self._check_attributes(after)

    def _check_numbers(self, has_drawn: bool) -> None:
        if has_drawn and self._has_drawn:
            raise ConfigError(
                "this optimizer draws random numbers in its step, and would draw others for each parameter than in a "
                f"plain step, because parameters are updated in another order. {INCOMPLETE}"
            )
        self._has_drawn = self._has_drawn or has_drawn

    def _check_attributes(self, after: Attributes) -> None:
        self._after = self._after or after
        if names := self._after.changed(after):
            raise ConfigError(
                f"this optimizer changed its attributes {names} differently for different parameters: it couples them. "
                f"{INCOMPLETE}"
            )


@contextmanager
def untouched(optimizer: Optimizer, devices: Iterable[torch.device]) -> Iterator[None]:
    """For calls that do not count: attributes and random numbers are put back."""
    attributes, numbers = Attributes(optimizer), RandomStates(optimizer, devices)
    try:
        yield
    finally:
        numbers.restore()
        attributes.restore()
