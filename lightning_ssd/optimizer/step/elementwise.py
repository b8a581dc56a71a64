"""Try an optimizer on random numbers to learn two facts about a kind of parameters, without touching the model.

May the optimizer update slices of a parameter? An elementwise formula does not give equal bits by itself: vectorised
loops may round the last elements in another way, and a slice has other last elements. And how large are its states?
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_ssd.common.dtensor import as_piece, is_shard, local_of
from lightning_ssd.optimizer.step.stepper import without_hooks
from lightning_ssd.optimizer.step.subgroups import GRANULE

__all__ = ["UpdateProbe", "rate_of_trial"]

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

    The trial steps an optimizer of its own, with the options of the user's.

    Args:
        optimizer: the user's optimizer; its groups and states do not change.
        kind: class whose code it runs, which is known to update every element by itself; ``None``: it runs another.
        has_master: returns whether the optimizer updates a float32 copy of a parameter.
    """

    def __init__(
        self, optimizer: Optimizer, *, kind: type[Optimizer] | None, has_master: Callable[[torch.Tensor], bool]
    ) -> None:
        self._optimizer = optimizer
        self._kind: Any = kind
        self._has_master = has_master
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
        return self._kind is not None and parameter.dtype.is_floating_point

    def _dtype_of(self, parameter: torch.Tensor) -> torch.dtype:
        return torch.float32 if self._has_master(parameter) else parameter.dtype

    def _try_size(self, parameter: torch.Tensor, group: int) -> int:
        dtype = self._dtype_of(parameter)
        copy_bytes = dtype.itemsize if self._has_master(parameter) else 0
        if not self._is_known(parameter) or parameter.layout != torch.strided:
            return _NUM_STATES * dtype.itemsize + copy_bytes
        # The state of a 0-dimensional parameter looks like a step count. So it has its own trial.
        shape = (_TINY,) if parameter.dim() > 0 else ()
        number = as_piece(torch.zeros(shape, dtype=dtype, device=parameter.device), parameter)
        number.grad = torch.zeros_like(number)
        optimizer = self._tried([number], group)
        without_hooks(self._kind.step)(optimizer)
        tensors = [value for value in optimizer.state[number].values() if isinstance(value, torch.Tensor)]
        return sum(value.dtype.itemsize for value in tensors if value.shape == number.shape) + copy_bytes

    def _try_slices(self, parameter: torch.Tensor, group: int) -> bool:
        generator = torch.Generator().manual_seed(0)

        def numbers() -> torch.Tensor:
            made = torch.randn(_NUM_TRIED, generator=generator, device="cpu")
            return made.to(parameter.device, self._dtype_of(parameter))

        def cut(whole: torch.Tensor) -> Sequence[torch.Tensor]:
            """Cut into one granule, many tiny pieces (which have last elements only), and the rest."""
            tiny = [_TINY] * (_NUM_TINY // _TINY)
            return torch.split(whole, [GRANULE, *tiny, _NUM_TRIED - GRANULE - sum(tiny)])

        start = numbers()
        whole = as_piece(start, parameter)
        parts = [as_piece(part.clone(), parameter) for part in cut(start)]
        together, apart = self._tried([whole], group), self._tried(parts, group)
        for _ in range(_NUM_STEPS):
            gradient = numbers()
            whole.grad = as_piece(gradient.clone(), parameter)
            for part, piece in zip(parts, cut(gradient), strict=True):
                part.grad = as_piece(piece.clone(), parameter)
            for optimizer in (together, apart):
                without_hooks(self._kind.step)(optimizer)
        return _equal(whole, parts) and all(
            _equal(value, [apart.state[part][key] for part in parts])
            for key, value in together.state[whole].items()
            if isinstance(value, torch.Tensor)
        )

    def _tried(self, tensors: Sequence[torch.Tensor], group: int) -> Optimizer:
        """Return an optimizer of tensors with the options of a group."""
        options = {key: value for key, value in self._optimizer.param_groups[group].items() if key != "param_names"}
        if "lr" in options:
            options["lr"] = rate_of_trial(options["lr"])
        made: Optimizer = self._kind([options | {"params": tensors}])
        return made


def rate_of_trial(rate: Any) -> Any:
    """Return a learning rate for a trial: a warm-up begins at 0, with which nothing would change."""
    if not isinstance(rate, int | float | torch.Tensor) or rate:
        return rate
    return torch.full_like(rate, _TRIED_RATE) if isinstance(rate, torch.Tensor) else _TRIED_RATE


def _equal(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> bool:
    whole, parts = local_of(whole), [local_of(part) for part in parts]
    if whole.numel() == 1 or whole.numel() != sum(part.numel() for part in parts):
        return all(torch.equal(whole, part) for part in parts)
    return torch.equal(whole.flatten(), torch.cat([part.flatten() for part in parts]))
