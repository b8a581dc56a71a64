"""What a call of an optimizer's ``step`` changes beside parameters, states and options: its own attributes, and which
random numbers come next.

A plain step is one call, ours are several. A count in an attribute is exact if every call begins with what was there
before the step and all end alike; random numbers come in another order, so that no more than one call may draw some.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.optim import Optimizer

from lightning_ssd.common.rng import RandomStates, Source, default_sources, shared_sources, source_of
from lightning_ssd.optimizer.step.attribute_snapshot import AttributeSnapshot
from lightning_ssd.optimizer.step.types import CoupledError

__all__ = ["StepEffects", "preserving_effects", "random_states"]

_NO_SOURCES = ("params", "param_groups", "state")
"""Where no generator of an optimizer's own is; to look there takes long where there are many groups."""


def random_states(optimizer: Optimizer, devices: Iterable[torch.device], *, shared: bool = True) -> RandomStates:
    """Of PyTorch's random numbers, Python's, NumPy's where it is in use, and an optimizer's own.

    Args:
        optimizer: whose attributes and options may have generators.
        devices: where its parameters are.
        shared: those of Python and NumPy, too.
    """
    return RandomStates([*default_sources(devices), *_sources(optimizer), *(shared_sources() if shared else ())])


def _sources(optimizer: Optimizer) -> Iterator[Source]:
    """Generators of an optimizer's own."""
    for owner in (vars(optimizer), *optimizer.param_groups):
        for name, value in owner.items():
            if name in _NO_SOURCES or isinstance(value, bool | int | float | str | None):
                continue
            items = value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else [value]
            yield from filter(None, map(source_of, items))


class StepEffects:
    """Those of the calls of one step.

    Args:
        optimizer: the user's.
        is_rehearsal: Python's and NumPy's shared random numbers count, too. In a step of the model's they do not: any
            thread may draw some at any time, and the optimizer would be blamed for it.
    """

    def __init__(self, optimizer: Optimizer, *, is_rehearsal: bool = False) -> None:
        self._optimizer = optimizer
        self._is_rehearsal = is_rehearsal
        self._before: AttributeSnapshot | None = None
        self._after: AttributeSnapshot | None = None
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
        before = self._before = self._before or AttributeSnapshot(self._optimizer)
        before.restore()
        numbers = random_states(self._optimizer, devices, shared=self._is_rehearsal)
        yield
        self._check_numbers(numbers.are_used())
        after = AttributeSnapshot(self._optimizer)
        if is_idle and self._after is not None and not before.changed(after):
            self._after.restore()
        else:
            self._check_attributes(after)

    def _check_numbers(self, has_drawn: bool) -> None:
        if has_drawn and self._has_drawn:
            raise CoupledError(
                "this optimizer draws random numbers in its step, and would draw others for each parameter than in a "
                "plain step, because parameters are updated in another order"
            )
        self._has_drawn = self._has_drawn or has_drawn

    def _check_attributes(self, after: AttributeSnapshot) -> None:
        self._after = self._after or after
        if names := self._after.changed(after):
            raise CoupledError(
                f"this optimizer changed its attributes {names} differently for different parameters: it couples them"
            )


@contextmanager
def preserving_effects(optimizer: Optimizer, devices: Iterable[torch.device]) -> Iterator[None]:
    """For calls that do not count: attributes and random numbers are put back."""
    attributes, numbers = AttributeSnapshot(optimizer), random_states(optimizer, devices)
    try:
        yield
    finally:
        numbers.restore()
        attributes.restore()
