"""Whether an optimizer may update a parameter in slices, found by trying: not one bit of the result may differ.

Elementwise by formula is not elementwise by bits: vectorised loops may round their last elements otherwise, and a slice
has other last elements. So the optimizer itself updates random numbers whole and sliced, on this machine, before a
parameter of the model is cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import optim
from torch.optim import Optimizer

from lightning_ssd.inner_step import InnerStep, State
from lightning_ssd.planning.subgroups import GRANULE

__all__ = ["may_slice"]

_ELEMENTWISE = (
    optim.Adam,
    optim.AdamW,
    optim.SGD,
    optim.RMSprop,
    optim.Adagrad,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.Adadelta,
    optim.ASGD,
    optim.Rprop,
)
"""Of exactly these classes, not of subclasses, every element of a parameter is updated by itself."""
_NUM_TRIED = 2 * GRANULE + 5
_NUM_TINY = 2_000
_TINY = 5
_NUM_STEPS = 3


def may_slice(inner: InnerStep, optimizer: Optimizer, group: int, parameter: torch.Tensor, state: State) -> bool:
    """Whether slices of such a parameter get the very bits that the whole one gets.

    Args:
        inner: calls the optimizer.
        optimizer: the user's; its groups and states stay as they are.
        group: number of the parameter's group.
        parameter: an example; gives dtype and device.
        state: what the optimizer already knows of it (Adagrad begins with some).
    """
    if type(optimizer) not in _ELEMENTWISE or not parameter.dtype.is_floating_point:
        return False
    generator = torch.Generator().manual_seed(0)

    def numbers() -> torch.Tensor:
        return torch.randn(_NUM_TRIED, generator=generator).to(parameter.device, parameter.dtype)

    whole = numbers()
    parts = [part.clone() for part in _cut(whole)]
    whole_states = [_example(state, parameter, _NUM_TRIED)]
    part_states = [_example(state, parameter, part.numel()) for part in parts]
    for _ in range(_NUM_STEPS):
        gradient = numbers()
        whole.grad = gradient.clone()
        for part, piece in zip(parts, _cut(gradient), strict=True):
            part.grad = piece.clone()
        whole_states = inner.run([whole], [group], whole_states)
        part_states = inner.run(parts, [group] * len(parts), part_states)
    return _equal(whole, parts) and all(
        _equal(value, [part_state[key] for part_state in part_states])
        for key, value in whole_states[0].items()
        if isinstance(value, torch.Tensor)
    )


def _cut(whole: torch.Tensor) -> Sequence[torch.Tensor]:
    """One granule, many tiny pieces (nothing but last elements), and the rest."""
    tiny = [_TINY] * (_NUM_TINY // _TINY)
    return torch.split(whole, [GRANULE, *tiny, _NUM_TRIED - GRANULE - sum(tiny)])


def _example(state: State, parameter: torch.Tensor, num_elements: int) -> State:
    """The state of a parameter as one of another size would have it."""
    return {key: _resized(value, parameter, num_elements) for key, value in state.items()}


def _resized(value: object, parameter: torch.Tensor, num_elements: int) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape == parameter.shape and value.numel() > 0 and value.dim() > 0:
        return value.flatten()[:1].expand(num_elements).clone()
    return value.clone()


def _equal(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> bool:
    if whole.numel() == 1 or whole.numel() != sum(part.numel() for part in parts):
        return all(torch.equal(whole, part) for part in parts)
    return torch.equal(whole.flatten(), torch.cat([part.flatten() for part in parts]))
