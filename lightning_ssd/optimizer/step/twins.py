"""Copies of a parameter, its gradient and its state, on which an optimizer is tried before it gets the model's own."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_ssd.common.dtensor import is_shard, local_of
from lightning_ssd.common.tensors import PLAIN_TYPES, give_gradient
from lightning_ssd.optimizer.step.aliases import tensors_in
from lightning_ssd.optimizer.step.copies import copied
from lightning_ssd.optimizer.step.stepper import own_copy
from lightning_ssd.optimizer.step.types import State

__all__ = ["Sample", "differ", "has_twins", "introduced", "is_equal"]

_MAX_DEPTH = 8
_MAX_NUMEL = 1 << 20
"""Of more elements than these the first ones of each dimension are tried: memory must not be short of copies."""


def has_twins(tensor: torch.Tensor) -> bool:
    """Whether a copy is one: what keeps its data in its own way may share them."""
    return type(tensor) in PLAIN_TYPES or is_shard(tensor)


class Sample:
    """A parameter of which copies are made, with its state.

    Args:
        tensor: the parameter with its ``grad``; nothing is changed.
        state: what the optimizer remembers of it; ``None``: nothing.
        is_blank: copies are of ones instead, so that a parameter that waits elsewhere need not come.
        owner: the parameter, where the tensor is a copy of it.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        state: State | None = None,
        *,
        is_blank: bool = False,
        owner: torch.Tensor | None = None,
    ) -> None:
        self._tensor = tensor
        self.owner = tensor if owner is None else owner
        self._is_blank = is_blank
        self._crop = _crop_of(tensor)
        self._state = state or None
        if self._crop and any(t.numel() > 1 and t.shape != tensor.shape for t in tensors_in(state)):
            self._state = None  # nobody knows what of it belongs to the first elements

    @property
    def tensor(self) -> torch.Tensor:
        """The parameter itself."""
        return self._tensor

    def gradient(self, *, is_other: bool = False) -> torch.Tensor | None:
        """A copy of the gradient, or another one."""
        if self._tensor.grad is None:
            return None
        gradient = self._cropped(self._tensor.grad.detach())
        if not is_other or not gradient.is_floating_point():
            return gradient.clone()
        other = gradient * -2
        return other.add_(1) if other.layout == torch.strided else other  # a gradient may be zero

    def twin(self, *, is_other: bool = False) -> torch.Tensor:
        """A copy, or one with another gradient."""
        data = self._cropped(self._blank() if self._is_blank else self._tensor.detach()).clone()
        twin = torch.nn.Parameter(data, requires_grad=self._tensor.requires_grad)
        # Optimizers may be told by marks on a parameter what to do with it, or keep a gradient there.
        vars(twin).update({name: self._own(value) for name, value in vars(self._tensor).items()})
        gradient = self.gradient(is_other=is_other)
        if gradient is not None:
            give_gradient(twin, gradient)
        return twin

    def state_for(self, twin: torch.Tensor) -> State | None:
        """A copy of the state: what are one object in it are one in the copy."""
        if self._state is None:
            return None
        memo: dict[int, Any] = {id(t): self._own(t.detach()) for t in tensors_in(self._state)}
        memo[id(self._tensor)] = twin
        for value in self._state.values():
            if isinstance(value, torch.Tensor):
                memo.setdefault(id(value), copied(value, memo))
        try:
            return copy.deepcopy(self._state, memo)
        except Exception:  # whatever an object of the user's raises that refuses to be copied
            return None  # the trial is then one of a first step

    def _blank(self) -> torch.Tensor:
        tensor = self._tensor.detach()
        if is_shard(tensor) or tensor.layout != torch.strided:
            return torch.ones_like(tensor)
        return torch.ones((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)

    def _own(self, value: Any) -> Any:
        is_like = isinstance(value, torch.Tensor) and value.shape == self._tensor.shape
        return own_copy(self._cropped(value) if is_like else value)

    def _cropped(self, value: torch.Tensor) -> torch.Tensor:
        return value[self._crop] if self._crop and value.layout == torch.strided else value


def _crop_of(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Which elements of each dimension to take; none: all of them."""
    gradient = tensor.grad
    is_dense = tensor.layout == torch.strided and (gradient is None or gradient.layout == torch.strided)
    if is_shard(tensor) or not is_dense or tensor.numel() <= _MAX_NUMEL:
        return ()
    sizes = list(tensor.shape)
    while torch.Size(sizes).numel() > _MAX_NUMEL:
        largest = sizes.index(max(sizes))
        sizes[largest] = -(-sizes[largest] // 2)
    return tuple(slice(0, size) for size in sizes)


@contextlib.contextmanager
def introduced(optimizer: Optimizer, tensor: torch.Tensor, twins: Sequence[torch.Tensor]) -> Iterator[None]:
    """Where the optimizer has something in a dictionary by parameter, the copies are found there, too.

    Of them nothing remains there, nor of what was put there for them meanwhile.
    """
    keys: tuple[Callable[[Any], Any], ...] = (lambda t: t, id)
    pairs = [
        (value, key)
        for value in vars(optimizer).values()
        for key in keys
        if isinstance(value, MutableMapping) and value is not optimizer.state and _has_key(value, key(tensor))
    ]
    news = [(place, key(twin), own_copy(place[key(tensor)])) for place, key in pairs for twin in twins]
    try:
        for place, key, value in news:
            place[key] = value
        yield
    finally:
        for place, key, _ in news:
            place.pop(key, None)
        for place in vars(optimizer).values():
            if isinstance(place, MutableMapping) and place is not optimizer.state:
                for key in [key for key in place if any(key is twin for twin in twins)]:
                    del place[key]


def _has_key(mapping: MutableMapping[Any, Any], key: Any) -> bool:
    """Not ``in``, which would compare tensors by their elements."""
    if isinstance(key, torch.Tensor):
        return any(other is key for other in mapping)
    return any(type(other) is int and other == key for other in mapping)


def differ(one: Any, other: Any) -> bool:
    """Whether tensors or numbers in one are not those in the other."""
    ones, others = list(tensors_in(one)), list(tensors_in(other))
    if len(ones) != len(others) or not all(map(is_equal, ones, others)):
        return True
    # By their text not a number is as good as itself.
    return list(map(repr, _numbers_in(one))) != list(map(repr, _numbers_in(other)))


def _numbers_in(value: Any, depth: int = 0) -> Iterator[complex]:
    if isinstance(value, int | float | complex):
        yield value
    elif depth < _MAX_DEPTH and isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers_in(item, depth + 1)


def is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two have the same elements, as far as these can be compared."""
    one, other = local_of(one), local_of(other)
    if one.layout != torch.strided or other.layout != torch.strided or one.device.type == "meta":
        return True
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())
