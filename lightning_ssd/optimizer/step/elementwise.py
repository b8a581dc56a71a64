"""Try an optimizer on random numbers to learn two facts about a kind of parameters, without touching the model.

May the optimizer update slices of a parameter? An elementwise formula does not give equal bits by itself: vectorised
loops may round the last elements in another way, and a slice has other last elements. And how large are its states?
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_ssd.common.dtensor import as_piece, is_shard, local_of
from lightning_ssd.common.tensors import PLAIN_TYPES
from lightning_ssd.optimizer.step.copies import copied
from lightning_ssd.optimizer.step.stepper import SubgroupStepper, with_attributes
from lightning_ssd.optimizer.step.subgroups import GRANULE
from lightning_ssd.optimizer.step.types import State

__all__ = ["UpdateProbe"]

_NUM_STATES = 2
"""Assumed number of state tensors of the parameter's size, for optimizers that are not known to be elementwise."""
_SLICED = (torch.float32, torch.float64)
"""Types in which a CPU's loops round the last elements like all others, with any options. In half precision it depends
on options (a decay, a rate that is no power of two), which may change after the trial."""
_NUM_TRIED = 2 * GRANULE + 5
_NUM_TINY = 2_000
_TINY = 5
_NUM_STEPS = 3
_TRIED_RATE = 1e-3


