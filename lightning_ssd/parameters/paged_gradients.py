"""Gradients that wait in files from their accumulation to the update.

As soon as a gradient has been accumulated, its bytes go to a file, and memory that shows it becomes the parameter's
``grad``. They are in the system's page cache then, which writes them to the drive where memory is short or time has
passed. A use of the gradient finds its bytes, and accumulating adds to them in place.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_ssd.common.dtensor import is_shard, local_of
from lightning_ssd.common.forks import OwnProcess
from lightning_ssd.common.formatting import format_sizes
from lightning_ssd.common.method_patch import MethodPatch
from lightning_ssd.common.tensors import Region, TensorSpec, holders
from lightning_ssd.errors import StorageError
from lightning_ssd.memory.freed_memory import FreedMemory
from lightning_ssd.memory.mmap import VECTOR_BYTES
from lightning_ssd.parameters.files.mapped_storage import MappedStorage, is_mapped
from lightning_ssd.parameters.files.weight_files import WeightFiles
from lightning_ssd.parameters.parameter_hooks import ParameterHooks
from lightning_ssd.parameters.units import is_plain, sharded_by_name

__all__ = ["PagedGradients"]

_log = logging.getLogger(__name__)


class PagedGradients:
    """The gradients of one process that wait in files.

    Note [whose memory]: a gradient is exchanged only if its parameter alone has it: neither the tensor nor its
    memory. The memory of one step's gradient serves the next one's, unless the program still has the old one.

    Args:
        files: where they wait.
        min_nbytes: smaller ones stay.
        waits: whether that of a parameter may wait, asked when its module is registered; ``None``: all may.
        freed: told, before any waits, how much will.
    """

    def __init__(
        self,
        files: WeightFiles,
        *,
        min_nbytes: int,
        waits: Callable[[torch.Tensor], bool] | None = None,
        freed: FreedMemory | None = None,
    ) -> None:
        self._files = files
        self._waits = waits or (lambda parameter: True)
        self._freed = freed
        self._min_nbytes = max(min_nbytes, 1)
        self._hooks: dict[int, ParameterHooks] = {}
        """By the number of the parameter."""
        self._reductions: list[_Reduction] = []
        self._staying: set[int] = set()
        """The sharded parameters whose gradients are to stay, by number."""
        self._memory: dict[int, MappedStorage] = {}
        self._retired: list[MappedStorage] = []
        """Memory that the program still had when its parameter needed some."""
        self._has_warned = self._is_closed = False
        self._process = OwnProcess()
        # Guards the exchange of memory against closing; again from a signal handler. A leaf lock but for the arenas'.
        self._lock = threading.RLock()

    def register_module(self, module: nn.Module) -> None:
        """From now on gradients of the parameters that are trained wait, as far as they may, and no others."""
        _counts_of_one()  # learnt now, because it needs a backward of its own
        self._forget()
        sharded = sharded_by_name(module)
        whole = {id(p): p for name, p in module.named_parameters() if name not in sharded and self._may_wait(p)}
        shards = list({id(s.parameter): s for s in sharded.values() if self._may_wait(s.parameter)}.values())
        for key in [id(parameter) for parameter in module.parameters()]:
            if key in self._hooks and key not in whole:  # its weight has come back to stay, or it is trained no more
                with self._lock:
                    self._hooks.pop(key).remove()
                    self._retire(key)
        told = [reduction.module for reduction in self._reductions]
        new = {key: parameter for key, parameter in whole.items() if key not in self._hooks}
        new_shards = [s for s in shards if all(s.group is not one for one in told)]
        sizes = [p.nbytes for p in new.values()] + [local_of(s.parameter).nbytes + VECTOR_BYTES for s in new_shards]
        self._files.check_room(sizes, changes=True)
        for key, parameter in new.items():
            register: Callable[..., RemovableHandle] = parameter.register_post_accumulate_grad_hook
            self._hooks[key] = ParameterHooks(parameter, [register(self._accumulated)])
        for group in {id(s.group): s.group for s in new_shards}.values():
            self._reductions.append(_Reduction(group, self._reduced))
        for shard in sharded.values():
            (self._staying.discard if self._waits(shard.parameter) else self._staying.add)(id(shard.parameter))
        self._forget()  # of those that are to stay now
        waiting = [p for hooks in self._hooks.values() if (p := hooks.parameter) is not None]
        waiting += [shard.parameter for shard in shards]
        if self._freed is not None:
            to_come = sum(local_of(p).nbytes for p in waiting if id(p) not in self._memory)
            self._freed.expect(self._files.used_bytes + to_come)
        if whole or shards:
            nbytes = sum(local_of(p).nbytes for p in (*whole.values(), *(s.parameter for s in shards)))
            _log.info(
                "each backward changes %s of gradients, which the system writes to the drive where memory is short",
                format_sizes(nbytes)[0],
            )

    def _may_wait(self, parameter: torch.Tensor) -> bool:
        return self._takes(local_of(parameter)) and parameter.requires_grad and self._waits(parameter)

    def _takes(self, tensor: torch.Tensor) -> bool:
        return is_plain(tensor) and tensor.nbytes >= self._min_nbytes

    def _accumulated(self, parameter: torch.Tensor) -> None:
        """Autograd has made or changed a gradient."""
        gradient = parameter.grad
        if gradient is None or gradient.requires_grad or not self._takes(gradient) or not self._process.is_here:
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
        waiting = None if parameter.grad is None else self._moved(parameter, parameter.grad)
        if waiting is not None:
            parameter.grad = waiting
            self._memory[id(parameter)].send_out()

    def _reduced(self, group: Any, made: set[int]) -> None:
        """FSDP2 has spread the gradients of a group: each process has its part of the sum.

        Args:
            group: FSDP2's.
            made: numbers of the parameters whose gradients it has just made, and nothing else has.
        """
        if not self._process.is_here or all(id(parameter) in self._staying for parameter in _parameters_of(group)):
            return
        moving = []
        for parameter, gradient in _gradients_of(group):
            mapped = self._memory.get(id(parameter))
            if mapped is not None and mapped.key.cdata == local_of(gradient).untyped_storage()._cdata:
                mapped.send_out()  # it was added to in place
            elif id(parameter) in made:
                moving.append((parameter, gradient))
        with self._lock:
            if self._is_closed:
                return
            moved = [  # all of them, or the memory that they lie in would stay
                self._moved(parameter, gradient._local_tensor)
                if id(parameter) not in self._staying and self._takes(gradient._local_tensor)
                else _copied(gradient._local_tensor)
                for parameter, gradient in moving
            ]
            if any(local is None for local in moved):
                return
            for (parameter, gradient), local in zip(moving, moved, strict=True):
                gradient._local_tensor = local
                if (mapped := self._memory.get(id(parameter))) is not None:
                    mapped.send_out()

    def _moved(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return these values in memory that shows a file; ``None``: there is no room."""
        mapped, start = self._memory.get(id(parameter)), gradient.data_ptr() % VECTOR_BYTES
        try:
            if mapped is None or (mapped.nbytes, mapped.start) != (gradient.nbytes, start) or mapped.key.alive():
                self._retire(id(parameter))
                mapped = self._files.map_new(gradient.nbytes, start)
            waiting = TensorSpec.of(gradient)._replace(offset=0).view(mapped.show())
            self._memory[id(parameter)] = mapped
            if not _is_dense(gradient):
                return waiting.copy_(gradient)
            address = gradient.untyped_storage().data_ptr() + int(gradient.storage_offset()) * gradient.itemsize
            mapped.fill(Region(address, gradient.nbytes))
        except (StorageError, MemoryError) as error:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"a gradient has no place to wait in ({error}); it stays in memory, as do others like it, and "
                    "results are not affected",
                    stacklevel=2,
                )
            return None
        return waiting

    def _retire(self, key: int) -> None:
        """Set aside the memory of a parameter's gradient, which the program may still have."""
        if (mapped := self._memory.pop(key, None)) is not None:
            self._retired.append(mapped)

    def _forget(self) -> None:
        """Give back the place of gradients that are gone."""
        with self._lock:
            for key, hooks in list(self._hooks.items()):
                if hooks.parameter is None:
                    del self._hooks[key]
                    self._retire(key)
            self._reductions = [reduction for reduction in self._reductions if reduction.module is not None]
            sharded = {id(p) for reduction in self._reductions for p in _parameters_of(reduction.module)}
            self._staying &= sharded
            waiting = self._hooks.keys() | (sharded - self._staying)
            for key in self._memory.keys() - waiting:
                self._retire(key)
            for mapped in [mapped for mapped in self._retired if not mapped.key.alive()]:
                self._retired.remove(mapped)
                mapped.forget()

    def send_out(self) -> None:
        """All leave memory that something has touched, such as clipping; what is gone is forgotten."""
        self._forget()
        for mapped in list(self._memory.values()):
            mapped.send_out()

    def close(self) -> None:
        """Later gradients stay in memory; those that there are stay what they are. Idempotent."""
        with self._lock:
            self._is_closed = True
        for hooks in list(self._hooks.values()):
            hooks.remove()
        self._hooks.clear()
        for reduction in self._reductions:
            reduction.remove()
        self._reductions.clear()
        for mapped in (*self._memory.values(), *self._retired):
            mapped.make_private()
        self._memory.clear()
        self._retired.clear()


