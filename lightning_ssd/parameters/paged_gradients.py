"""Gradients that wait in files from their accumulation to the update.

As soon as a gradient has been accumulated, its bytes go to memory that shows a file, and that memory becomes the
parameter's ``grad``. Its pages leave at once: to the system's page cache, which writes them to the drive where memory
is short or time has passed. Whoever asks for the gradient finds its bytes, and accumulating adds to them in place.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_ssd.common.formatting import format_sizes
from lightning_ssd.common.tensors import TensorSpec, holders
from lightning_ssd.errors import StorageError
from lightning_ssd.parameters.units import is_plain
from lightning_ssd.parameters.weight_files import MappedStorage, WeightFiles, is_mapped

__all__ = ["PagedGradients"]

_log = logging.getLogger(__name__)


class PagedGradients:
    """The gradients of one process that wait in files.

    Note [whose memory]: a gradient is exchanged only if nobody but its parameter has it: neither the tensor nor its
    memory. The memory of one step's gradient serves the next one's, unless somebody still has the old one.

    Args:
        files: where they wait.
        min_nbytes: smaller ones stay.
        waits: whether that of a parameter may wait, asked when its module is registered; ``None``: all may.
        before_first: called before the first one waits.
    """

    def __init__(
        self,
        files: WeightFiles,
        *,
        min_nbytes: int,
        waits: Callable[[torch.Tensor], bool] | None = None,
        before_first: Callable[[], object] = lambda: None,
    ) -> None:
        self._files = files
        self._waits = waits
        self._before_first = before_first
        self._min_nbytes = max(min_nbytes, 1)
        # By the number of the parameter. No reference to it: torch.utils.swap_tensors refuses even a weak one.
        self._hooks: dict[int, RemovableHandle] = {}
        self._memory: dict[int, MappedStorage] = {}
        self._retired: list[MappedStorage] = []
        """Memory that somebody else still had when its parameter needed some."""
        self._has_warned = self._is_closed = False
        self._pid = os.getpid()
        # Guards the exchange of memory against closing; again from a signal handler. A leaf lock but for the arenas'.
        self._lock = threading.RLock()

    def register_module(self, module: nn.Module) -> None:
        """From now on gradients of the parameters that are trained wait.

        Raises:
            OutOfSpaceError: the drives have no room for them.
        """
        _counts_of_one()  # learnt now, because it needs a backward of its own
        self._forget()
        trained = [p for p in module.parameters() if p.requires_grad and self._takes(p)]
        if self._waits is not None:
            trained = [parameter for parameter in trained if self._waits(parameter)]
        if trained:
            self._before_first()
        new = [p for p in trained if not self._has_hook(p)]
        self._files.check_room([parameter.nbytes for parameter in new], changes=True)
        for parameter in new:
            register: Callable[..., RemovableHandle] = parameter.register_post_accumulate_grad_hook
            self._hooks[id(parameter)] = register(self._accumulated)
        if nbytes := sum(parameter.nbytes for parameter in trained):
            _log.info(
                "each backward changes %s of gradients, which the system writes to the drive where memory is short",
                format_sizes(nbytes)[0],
            )

    def _has_hook(self, parameter: torch.Tensor) -> bool:
        handle = self._hooks.get(id(parameter))
        hooks = None if handle is None else handle.hooks_dict_ref()
        return hooks is not None and hooks is parameter._post_accumulate_grad_hooks

    def _takes(self, tensor: torch.Tensor) -> bool:
        return is_plain(tensor) and tensor.nbytes >= self._min_nbytes

    def _accumulated(self, parameter: torch.Tensor) -> None:
        """Autograd has made or changed a gradient."""
        gradient = parameter.grad
        if gradient is None or gradient.requires_grad or not self._takes(gradient) or os.getpid() != self._pid:
            return  # the last: the files are the parent's
        storage = gradient.untyped_storage()
        mapped = self._memory.get(id(parameter))
        if mapped is not None and mapped.key.cdata == storage._cdata:
            mapped.send_out()  # it was added to in place
            return
        is_whole = storage.nbytes() == gradient.nbytes and gradient.dtype == parameter.dtype
        is_own = not storage.is_shared() and (storage.resizable() or is_mapped(storage)) and holders(storage) == 1
        del gradient, storage  # or they would count
        if is_whole and is_own and _counts(parameter) == _counts_of_one():
            with self._lock:
                if not self._is_closed:
                    self._exchange(parameter)

    def _exchange(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        mapped = self._memory.get(id(parameter))
        try:
            if mapped is None or mapped.nbytes != gradient.nbytes or mapped.key.alive():
                if mapped is not None:
                    self._retired.append(mapped)
                    del self._memory[id(parameter)]
                mapped = self._files.map_new(gradient.nbytes)
        except (StorageError, MemoryError) as error:
            self._warn(error)
            return
        waiting = TensorSpec.of(gradient).view(mapped.show())
        self._memory[id(parameter)] = mapped
        waiting.copy_(gradient)
        parameter.grad = waiting
        mapped.send_out()

    def _warn(self, error: BaseException) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"a gradient has no place to wait in ({error}); it stays in memory, as do others like it, and results "
                "are not affected",
                stacklevel=3,
            )

    def _forget(self) -> None:
        """Give back the place of gradients that are gone."""
        with self._lock:
            for key, handle in list(self._hooks.items()):
                if handle.hooks_dict_ref() is None:
                    del self._hooks[key]
                    if key in self._memory:
                        self._retired.append(self._memory.pop(key))
            for mapped in [mapped for mapped in self._retired if not mapped.key.alive()]:
                self._retired.remove(mapped)
                mapped.forget()

    def updated(self, parameters: Iterable[torch.Tensor]) -> None:
        """An optimizer is done with the gradients of these parameters for now."""
        for parameter in parameters:
            mapped = self._memory.get(id(parameter))
            if mapped is not None:
                mapped.send_out()

    def send_out(self) -> None:
        """All leave memory that something has touched, such as clipping; what is gone is forgotten."""
        self._forget()
        for mapped in list(self._memory.values()):
            mapped.send_out()

    def close(self) -> None:
        """Later gradients stay in memory; those that there are stay what they are. Idempotent."""
        with self._lock:
            self._is_closed = True
        for handle in list(self._hooks.values()):
            handle.remove()
        self._hooks.clear()
        for mapped in (*self._memory.values(), *self._retired):
            mapped.make_private()
        self._memory.clear()
        self._retired.clear()


def _counts(parameter: torch.Tensor) -> tuple[int, int, int]:
    """Who refers to its gradient, in C++ and in Python, and to the memory of that."""
    gradient: Any = parameter.grad
    storage = gradient.untyped_storage()
    return gradient._use_count(), sys.getrefcount(gradient), sys.getrefcount(storage)


@functools.cache
def _counts_of_one() -> tuple[int, int, int]:
    """The same for a gradient that only its parameter has, just accumulated."""
    found: list[tuple[int, int, int]] = []
    with torch.enable_grad(), torch.inference_mode(False):
        parameter = torch.zeros(2, requires_grad=True)
        register: Callable[..., RemovableHandle] = parameter.register_post_accumulate_grad_hook
        register(lambda one: found.append(_counts(one)))
        torch.autograd.backward((parameter * torch.ones(2)).sum())
    return found[0]
