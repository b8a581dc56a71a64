"""Gradients that wait in files from their accumulation to the update.

As soon as a gradient has been accumulated, its bytes go to memory that shows a file, and that memory becomes the
parameter's ``grad``. Its pages leave at once: to the system's page cache, which writes them to the drive where memory
is short or time has passed. Whoever asks for the gradient finds its bytes, and accumulating adds to them in place.
"""

from __future__ import annotations

import logging
import os
import warnings
import weakref
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_ssd.common.formatting import format_sizes
from lightning_ssd.common.tensors import PLAIN_TYPES, TensorSpec, holders
from lightning_ssd.errors import StorageError
from lightning_ssd.parameters.weight_files import MappedStorage, WeightFiles

__all__ = ["PagedGradients"]

_log = logging.getLogger(__name__)


class PagedGradients:
    """The gradients of one process that wait in files.

    Note [whose memory]: the memory of one step's gradient serves the next one's. Where somebody still holds the old
    gradient, the new one gets memory of its own.

    Args:
        files: where they wait.
        min_nbytes: smaller ones stay.
    """

    def __init__(self, files: WeightFiles, *, min_nbytes: int) -> None:
        self._files = files
        self._min_nbytes = max(min_nbytes, 1)
        self._hooks: dict[int, tuple[weakref.ref[nn.Parameter], RemovableHandle]] = {}
        self._memory: dict[int, tuple[MappedStorage, torch.UntypedStorage]] = {}
        self._retired: list[MappedStorage] = []
        """Memory that somebody else still had when its parameter needed some."""
        self._has_warned = self._is_closed = False
        self._pid = os.getpid()

    def register_module(self, module: nn.Module) -> None:
        """From now on gradients of the parameters that are trained wait.

        Raises:
            OutOfSpaceError: the drives have no room for them.
        """
        self._forget()
        trained = [p for p in module.parameters() if p.requires_grad and self._takes(p)]
        new = [p for p in trained if (known := self._hooks.get(id(p))) is None or known[0]() is not p]
        self._files.check_room([parameter.nbytes for parameter in new])
        for parameter in new:
            register: Callable[..., RemovableHandle] = parameter.register_post_accumulate_grad_hook
            self._hooks[id(parameter)] = weakref.ref(parameter), register(self._accumulated)
        if nbytes := sum(parameter.nbytes for parameter in trained):
            _log.info(
                "each backward changes %s of gradients, which the system writes to the drive where memory is short",
                format_sizes(nbytes)[0],
            )

    def _takes(self, tensor: torch.Tensor) -> bool:
        return (
            type(tensor) in PLAIN_TYPES
            and tensor.layout is torch.strided
            and tensor.device.type == "cpu"
            and tensor.nbytes >= self._min_nbytes
        )

    def _accumulated(self, parameter: torch.Tensor) -> None:
        """Autograd has made or changed a gradient."""
        gradient = parameter.grad
        if gradient is None or gradient.requires_grad or not self._takes(gradient):
            return
        if self._is_closed or os.getpid() != self._pid:  # the files are the parent's
            return
        storage = gradient.untyped_storage()
        mapped, memory = self._memory.get(id(parameter), (None, None))
        if mapped is not None and memory is not None and storage._cdata == memory._cdata:
            mapped.send_out()  # it was added to in place
            return
        if holders(storage) != 1 or storage.nbytes() != gradient.nbytes or gradient.storage_offset():
            return  # somebody else looks at it, or at memory beside it
        if mapped is None or memory is None or memory.nbytes() != storage.nbytes() or holders(memory):
            if mapped is not None:
                self._retired.append(mapped)
                del self._memory[id(parameter)]
            try:
                mapped, memory = self._new(storage.nbytes())
            except (StorageError, MemoryError) as error:
                self._warn(error)
                return
            self._memory[id(parameter)] = mapped, memory
        waiting = TensorSpec.of(gradient).view(memory)
        waiting.copy_(gradient)
        del storage
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
        for key, (reference, _) in list(self._hooks.items()):
            if reference() is None:
                del self._hooks[key]
                if key in self._memory:
                    self._retired.append(self._memory.pop(key)[0])
        for mapped in [mapped for mapped in self._retired if not mapped.key.alive()]:
            self._retired.remove(mapped)
            mapped.forget()

    def _new(self, nbytes: int) -> tuple[MappedStorage, torch.UntypedStorage]:
        mapped = self._files.map_new(nbytes)
        memory, mapped.storage = mapped.storage, None
        assert memory is not None
        return mapped, memory

    def updated(self, parameters: Iterable[torch.Tensor]) -> None:
        """An optimizer is done with the gradients of these parameters for now."""
        for parameter in parameters:
            mapped, memory = self._memory.get(id(parameter), (None, None))
            gradient = parameter.grad
            if mapped is None or memory is None or gradient is None or gradient.layout is not torch.strided:
                continue
            if gradient.untyped_storage()._cdata == memory._cdata:
                mapped.send_out()

    def send_out(self) -> None:
        """All leave memory that something has touched, such as clipping; what is gone is forgotten."""
        self._forget()
        for mapped, _ in list(self._memory.values()):
            mapped.send_out()

    def close(self) -> None:
        """Later gradients stay in memory; those that there are stay what they are. Idempotent."""
        self._is_closed = True
        for _, handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        for mapped in (*(mapped for mapped, _ in self._memory.values()), *self._retired):
            mapped.make_private()
        self._memory.clear()
        self._retired.clear()