class UpdateProbe:
    """Runs one trial per group, type, device and kind of kernels; later parameters of this kind get the same answer.

    Args:
        inner: calls the optimizer.
        optimizer: the user's optimizer; its groups and states do not change.
        is_elementwise: whether the optimizer is known to update every element by itself.
        has_master: returns whether the optimizer updates a float32 copy of a parameter.
        state_of: returns the state of a parameter.
    """

    def __init__(
        self,
        inner: SubgroupStepper,
        optimizer: Optimizer,
        *,
        is_elementwise: bool,
        has_master: Callable[[torch.Tensor], bool],
        state_of: Callable[[torch.Tensor], State],
    ) -> None:
        self._inner = inner
        self._optimizer = optimizer
        self._is_elementwise = is_elementwise
        self._has_master, self._state_of = has_master, state_of
        self._found: dict[tuple[Any, ...], int] = {}

    def may_slice(self, parameter: torch.Tensor, group: int) -> bool:
        """Return whether slices of such a parameter get the same bits as the whole one, also if options change later.

        A change of the option ``fused`` is an exception: it needs a new answer.
        """
        part = local_of(parameter)
        if part.layout != torch.strided or not part.is_contiguous() or not self._is_known(parameter):
            return False
        if self._dtype_of(parameter) not in _SLICED or (self._is_fused(group) and parameter.device.type == "cpu"):
            return False
        return bool(self._once(UpdateProbe._try_slices, parameter, group))

    def element_bytes(self, parameter: torch.Tensor, group: int) -> int:
        """Return the bytes of states per element of the parameter, with its float32 copy."""
        return self._once(UpdateProbe._try_size, parameter, group)

    def _once(self, trial: Callable[[UpdateProbe, torch.Tensor, int], int], parameter: torch.Tensor, group: int) -> int:
        kind = group, self._is_fused(group), parameter.dtype, parameter.device, is_shard(parameter)
        key = trial, parameter.dim() == 0, *kind
        if key not in self._found:
            self._found[key] = trial(self, parameter, group)
        return self._found[key]

    def _is_fused(self, group: int) -> bool:
        return bool(self._optimizer.param_groups[group].get("fused"))

    def _is_known(self, parameter: torch.Tensor) -> bool:
        return self._is_elementwise and parameter.dtype.is_floating_point

    def _dtype_of(self, parameter: torch.Tensor) -> torch.dtype:
        return torch.float32 if self._has_master(parameter) else parameter.dtype

    def _try_size(self, parameter: torch.Tensor, group: int) -> int:
        dtype = self._dtype_of(parameter)
        copy_bytes = dtype.itemsize if self._has_master(parameter) else 0
        if not self._is_known(parameter) or parameter.layout != torch.strided:
            return _NUM_STATES * dtype.itemsize + copy_bytes
        # The state of a 0-dimensional parameter looks like a step count and cannot be resized. So it has its own trial.
        shape = (_TINY,) if parameter.dim() > 0 else ()
        number = as_piece(torch.zeros(shape, dtype=dtype, device=parameter.device), parameter)
        number.grad = torch.zeros_like(number)
        state = self._step([number], group, [self._example(parameter, _TINY)])[0]
        sizes: list[int] = [value.dtype.itemsize for value in state.values() if _is_like(value, number)]
        return sum(sizes) + copy_bytes

    def _try_slices(self, parameter: torch.Tensor, group: int) -> bool:
        generator = torch.Generator().manual_seed(0)

        def numbers() -> torch.Tensor:
            made = torch.randn(_NUM_TRIED, generator=generator, device="cpu")
            return made.to(parameter.device, self._dtype_of(parameter))

        start = numbers()
        whole = as_piece(start, parameter)
        parts = [as_piece(part.clone(), parameter) for part in _cut(start)]
        whole_states = [self._example(parameter, _NUM_TRIED)]
        part_states = [self._example(parameter, part.numel()) for part in parts]
        for _ in range(_NUM_STEPS):
            gradient = numbers()
            whole.grad = as_piece(gradient.clone(), parameter)
            for part, piece in zip(parts, _cut(gradient), strict=True):
                part.grad = as_piece(piece.clone(), parameter)
            whole_states = self._step([whole], group, whole_states)
            part_states = self._step(parts, group, part_states)
        return _equal(whole, parts) and all(
            _equal(value, [state[key] for state in part_states])
            for key, value in whole_states[0].items()
            if isinstance(value, torch.Tensor)
        )

    def _step(self, tensors: Sequence[torch.Tensor], group: int, states: Sequence[State]) -> list[State]:
        """Step tensors with the options of a group, and without what ``GradScaler`` sets; return their states."""
        options = self._optimizer.param_groups[group] | {"params": tensors}
        rate = options.get("lr")
        if isinstance(rate, int | float | torch.Tensor) and not rate:  # a warm-up begins so, and nothing would change
            options["lr"] = torch.full_like(rate, _TRIED_RATE) if isinstance(rate, torch.Tensor) else _TRIED_RATE
        held = defaultdict[Any, State](dict, zip(tensors, states, strict=True))
        with_attributes(
            self._optimizer,
            {"grad_scale": None, "found_inf": None},
            lambda: self._inner.lend([options], held, self._inner.call),
        )
        return [held[tensor] for tensor in tensors]

    def _example(self, parameter: torch.Tensor, num_elements: int) -> State:
        """Return the parameter's present state (Adagrad's constructor makes some), resized for a trial."""
        dtype, state = self._dtype_of(parameter), self._state_of(parameter)
        return {key: _resized(value, parameter, num_elements, dtype) for key, value in state.items()}


def _is_like(value: object, number: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == number.shape


def _cut(whole: torch.Tensor) -> Sequence[torch.Tensor]:
    """Cut a tensor into one granule, many tiny pieces (which have last elements only), and the rest."""
    tiny = [_TINY] * (_NUM_TINY // _TINY)
    return torch.split(whole, [GRANULE, *tiny, _NUM_TRIED - GRANULE - sum(tiny)])


def _resized(value: object, parameter: torch.Tensor, num_elements: int, dtype: torch.dtype) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape == parameter.shape and value.dim() > 0 and type(local := local_of(value)) in PLAIN_TYPES:
        first = local.flatten()[:1] if local.numel() > 0 else local.new_zeros(1)
        resized = first.expand(num_elements).clone()
        return as_piece(resized.to(dtype) if value.dtype == parameter.dtype else resized, parameter)
    return copied(value, {})


def _equal(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> bool:
    whole, parts = local_of(whole), [local_of(part) for part in parts]
    if whole.numel() == 1 or whole.numel() != sum(part.numel() for part in parts):
        return all(torch.equal(whole, part) for part in parts)
    return torch.equal(whole.flatten(), torch.cat([part.flatten() for part in parts]))
