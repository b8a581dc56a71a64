"""Repeats one call of a module at once, and compares: the proof that it can be recomputed.

A search for what a forward might change cannot find everything (clocks, files, generators of other libraries, kernels
that round otherwise each time). Here the second run has to save and to return the very bits of the first one. A call
whose third run differs is not caught. While it lasts, what one call has saved stays in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_ssd.generators import default_sources
from lightning_ssd.tensors import PLAIN_TYPES

__all__ = ["Trial"]

_top_hooks: Callable[[bool], tuple[Any, Any] | None] = torch._C._autograd._top_saved_tensors_default_hooks
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Trial:
    """One call and its repetition.

    Args:
        module: that is called.
        tensors: its inputs.
        around: entered while the call is repeated, as that is no part of the pass.
    """

    def __init__(
        self, module: nn.Module, tensors: Sequence[torch.Tensor], around: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.reason: str | None = None
        """Why the call cannot be recomputed; ``None``: it can."""
        self._module = module
        self._tensors = tensors
        self._around = around
        self._saved: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._remembered: set[int] = set()

    def run(self, first: Callable[[], Any], again: Callable[[], Any], why_not: Callable[[], str | None]) -> Any:
        """What ``first`` returns.

        Args:
            first: the call, whose errors are raised.
            again: repeats it, but for PyTorch's own random numbers.
            why_not: asked after the first run: why there is no point in a second one.
        """
        devices = {tensor.device for tensor in (*self._module.parameters(), *self._tensors)}
        sources = default_sources(devices)
        before = [source.read() for source in sources]
        hooks = _top_hooks(True)
        if hooks is None:
            result = first()
        else:
            self._find_remembered()
            with saved_tensors_hooks(self._recording(hooks[0]), hooks[1]):
                result = first()
        self.reason = why_not()
        after = [source.read() for source in sources]
        try:
            if self.reason is None:
                with self._around():
                    for source, state in zip(sources, before, strict=True):
                        source.write(state)
                    self._repeat(again, result, compares=hooks is not None)
        finally:
            for source, state in zip(sources, after, strict=True):
                source.write(state)
            # The graph may have taken our hook along.
            self._tensors = ()
            self._saved.clear()
            self._versions.clear()
        return result

    def _find_remembered(self) -> None:
        """Batch norms update their statistics in the operation that saves them, without raising a version."""
        self._remembered = {buffer.data_ptr() for buffer in self._module.buffers() if type(buffer) in PLAIN_TYPES}

    def _recording(self, pack: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        def record(tensor: torch.Tensor) -> Any:
            self._saved.append(tensor.detach())
            is_remembered = type(tensor) in PLAIN_TYPES and tensor.data_ptr() in self._remembered
            self._versions.append(-1 if is_remembered else _version(tensor))
            return pack(tensor)

        return record

    def _repeat(self, again: Callable[[], Any], result: Any, *, compares: bool) -> None:
        num_saved = 0

        def compare(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal num_saved
            index, num_saved = num_saved, num_saved + 1
            if index >= len(self._saved):
                return tensor.detach()
            saved = self._saved[index]
            # Backward would refuse what was edited since it was saved; its bits say nothing.
            if self._versions[index] == _version(saved) and not _is_same(tensor, saved):
                self.reason = _DIFFERS
            return saved  # lives anyway: so the repetition needs no memory of its own

        try:
            with saved_tensors_hooks(compare, lambda tensor: tensor):
                repeated = again()
        except Exception as error:
            self.reason = f"when it ran again it raised {type(error).__name__}: {error}"
            return
        if (compares and num_saved != len(self._saved)) or not _is_same(repeated, result):
            self.reason = _DIFFERS


_DIFFERS = "run again from the same inputs it computed other bits"


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_same(one: Any, other: Any) -> bool:
    """Equal bit for bit. Of what is neither tensor nor number nor container, only the type is compared."""
    if type(one) is not type(other) and not isinstance(one, torch.Tensor):
        return False
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and _is_same_tensor(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(item, other[key]) for key, item in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, bool | int | float | complex | str | bytes):
        return bool(one == other or (one != one and other != other))
    return True


@torch.no_grad()
def _is_same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    if type(one) not in PLAIN_TYPES or one.layout is not torch.strided or one.is_quantized or one.is_nested:
        return True  # has no bits that could be looked at in one way
    if one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
        return True
    for dimension, strides in enumerate(zip(one.stride(), other.stride(), strict=True)):
        if strides == (0, 0) and one.shape[dimension] > 1:  # the same memory again and again
            one, other = one.narrow(dimension, 0, 1), other.narrow(dimension, 0, 1)
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers, so that NaN equals itself and 0.0 is not -0.0; without a copy."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])