class _Reduction(MethodPatch):
    """Tells when a group's gradients have been spread over the processes.

    Not a hook of the parameters: there FSDP2 itself still holds the gradient.

    Args:
        group: FSDP2's.
        reduced: called with it, and with the numbers (``id``) of the parameters whose gradients FSDP2 has just made.
            Only their parameters hold these. A hook of the program could hold one, so a group with hooks gives none.
    """

    __slots__ = ("_reduced",)

    def __init__(self, group: Any, reduced: Callable[[Any, set[int]], None]) -> None:
        self._reduced = reduced
        super().__init__(group, "post_backward", label="the group of shards")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        group = self.module
        without = {id(parameter) for parameter in _parameters_of(group) if parameter.grad is None}
        result = self.__wrapped__(*args, **kwargs)
        if group is not None:
            hooked = any(getattr(p, "_post_accumulate_grad_hooks", None) for p in _parameters_of(group))
            self._reduced(group, set() if hooked or group._all_reduce_hook is not None else without)
        return result


def _parameters_of(group: Any) -> list[torch.Tensor]:
    """The sharded parameters of a group of FSDP2's."""
    return [] if group is None else [fsdp_param.sharded_param for fsdp_param in group.fsdp_params]


def _gradients_of(group: Any) -> list[tuple[torch.Tensor, Any]]:
    """Sharded parameters, with their gradients, that have one of which this process has a plain part."""
    pairs = [(parameter, parameter.grad) for parameter in _parameters_of(group)]
    return [(p, g) for p, g in pairs if g is not None and is_shard(g) and type(local_of(g)) is torch.Tensor]


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is aligned to vectors as it is."""
    start = tensor.data_ptr() % VECTOR_BYTES // tensor.itemsize
    if not start or not tensor.is_contiguous():
        return tensor.clone()
    return tensor.new_empty(start + tensor.numel())[start:].view(tensor.shape).copy_(tensor)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether it is all of the bytes from its first element on, in whatever order."""
    is_all = tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == tensor.nbytes
    return is_all or tensor.is_contiguous()


def _counts(parameter: torch.Tensor) -> tuple[int, int, int]:
    """Who refers to its gradient, in C++ and in Python, and to the memory of that."""
    gradient: Any = parameter.grad
    storage = gradient.untyped_storage()
    return gradient._use_count(), sys.getrefcount(gradient), sys.getrefcount(storage)


@functools.cache
def _counts_of_one() -> tuple[int, int, int]:
    """Return the counts of a gradient that only its parameter has, just accumulated."""
    found: list[tuple[int, int, int]] = []
    with torch.enable_grad(), torch.inference_mode(False):
        parameter = torch.zeros(2, requires_grad=True)
        register: Callable[..., RemovableHandle] = parameter.register_post_accumulate_grad_hook
        register(lambda one: found.append(_counts(one)))
        torch.autograd.backward((parameter * torch.ones(2)).sum())
    return found[0]
